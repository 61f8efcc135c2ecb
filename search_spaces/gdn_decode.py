"""The search space of gated-delta-net decode: one function a template."""

from __future__ import annotations

from ..kernels.base import Config
from ..kernels.device import DeviceSpec
from ..kernels.gdn_decode import GdnDecodeProblem
from .constraints import TILE_REGISTERS, Constraint
from .external import external_spaces
from .gdn_decode_stream import stream_space
from .gdn_decode_tilelang import tilelang_space
from .parameters import categorical, ordered, powers_of_two
from .space import SearchSpace

__all__ = ["SPACES", "triton_space"]


def triton_space(problem: GdnDecodeProblem, device: DeviceSpec) -> SearchSpace:
    """The space of the Triton template."""
    del device
    return SearchSpace(
        template="triton",
        parameters=(
            powers_of_two("block_v", 4, 1 << (problem.head_dim_v - 1).bit_length()),
            ordered("num_warps", 1, 2, 4, 8),
            categorical("state_eviction", "evict_normal", "evict_first"),
        ),
        constraints=(Constraint("state within registers", lambda c: _state_fits(problem, c)),),
        default=_config(8, 1),
        seeds=(
            # vLLM's packed decode has blocks of 32 and one warp.
            _config(32, 1),
            _config(16, 2),
            _config(32, 4, "evict_first"),
            _config(128, 8),
        ),
    )


def _config(block_v: int, num_warps: int, state_eviction: str = "evict_normal") -> Config:
    return Config.of(
        "triton",
        {"block_v": block_v, "num_warps": num_warps, "state_eviction": state_eviction},
    )


def _state_fits(problem: GdnDecodeProblem, config: Config) -> str | None:
    """The fp32 state and one product of its size live in registers while a token is taken in."""
    block_k = 1 << (problem.head_dim_k - 1).bit_length()
    needed = 2 * block_k * int(config["block_v"]) // (32 * int(config["num_warps"]))
    if needed > 2 * TILE_REGISTERS:
        return f"{needed // 2} registers a thread for the state, above {TILE_REGISTERS}"
    return None


SPACES = {
    "triton": triton_space,
    "triton_stream": stream_space,
    "tilelang": tilelang_space,
    **external_spaces("fla", "flashinfer"),
}
