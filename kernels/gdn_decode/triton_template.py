"""Host side of the Triton template: from a config to the compiled kernel and its grid."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..base import Config, KernelTemplate, LaunchEstimate
from ..device import DeviceSpec
from ..source_hash import source_hash
from ..triton_spec import BoundTritonKernel, TritonKernelSpec, eviction_policy
from .problem import DTYPE_BYTES, GdnDecodeProblem

if TYPE_CHECKING:
    import torch

    from .reference import GdnDecodeInputs, GdnDecodeOutputs

__all__ = ["GdnDecodeTriton", "GdnDecodeTritonConfig", "GdnDecodeTritonLauncher"]

_MODULE = f"{__package__}.triton_kernel"
_TRITON_TYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_INDEX_TYPES = {"int32": "i32", "int64": "i64"}
HEAD_DIMS = (64, 96, 128, 192, 256)


@dataclass(frozen=True)
class GdnDecodeTritonConfig:
    """One config, typed."""

    block_v: int
    """Columns of the state one program owns."""
    num_warps: int
    state_eviction: str
    """L2 policy of the state: ``evict_first`` (it is read and written once), ``evict_normal``."""

    @classmethod
    def of(cls, config: Config) -> GdnDecodeTritonConfig:
        """The typed form of a config of this template."""
        return cls(**config.as_dict())  # type: ignore[arg-type]


@dataclass(frozen=True)
class _Variant:
    """What of the inputs the kernel is compiled for, beside the problem."""

    gate_type: str
    beta_type: str
    slot_type: str = "i32"
    seqlen_type: str = "i32"
    has_slots: bool = True
    has_state_in: bool = True
    has_state_out: bool = True
    is_varlen: bool = False
    has_beta_sigmoid: bool = True
    beta_scale: float = 1.0
    is_aligned: bool = True


class GdnDecodeTriton(KernelTemplate):
    """The recurrence with the state in registers, split over V."""

    op = "gdn_decode"
    name = "triton"
    backend = "triton"

    def supports(self, problem: GdnDecodeProblem, device: DeviceSpec) -> str | None:
        """None, or why the problem cannot be served on the device."""
        for name in ("head_dim_k", "head_dim_v"):
            if getattr(problem, name) not in HEAD_DIMS:
                allowed = ", ".join(map(str, HEAD_DIMS))
                return f"{name}={getattr(problem, name)} is not one of {allowed}"
        if device.compute_capability < (9, 0):
            return f"compute capability {device.compute_capability_text} is below 9.0"
        return None

    def kernel_specs(
        self, problem: GdnDecodeProblem, config: Config
    ) -> tuple[TritonKernelSpec, ...]:
        """The one kernel."""
        is_fused = problem.gate == "fused"
        gate_type = _TRITON_TYPES[problem.dtype] if is_fused else "fp32"
        variant = _Variant(gate_type, gate_type, has_beta_sigmoid=is_fused)
        return (_spec(problem, GdnDecodeTritonConfig.of(config), variant),)

    def build(
        self, problem: GdnDecodeProblem, config: Config, inputs: GdnDecodeInputs
    ) -> GdnDecodeTritonLauncher:
        """A launcher for inputs of these dtypes, strides and this device; no scratch memory."""
        return GdnDecodeTritonLauncher(problem, GdnDecodeTritonConfig.of(config), inputs)

    def estimate(
        self, problem: GdnDecodeProblem, config: Config, device: DeviceSpec
    ) -> tuple[LaunchEstimate, ...]:
        """Loads of the one launch."""
        typed = GdnDecodeTritonConfig.of(config)
        v_blocks = -(-problem.head_dim_v // typed.block_v)
        state_bytes = DTYPE_BYTES[problem.state_dtype]
        return (
            LaunchEstimate(
                kernel="gdn_decode_kernel",
                num_programs=problem.batch * problem.num_v_heads * v_blocks,
                bytes_moved=problem.bytes_moved,
                flops=problem.flops * _next_power_of_two(problem.head_dim_k) // problem.head_dim_k,
                bytes_in_flight=problem.head_dim_k * typed.block_v * state_bytes,
                serial_loads=2 + problem.num_steps,
            ),
        )

    def source_hash(self) -> str:
        """Hash of the device code, of this module and of how kernels are specialised."""
        package = __package__ or ""
        root = package.rpartition(".")[0]
        return source_hash((_MODULE, f"{package}.triton_template", f"{root}.triton_spec"))


def _spec(
    problem: GdnDecodeProblem, config: GdnDecodeTritonConfig, variant: _Variant
) -> TritonKernelSpec:
    dtype, state = _TRITON_TYPES[problem.dtype], _TRITON_TYPES[problem.state_dtype]
    strides = tuple(
        f"{name}_stride_{axis}" for name in ("q", "k", "v", "out") for axis in ("t", "h")
    )
    pointers = ("q", "k", "v", "out", "state_in", "state_out")
    return TritonKernelSpec(
        module=_MODULE,
        name="gdn_decode_kernel",
        signature={
            **dict.fromkeys(("q", "k", "v"), f"*{dtype}"),
            "gate": f"*{variant.gate_type}",
            "beta": f"*{variant.beta_type}",
            **dict.fromkeys(("a_log", "dt_bias"), "*fp32"),
            **dict.fromkeys(("state_in", "state_out"), f"*{state}"),
            "slots": f"*{variant.slot_type}",
            "cu_seqlens": f"*{variant.seqlen_type}",
            "out": f"*{dtype}",
            "scale": "fp32",
            **dict.fromkeys(strides, "i64"),
            "num_steps": "i32",
        },
        constexprs={
            "NUM_HEADS": problem.num_heads,
            "NUM_V_HEADS": problem.num_v_heads,
            "HEAD_DIM_K": problem.head_dim_k,
            "HEAD_DIM_V": problem.head_dim_v,
            "BLOCK_K": _next_power_of_two(problem.head_dim_k),
            "BLOCK_V": config.block_v,
            "STATE_LAYOUT": problem.state_layout,
            "GATE": problem.gate,
            "BETA": "sigmoid" if variant.has_beta_sigmoid else "given",
            "BETA_SCALE": variant.beta_scale,
            "USE_L2NORM": problem.use_qk_l2norm,
            "HAS_SLOTS": variant.has_slots,
            "HAS_STATE_IN": variant.has_state_in,
            "HAS_STATE_OUT": variant.has_state_out,
            "IS_VARLEN": variant.is_varlen,
            "STATE_EVICTION": eviction_policy(config.state_eviction),
        },
        aligned=frozenset((*pointers, *strides) if variant.is_aligned else ()),
        num_warps=config.num_warps,
        num_stages=1,
    )


def _next_power_of_two(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()


class GdnDecodeTritonLauncher:
    """The compiled kernel with its grid; holds no memory, so any stream may use it."""

    def __init__(
        self,
        problem: GdnDecodeProblem,
        config: GdnDecodeTritonConfig,
        inputs: GdnDecodeInputs,
    ) -> None:
        self.problem, self.config = problem, config
        self.arch = _arch_of(inputs.q.device)
        v_blocks = -(-problem.head_dim_v // config.block_v)
        self.grid = (problem.batch * problem.num_v_heads * v_blocks, 1, 1)
        self._kernels: dict[_Variant, BoundTritonKernel] = {}
        self._bound(_variant(inputs, out=inputs.v, state_out=inputs.state))

    def _bound(self, variant: _Variant) -> BoundTritonKernel:
        """The kernel for these dtypes and this alignment, compiled at first use."""
        if variant not in self._kernels:
            self._kernels[variant] = _spec(self.problem, self.config, variant).bind(self.arch)
        return self._kernels[variant]

    def launch(self, inputs: GdnDecodeInputs, outputs: GdnDecodeOutputs) -> None:
        """Enqueues the one launch; the state written may be the state read."""
        q, k, v, out = inputs.q, inputs.k, inputs.v, outputs.out
        kernel = self._bound(_variant(inputs, out=out, state_out=outputs.state))
        # A pointer that the kernel was compiled not to read.
        unused = inputs.gate
        kernel(
            self.grid,
            q,
            k,
            v,
            inputs.gate,
            inputs.beta,
            _or(inputs.a_log, unused),
            _or(inputs.dt_bias, unused),
            _or(inputs.state, unused),
            _or(outputs.state, unused),
            _or(inputs.slots, unused),
            _or(inputs.cu_seqlens, unused),
            out,
            inputs.scale,
            *(x.stride(axis) for x in (q, k, v, out) for axis in (1, 2)),
            self.problem.num_steps,
        )


def _or(tensor: torch.Tensor | None, unused: torch.Tensor) -> torch.Tensor:
    return unused if tensor is None else tensor


def _variant(
    inputs: GdnDecodeInputs, *, out: torch.Tensor, state_out: torch.Tensor | None
) -> _Variant:
    slots, cu_seqlens = inputs.slots, inputs.cu_seqlens
    tensors = [x for x in (inputs.q, inputs.k, inputs.v, out) if x is not None]
    states = [x for x in (inputs.state, state_out) if x is not None]
    return _Variant(
        gate_type=_TRITON_TYPES[_name(inputs.gate)],
        beta_type=_TRITON_TYPES[_name(inputs.beta)],
        slot_type="i32" if slots is None else _INDEX_TYPES[_name(slots)],
        seqlen_type="i32" if cu_seqlens is None else _INDEX_TYPES[_name(cu_seqlens)],
        has_slots=slots is not None,
        has_state_in=inputs.state is not None,
        has_state_out=state_out is not None,
        is_varlen=cu_seqlens is not None,
        has_beta_sigmoid=inputs.has_beta_sigmoid,
        beta_scale=inputs.beta_scale,
        is_aligned=all(x.data_ptr() % 16 == 0 for x in (*tensors, *states))
        and all(s % 16 == 0 for x in tensors for s in x.stride()[1:3]),
    )


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _arch_of(device: torch.device) -> int:
    if device.type != "cuda":
        return 0  # the interpreter: nothing is compiled
    import torch

    major, minor = torch.cuda.get_device_capability(device)
    return int(10 * major + minor)
