"""Host side of the TileLang template: from a config to the compiled kernel and its grid."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from ...errors import UsageError
from ..base import Config, KernelTemplate, LaunchEstimate
from ..device import DeviceSpec
from ..source_hash import source_hash
from ..tilelang_spec import BoundTileLangKernel, TileLangKernelSpec
from .problem import DTYPE_BYTES, GdnDecodeProblem

if TYPE_CHECKING:
    # Compiling what the disk knows needs no torch.
    import torch

    from .reference import GdnDecodeInputs, GdnDecodeOutputs

__all__ = ["GdnDecodeTileLang", "GdnDecodeTileLangConfig", "GdnDecodeTileLangLauncher"]

_MODULE = f"{__package__}.tilelang_kernel"
_PROGRAM = "gdn_decode_tilelang"
_VECTOR = 4  # of the device code, which is not imported where it need not be compiled
_MAJOR_CAPABILITIES = (9, 10, 12)
"""Architectures that the program compiles for."""
HEAD_DIMS = (64, 96, 128, 192, 256)
MAX_GRID = 2**31 - 1


@dataclass(frozen=True)
class GdnDecodeTileLangConfig:
    """One config, typed."""

    block_v: int
    """Columns of a tile of the state."""
    threads: int
    lanes: int
    """Threads of a warp that share a column."""
    load: str
    """How tiles reach registers: one of ``LOADS`` of the device code."""
    store: str = "direct"
    """How they leave: one of ``STORES``."""
    block_tiles: int = 1
    """Tiles that a block walks, one after the other."""
    num_stages: int = 1
    """Tiles of the ring in shared memory."""
    state_eviction: str = "evict_normal"
    """L2 policy of TMA loads: ``evict_first`` (the state is read once)."""

    @classmethod
    def of(cls, config: Config) -> GdnDecodeTileLangConfig:
        """The typed form of a config of this template."""
        return cls(**config.as_dict())  # type: ignore[arg-type]

    @property
    def lead(self) -> int:
        """Tiles that are loaded ahead: ``load_lead`` of the device code."""
        return self.num_stages - (2 if self.store == "tma" else 1)

    def num_tiles(self, problem: GdnDecodeProblem) -> int:
        """Tiles of the states of all sequences."""
        return problem.batch * problem.num_v_heads * (problem.head_dim_v // self.block_v)


@dataclass(frozen=True)
class _Variant:
    """What of the inputs the kernel is compiled for, beside the problem."""

    gate_dtype: str
    beta_dtype: str
    slot_dtype: str = "int32"
    seqlen_dtype: str = "int32"
    has_slots: bool = True
    has_state_in: bool = True
    has_state_out: bool = True
    is_varlen: bool = False
    has_beta_sigmoid: bool = True
    beta_scale: float = 1.0
    is_aligned: bool = True


class GdnDecodeTileLang(KernelTemplate):
    """The recurrence with the state in registers; tiles of it may stream through a ring."""

    op = "gdn_decode"
    name = "tilelang"
    backend = "tilelang"

    def supports(self, problem: GdnDecodeProblem, device: DeviceSpec) -> str | None:
        """None, or why the problem cannot be served on the device."""
        for name in ("head_dim_k", "head_dim_v"):
            if getattr(problem, name) not in HEAD_DIMS:
                allowed = ", ".join(map(str, HEAD_DIMS))
                return f"{name}={getattr(problem, name)} is not one of {allowed}"
        if device.compute_capability[0] not in _MAJOR_CAPABILITIES:
            listing = ", ".join(f"{major}.x" for major in _MAJOR_CAPABILITIES)
            return f"compute capability {device.compute_capability_text} is not one of {listing}"
        states = problem.batch * problem.num_v_heads
        if states * problem.head_dim_v > MAX_GRID:
            return f"batch={problem.batch} has {states} states, more than tiles can be numbered for"
        return None

    def supports_tensors(
        self,
        problem: GdnDecodeProblem,
        inputs: GdnDecodeInputs,
        outputs: GdnDecodeOutputs | None = None,
    ) -> str | None:
        """None, or why it cannot serve these tensors."""
        del problem
        return _unsupported_tensors(inputs, outputs)

    def kernel_specs(
        self, problem: GdnDecodeProblem, config: Config
    ) -> tuple[TileLangKernelSpec, ...]:
        """The one kernel."""
        is_fused = problem.gate == "fused"
        gate_dtype = problem.dtype if is_fused else "float32"
        variant = _Variant(gate_dtype, gate_dtype, has_beta_sigmoid=is_fused)
        return (_spec(problem, GdnDecodeTileLangConfig.of(config), variant),)

    def build(
        self, problem: GdnDecodeProblem, config: Config, inputs: GdnDecodeInputs
    ) -> GdnDecodeTileLangLauncher:
        """A launcher for inputs of these dtypes on this device; no scratch memory."""
        return GdnDecodeTileLangLauncher(problem, GdnDecodeTileLangConfig.of(config), inputs)

    def estimate(
        self, problem: GdnDecodeProblem, config: Config, device: DeviceSpec
    ) -> tuple[LaunchEstimate, ...]:
        """Loads of the one launch."""
        typed = GdnDecodeTileLangConfig.of(config)
        tile = problem.head_dim_k * typed.block_v * DTYPE_BYTES[problem.state_dtype]
        in_flight = 1 if typed.load == "direct" else typed.lead
        return (
            LaunchEstimate(
                kernel=f"{_PROGRAM}_kernel",
                num_programs=-(-typed.num_tiles(problem) // typed.block_tiles),
                bytes_moved=problem.bytes_moved,
                flops=problem.flops,
                bytes_in_flight=tile * in_flight,
                serial_loads=2 + problem.num_steps + typed.block_tiles // in_flight,
            ),
        )

    def launch_key(self, problem: GdnDecodeProblem, config: Config) -> str:
        """The grid follows from the tiles and from how many a block walks."""
        typed = GdnDecodeTileLangConfig.of(config)
        return f"{typed.num_tiles(problem)} {typed.block_tiles}"

    def source_hash(self) -> str:
        """Hash of the device code, of this module and of how kernels are specialised."""
        package = __package__ or ""
        root = package.rpartition(".")[0]
        return source_hash((_MODULE, f"{package}.tilelang_template", f"{root}.tilelang_spec"))


def _spec(
    problem: GdnDecodeProblem, config: GdnDecodeTileLangConfig, variant: _Variant
) -> TileLangKernelSpec:
    return TileLangKernelSpec(
        module=_MODULE,
        factory="decode_program",
        program=_PROGRAM,
        parameters={
            "dtype": problem.dtype,
            "state_dtype": problem.state_dtype,
            **asdict(variant),
            "num_heads": problem.num_heads,
            "num_v_heads": problem.num_v_heads,
            "head_dim_k": problem.head_dim_k,
            "head_dim_v": problem.head_dim_v,
            "is_v_first": problem.state_layout == "VK",
            "is_gate_fused": problem.gate == "fused",
            "use_l2norm": problem.use_qk_l2norm,
            "block_v": config.block_v,
            "threads": config.threads,
            "lanes": config.lanes,
            "num_stages": config.num_stages,
            "load": config.load,
            "store": config.store,
            "state_eviction": config.state_eviction,
        },
        pass_configs={
            "tl.disable_warp_specialized": True,
            # Asynchronous copies are under way where the planner of shared memory does not see
            # them, and the barriers that the ring needs are in the program.
            "tl.disable_shared_memory_reuse": True,
            "tl.disable_thread_storage_sync": True,
        },
    )


class GdnDecodeTileLangLauncher:
    """The compiled kernel with its grid; holds no memory, so any stream may use it."""

    def __init__(
        self,
        problem: GdnDecodeProblem,
        config: GdnDecodeTileLangConfig,
        inputs: GdnDecodeInputs,
    ) -> None:
        import torch

        self.problem, self.config = problem, config
        major, minor = torch.cuda.get_device_capability(inputs.q.device)
        self.arch = int(10 * major + minor)
        self.num_blocks = -(-config.num_tiles(problem) // config.block_tiles)
        self._kernels: dict[_Variant, BoundTileLangKernel] = {}
        self._bound(_variant(inputs, out=inputs.v, state_out=inputs.state))

    def _bound(self, variant: _Variant) -> BoundTileLangKernel:
        """The kernel for these dtypes and this alignment, compiled at first use."""
        if variant not in self._kernels:
            self._kernels[variant] = _spec(self.problem, self.config, variant).bind(self.arch)
        return self._kernels[variant]

    def launch(self, inputs: GdnDecodeInputs, outputs: GdnDecodeOutputs) -> None:
        """Enqueues the one launch; the state written may be the state read.

        Raises:
            UsageError: the tensors are none that ``supports_tensors`` accepts.
        """
        reason = _unsupported_tensors(inputs, outputs)
        if reason is not None:
            raise UsageError(
                f"these tensors are not supported by gdn_decode/tilelang: {reason}; use template "
                "'triton', or let states start at multiples of 16 bytes and sequences follow one "
                "another"
            )
        variant = _variant(inputs, out=outputs.out, state_out=outputs.state)
        unit = _VECTOR if variant.is_aligned else 1
        # The program's tensors have one axis of tokens and one of states, and are checked for it.
        q, k, v, out = (_merged(x) for x in (inputs.q, inputs.k, inputs.v, outputs.out))
        states = [x for x in (inputs.state, outputs.state) if x is not None]
        self._bound(variant)(
            q,
            k,
            v,
            _merged(inputs.gate),
            _merged(inputs.beta),
            inputs.a_log,
            inputs.dt_bias,
            None if inputs.state is None else _merged(inputs.state),
            None if outputs.state is None else _merged(outputs.state),
            inputs.slots,
            inputs.cu_seqlens,
            out,
            inputs.scale,
            *(x.stride(axis) // unit for x in (q, k, v, out) for axis in (0, 1)),
            self.problem.batch,
            self.problem.num_steps,
            q.shape[0],
            states[0].shape[0] if states else 1,
            self.config.block_tiles,
            self.num_blocks,
        )


def _merged(x: torch.Tensor) -> torch.Tensor:
    """A view with the first two axes as one."""
    return x.view(x.shape[0] * x.shape[1], *x.shape[2:])


def _variant(
    inputs: GdnDecodeInputs, *, out: torch.Tensor, state_out: torch.Tensor | None
) -> _Variant:
    slots, cu_seqlens = inputs.slots, inputs.cu_seqlens
    tensors = (inputs.q, inputs.k, inputs.v, out)
    return _Variant(
        gate_dtype=_name(inputs.gate),
        beta_dtype=_name(inputs.beta),
        slot_dtype="int32" if slots is None else _name(slots),
        seqlen_dtype="int32" if cu_seqlens is None else _name(cu_seqlens),
        has_slots=slots is not None,
        has_state_in=inputs.state is not None,
        has_state_out=state_out is not None,
        is_varlen=cu_seqlens is not None,
        has_beta_sigmoid=inputs.has_beta_sigmoid,
        beta_scale=inputs.beta_scale,
        is_aligned=all(_is_aligned(x) for x in tensors),
    )


def _unsupported_tensors(inputs: GdnDecodeInputs, outputs: GdnDecodeOutputs | None) -> str | None:
    written = None if outputs is None else outputs.state
    for name, state in (("state", inputs.state), ("the state to write", written)):
        if state is not None and state.data_ptr() % 16:
            return f"{name} starts {state.data_ptr() % 16} bytes after a multiple of 16"
    tokens = [("q", inputs.q), ("k", inputs.k), ("v", inputs.v)]
    for name, x in [*tokens, *([] if outputs is None else [("out", outputs.out)])]:
        if x.shape[0] > 1 and x.stride(0) != x.shape[1] * x.stride(1):
            return f"{name} has strides {x.stride()}: sequences do not follow one another"
    return _unsupported_device(inputs.q)


def _unsupported_device(q: torch.Tensor) -> str | None:
    if q.device.type != "cuda":
        return f"q is on device {q.device}, and TileLang has no interpreter"
    return None


def _is_aligned(x: torch.Tensor) -> bool:
    """Whether vectors of every row are aligned."""
    is_start = x.data_ptr() % (_VECTOR * x.element_size()) == 0
    return is_start and all(stride % _VECTOR == 0 for stride in x.stride()[1:3])


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
