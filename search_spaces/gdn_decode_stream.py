"""The search space of gated-delta-net decode's Triton template that streams tiles."""

from __future__ import annotations

from ..kernels.base import Config, ParameterValue
from ..kernels.device import DeviceSpec
from ..kernels.gdn_decode import GdnDecodeProblem
from .constraints import TILE_REGISTERS, Constraint
from .parameters import ActiveWhen, categorical, ordered, powers_of_two
from .space import SearchSpace

__all__ = ["stream_space"]

_TEMPLATE = "triton_stream"
_MAX_TILES = 8
_OTHER_REGISTERS = 24
"""q, k and addresses."""


def stream_space(problem: GdnDecodeProblem, device: DeviceSpec) -> SearchSpace:
    """The space of the template."""
    del device
    several = tuple(1 << i for i in range(1, _MAX_TILES.bit_length()))
    return SearchSpace(
        template=_TEMPLATE,
        parameters=(
            powers_of_two("block_v", 4, _columns(problem)),
            powers_of_two("block_tiles", 1, _MAX_TILES),
            ordered("num_warps", 1, 2, 4),
            categorical("state_load", "evict_normal", "evict_first", "cg"),
            categorical("state_store", "evict_normal", "evict_first", "cs"),
            ordered("maxnreg", 64, 96, 128, 255),
            categorical("launch_pdl", True, False),
            categorical("loads_ahead", True, False, active_when=ActiveWhen("block_tiles", several)),
        ),
        constraints=(
            Constraint("run within the head", lambda c: _run_fits(problem, c)),
            Constraint("state within registers", lambda c: _state_fits(problem, c)),
        ),
        default=_config(8, launch_pdl=False),
        seeds=_seeds(),
    )


def _columns(problem: GdnDecodeProblem) -> int:
    return 1 << (problem.head_dim_v - 1).bit_length()


def _config(
    block_v: int,
    block_tiles: int = 1,
    *,
    load: str = "evict_normal",
    store: str = "evict_normal",
    maxnreg: int = 255,
    launch_pdl: bool = True,
    loads_ahead: bool = True,
) -> Config:
    """One warp a program: sums along K are then shuffles, and nothing waits at a barrier."""
    ahead: dict[str, ParameterValue] = {"loads_ahead": loads_ahead} if block_tiles > 1 else {}
    return Config.of(
        _TEMPLATE,
        {
            "block_v": block_v,
            "block_tiles": block_tiles,
            "num_warps": 1,
            "state_load": load,
            "state_store": store,
            "maxnreg": maxnreg,
            "launch_pdl": launch_pdl,
            **ahead,
        },
    )


def _seeds() -> tuple[Config, ...]:
    """One tile a program under each policy, and runs of tiles."""
    first = "evict_first"
    return (
        _config(4, load=first, store=first),
        _config(4, load=first, store=first, launch_pdl=False),
        _config(8, load=first, store=first),
        _config(8),
        _config(8, maxnreg=64),
        _config(8, load="cg"),
        _config(8, load=first),
        _config(8, store=first),
        _config(8, store="cs"),
        _config(16),
        _config(4, 2, load=first, store=first),
        _config(8, 2),
        _config(8, 4),
        _config(8, 4, store="cs"),
        _config(16, 4, loads_ahead=False),
    )


def _run_fits(problem: GdnDecodeProblem, config: Config) -> str | None:
    """Tiles of a run belong to one state."""
    run, columns = int(config["block_v"]) * int(config["block_tiles"]), _columns(problem)
    if run > columns:
        return f"a run of {run} columns, above the {columns} of head_dim_v={problem.head_dim_v}"
    return None


def _state_fits(problem: GdnDecodeProblem, config: Config) -> str | None:
    """The tile in fp32, and the next one where it is loaded ahead, live in registers."""
    block_k = 1 << (problem.head_dim_k - 1).bit_length()
    tile = block_k * int(config["block_v"]) // (32 * int(config["num_warps"]))
    needed = tile * (2 if config.get("loads_ahead") else 1)
    bound = min(int(config["maxnreg"]) - _OTHER_REGISTERS, TILE_REGISTERS)
    if needed > bound:
        return f"{needed} registers a thread for the state, above {bound}"
    return None
