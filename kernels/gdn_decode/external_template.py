"""FLA and FlashInfer as templates of decode: what of the problem each library serves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..base import Config
from ..device import DeviceSpec
from ..external import FLA, FLASHINFER, ExternalTemplate
from .problem import GdnDecodeProblem

if TYPE_CHECKING:
    from .external_launcher import FlaDecodeLauncher, FlashInferDecodeLauncher
    from .reference import GdnDecodeInputs, GdnDecodeOutputs

__all__ = ["GdnDecodeFla", "GdnDecodeFlashInfer"]

_HEAD_DIM = 128
_SOURCES = (
    f"{__package__}.external_template",
    f"{__package__}.external_launcher",
    f"{__package__}.triton_kernel_rows",
)


class GdnDecodeFla(ExternalTemplate):
    """Flash-linear-attention's fused recurrent kernel.

    It knows no slots: states are gathered before and scattered after it, in its time.
    """

    op = "gdn_decode"
    name = "fla"
    backend = "triton"
    library = FLA
    module = "fla.ops.gated_delta_rule.fused_recurrent"
    sources = _SOURCES

    def refusal(self, problem: GdnDecodeProblem, device: DeviceSpec) -> str | None:
        """None, or why FLA cannot serve the problem on the device."""
        if device.compute_capability < (8, 0):
            return f"compute capability {device.compute_capability_text} is below 8.0"
        return None

    def supports_tensors(
        self,
        problem: GdnDecodeProblem,
        inputs: GdnDecodeInputs,
        outputs: GdnDecodeOutputs | None = None,
    ) -> str | None:
        """None, or that slots of packed sequences are not gathered."""
        if inputs.cu_seqlens is not None and inputs.slots is not None:
            return "it takes no slots, and those of packed sequences are not gathered for it"
        return None

    def build(
        self, problem: GdnDecodeProblem, config: Config, inputs: GdnDecodeInputs
    ) -> FlaDecodeLauncher:
        """A launcher for inputs of any strides; the library compiles at the first call."""
        from .external_launcher import FlaDecodeLauncher

        return FlaDecodeLauncher(problem, self.library)


class GdnDecodeFlashInfer(ExternalTemplate):
    """FlashInfer's CuTe kernel for fp32 states with V first, updated in their pool."""

    op = "gdn_decode"
    name = "flashinfer"
    backend = "cute"
    library = FLASHINFER
    module = "flashinfer.gdn_decode"
    sources = _SOURCES
    is_in_place = True

    def refusal(self, problem: GdnDecodeProblem, device: DeviceSpec) -> str | None:
        """None, or why FlashInfer cannot serve the problem on the device."""
        dims = (problem.head_dim_k, problem.head_dim_v)
        capability = device.compute_capability_text
        needs = (
            (device.compute_capability >= (9, 0), f"compute capability {capability} is below 9.0"),
            (dims == (_HEAD_DIM, _HEAD_DIM), f"head dims {dims[0]} and {dims[1]} are not both 128"),
            (problem.num_steps == 1, f"num_steps={problem.num_steps}: its kernel takes one"),
            (problem.state_layout == "VK", "state_layout='KV': its kernel for that has no slots"),
            (
                problem.state_dtype == "float32",
                f"state_dtype={problem.state_dtype!r}: its kernel would write row 0 for what is "
                "skipped",
            ),
            (problem.dtype == "bfloat16", f"dtype={problem.dtype!r}: its kernel writes bfloat16"),
            (problem.gate == "fused", f"gate={problem.gate!r}: it computes the gate itself"),
        )
        return next((reason for is_met, reason in needs if not is_met), None)

    def supports_tensors(
        self,
        problem: GdnDecodeProblem,
        inputs: GdnDecodeInputs,
        outputs: GdnDecodeOutputs | None = None,
    ) -> str | None:
        """None, or what of the tensors FlashInfer cannot take."""
        if inputs.cu_seqlens is not None:
            return "it takes no packed sequences"
        if inputs.state is None or (outputs is not None and outputs.state is None):
            return "it needs a state, and updates it"
        if inputs.beta_scale != 1.0:
            return f"it has no factor for beta, here {inputs.beta_scale}"
        if inputs.gate.dtype != inputs.q.dtype or inputs.beta.dtype != inputs.q.dtype:
            return f"its gates must be {inputs.q.dtype} like q"
        tensors = (inputs.q, inputs.k, inputs.v)
        if not all(x.is_contiguous() and x.data_ptr() % 16 == 0 for x in tensors):
            return "q, k and v must be contiguous, at a multiple of 16 bytes"
        return None

    def build(
        self, problem: GdnDecodeProblem, config: Config, inputs: GdnDecodeInputs
    ) -> FlashInferDecodeLauncher:
        """A launcher; the library compiles at the first call."""
        from .external_launcher import FlashInferDecodeLauncher

        return FlashInferDecodeLauncher(problem, self.library)
