"""FLA, FlashQLA and FlashInfer as templates: what of the problem each library serves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from ..base import Config
from ..device import DeviceSpec
from ..external import FLA, FLASH_QLA, FLASHINFER, ExternalTemplate
from .problem import GdnChunkProblem

if TYPE_CHECKING:
    import torch

    from .external_launcher import GdnChunkExternalLauncher
    from .inputs import GdnChunkInputs

__all__ = ["GdnChunkExternal", "GdnChunkFla", "GdnChunkFlashInfer", "GdnChunkFlashQla"]

_HALF = ("bfloat16", "float16")


class GdnChunkExternal(ExternalTemplate):
    """A library's forward over packed sequences whose bounds the host knows."""

    op = "gdn_chunk_fwd"
    sources = tuple(f"{__package__}.external_{name}" for name in ("template", "launcher", "bounds"))
    has_backward: ClassVar[bool] = False
    """Whether its public function can be differentiated."""

    def supports_tensors(
        self, problem: GdnChunkProblem, inputs: GdnChunkInputs, outputs: Any = None
    ) -> str | None:
        """None, or that the library would read bounds on the device, or freeze them in a graph.

        Libraries plan by the lengths of the sequences. A call that only has them on the device
        would wait for it, and a captured graph would keep the plan while its bounds change.
        """
        if inputs.cu_seqlens is None:
            return None
        if inputs.cu_seqlens_cpu is None:
            return "it plans by the bounds of packed sequences, and there is no cu_seqlens_cpu"
        if inputs.q.is_cuda and _is_capturing():
            return "a captured graph would keep the plan for the bounds of packed sequences"
        return None

    def differentiable(
        self, problem: GdnChunkProblem, inputs: GdnChunkInputs, *, wants_state: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(output, final states) in autograd's graph; only of a library that has a backward."""
        from .external_training import differentiable

        return differentiable(problem, inputs, self.name, self.library, wants_state=wants_state)

    def build(
        self, problem: GdnChunkProblem, config: Config, inputs: GdnChunkInputs
    ) -> GdnChunkExternalLauncher:
        """A launcher for any number of tokens; the library compiles and tunes at the first call."""
        from .external_launcher import GdnChunkExternalLauncher

        return GdnChunkExternalLauncher(problem, self.name, self.library)


class GdnChunkFla(GdnChunkExternal):
    """Flash-linear-attention's Triton kernels, which tune themselves at the first call."""

    name = "fla"
    backend = "triton"
    library = FLA
    module = "fla.ops.gated_delta_rule.chunk"
    has_backward = True

    def refusal(self, problem: GdnChunkProblem, device: DeviceSpec) -> str | None:
        """None, or why FLA cannot serve the problem on the device."""
        if device.compute_capability < (8, 0):
            return f"compute capability {device.compute_capability_text} is below 8.0"
        if problem.head_dim_k > 256:
            return f"head_dim_k={problem.head_dim_k} is above 256"
        return None


class GdnChunkFlashQla(GdnChunkExternal):
    """FlashQLA's TileLang kernels, with its own choice of context parallelism."""

    name = "flash_qla"
    backend = "tilelang"
    library = FLASH_QLA
    module = "flash_qla"
    has_backward = True
    capabilities = ((9, 0), (10, 0), (10, 3), (12, 0), (12, 1))

    def refusal(self, problem: GdnChunkProblem, device: DeviceSpec) -> str | None:
        """None, or why FlashQLA cannot serve the problem on the device."""
        if device.compute_capability not in self.capabilities:
            return f"compute capability {device.compute_capability_text} is none that it has"
        if problem.use_qk_l2norm:
            return "its norm of q and k is compiled by torch at the first call: normalise before"
        is_sm120 = device.compute_capability >= (12, 0)
        dtypes = ("bfloat16",) if is_sm120 else _HALF  # fp16 does not compile for sm_120
        return _half_refusal(problem, dtypes)


class GdnChunkFlashInfer(GdnChunkExternal):
    """FlashInfer's CuTe kernels; states go in and out as [V, K]."""

    name = "flashinfer"
    backend = "cute"
    library = FLASHINFER
    module = "flashinfer.gdn_prefill"

    def refusal(self, problem: GdnChunkProblem, device: DeviceSpec) -> str | None:
        """None, or why FlashInfer cannot serve the problem on the device."""
        if device.compute_capability[0] not in (9, 10, 12):
            return f"compute capability {device.compute_capability_text} is none that it has"
        if problem.use_qk_l2norm:
            return "it takes the argument for the norm of q and k, and does nothing with it"
        if problem.beta_dtype != "float32":
            return f"beta_dtype={problem.beta_dtype!r} is not float32"
        return _half_refusal(problem, _HALF)


def _half_refusal(problem: GdnChunkProblem, dtypes: tuple[str, ...]) -> str | None:
    """What FlashQLA and FlashInfer both ask."""
    if (problem.head_dim_k, problem.head_dim_v) != (128, 128):
        return f"head dims {problem.head_dim_k} and {problem.head_dim_v} are not both 128"
    if problem.dtype not in dtypes:
        return f"dtype={problem.dtype!r} is not one of {', '.join(dtypes)}"
    if problem.gate != "given":
        return f"gate={problem.gate!r}: it takes the log decay alone"
    if problem.gate_dtype != "float32":
        return f"gate_dtype={problem.gate_dtype!r} is not float32, and sums of it would be rounded"
    return None


def _is_capturing() -> bool:
    import torch

    return torch.cuda.is_current_stream_capturing()
