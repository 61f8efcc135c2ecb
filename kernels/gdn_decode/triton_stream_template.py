"""Host side of the Triton template that streams tiles: from a config to kernel and grid."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..base import Config, LaunchEstimate
from ..device import DeviceSpec
from ..source_hash import source_hash
from ..triton_spec import BoundTritonKernel, TritonKernelSpec, eviction_policy
from .problem import DTYPE_BYTES, GdnDecodeProblem
from .triton_template import (
    _TRITON_TYPES,
    GdnDecodeTriton,
    GdnDecodeTritonConfig,
    GdnDecodeTritonLauncher,
    _next_power_of_two,
    _spec,
    _Variant,
)

if TYPE_CHECKING:
    from .reference import GdnDecodeInputs

__all__ = ["GdnDecodeTritonStream", "GdnDecodeTritonStreamConfig", "GdnDecodeTritonStreamLauncher"]

_MODULE = f"{__package__}.triton_kernel_stream"
_KERNEL = "gdn_decode_stream_kernel"
MAX_REGISTERS = 255


@dataclass(frozen=True)
class GdnDecodeTritonStreamConfig:
    """One config, typed."""

    block_v: int
    """Columns of the state of a tile."""
    block_tiles: int
    """Tiles that one program walks, one after the other."""
    num_warps: int
    state_load: str
    """``evict_normal``, ``evict_first``: L2 policy; ``cg``: L2 alone, the normal policy."""
    state_store: str
    """``evict_normal``, ``evict_first``: L2 policy; ``cs``: what is not likely to be read again."""
    maxnreg: int
    """Upper bound of registers a thread; 255 is the hardware's."""
    launch_pdl: bool
    """Programs are placed while the launch before still runs, and wait for its end inside."""
    loads_ahead: bool = False
    """Whether the next tile is loaded before the current one is computed."""

    @classmethod
    def of(cls, config: Config) -> GdnDecodeTritonStreamConfig:
        """The typed form of a config of this template."""
        return cls(**config.as_dict())  # type: ignore[arg-type]

    def num_programs(self, problem: GdnDecodeProblem) -> int:
        """Programs of a launch."""
        runs = -(-problem.head_dim_v // (self.block_v * self.block_tiles))
        return problem.batch * problem.num_v_heads * runs


class GdnDecodeTritonStream(GdnDecodeTriton):
    """The recurrence over runs of tiles, with all loads under way as early as they can be."""

    name = "triton_stream"

    def kernel_specs(
        self, problem: GdnDecodeProblem, config: Config
    ) -> tuple[TritonKernelSpec, ...]:
        """The one kernel."""
        is_fused = problem.gate == "fused"
        gate_type = _TRITON_TYPES[problem.dtype] if is_fused else "fp32"
        variant = _Variant(gate_type, gate_type, has_beta_sigmoid=is_fused)
        return (_stream_spec(problem, GdnDecodeTritonStreamConfig.of(config), variant),)

    def build(
        self, problem: GdnDecodeProblem, config: Config, inputs: GdnDecodeInputs
    ) -> GdnDecodeTritonStreamLauncher:
        """A launcher for inputs of these dtypes, strides and this device; no scratch memory."""
        return GdnDecodeTritonStreamLauncher(
            problem, GdnDecodeTritonStreamConfig.of(config), inputs
        )

    def estimate(
        self, problem: GdnDecodeProblem, config: Config, device: DeviceSpec
    ) -> tuple[LaunchEstimate, ...]:
        """Loads of the one launch."""
        typed = GdnDecodeTritonStreamConfig.of(config)
        in_turn = 0 if typed.loads_ahead else typed.block_tiles
        tile = problem.head_dim_k * typed.block_v * DTYPE_BYTES[problem.state_dtype]
        return (
            LaunchEstimate(
                kernel=_KERNEL,
                num_programs=typed.num_programs(problem),
                bytes_moved=problem.bytes_moved,
                flops=problem.flops * _next_power_of_two(problem.head_dim_k) // problem.head_dim_k,
                bytes_in_flight=tile * (2 if typed.loads_ahead else 1),
                serial_loads=1 + problem.num_steps + in_turn,
            ),
        )

    def source_hash(self) -> str:
        """Hash of the device code, both templates' modules and how kernels are specialised."""
        package = __package__ or ""
        own = ("triton_kernel_stream", "triton_stream_template", "triton_kernel", "triton_template")
        modules = (f"{package}.{name}" for name in own)
        return source_hash((*modules, f"{package.rpartition('.')[0]}.triton_spec"))


def _stream_spec(
    problem: GdnDecodeProblem, config: GdnDecodeTritonStreamConfig, variant: _Variant
) -> TritonKernelSpec:
    """The kernel takes the arguments of the other template's, and further constants."""
    plain = GdnDecodeTritonConfig(config.block_v, config.num_warps, "evict_normal")
    spec = _spec(problem, plain, variant)
    constants = {
        name: spec.constexprs[name] for name in spec.constexprs if name != "STATE_EVICTION"
    }
    return replace(
        spec,
        module=_MODULE,
        name=_KERNEL,
        constexprs={
            **constants,
            "BLOCK_TILES": config.block_tiles,
            "LOADS_AHEAD": config.loads_ahead,
            "IS_ONE_STEP": problem.num_steps == 1 and not variant.is_varlen,
            "STATE_LOAD": eviction_policy(config.state_load),
            "STATE_STORE": eviction_policy(config.state_store),
            "PDL": config.launch_pdl,
        },
        maxnreg=None if config.maxnreg == MAX_REGISTERS else config.maxnreg,
        launch_pdl=config.launch_pdl,
    )


class GdnDecodeTritonStreamLauncher(GdnDecodeTritonLauncher):
    """The compiled kernel with its grid; holds no memory, so any stream may use it."""

    def __init__(
        self,
        problem: GdnDecodeProblem,
        config: GdnDecodeTritonStreamConfig,
        inputs: GdnDecodeInputs,
    ) -> None:
        if inputs.q.device.type != "cuda":
            config = replace(config, launch_pdl=False)  # the interpreter runs one kernel at a time
        self.stream_config = config
        plain = GdnDecodeTritonConfig(config.block_v, config.num_warps, "evict_normal")
        super().__init__(problem, plain, inputs)
        self.grid = (config.num_programs(problem), 1, 1)

    def _bound(self, variant: _Variant) -> BoundTritonKernel:
        """The kernel for these dtypes and this alignment, compiled at first use."""
        if variant not in self._kernels:
            spec = _stream_spec(self.problem, self.stream_config, variant)
            self._kernels[variant] = spec.bind(self.arch)
        return self._kernels[variant]
