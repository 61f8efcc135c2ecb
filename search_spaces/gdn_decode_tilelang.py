"""The search space of gated-delta-net decode's TileLang template."""

from __future__ import annotations

from ..kernels.base import Config, ParameterValue
from ..kernels.device import DeviceSpec
from ..kernels.gdn_decode import GdnDecodeProblem
from ..kernels.gdn_decode.problem import DTYPE_BYTES
from .constraints import TILE_REGISTERS, Constraint, fits_shared_memory
from .parameters import ActiveWhen, categorical, ordered, powers_of_two
from .space import SearchSpace

__all__ = ["tilelang_space"]

_TEMPLATE = "tilelang"
_STREAMED = ActiveWhen("load", ("cp_async", "tma"))
_WARP = 32
_VECTOR = 4
"""Elements that a thread moves at once."""
_BARRIER_BYTES = 8


def tilelang_space(problem: GdnDecodeProblem, device: DeviceSpec) -> SearchSpace:
    """The space of the TileLang template."""
    return SearchSpace(
        template=_TEMPLATE,
        parameters=(
            powers_of_two("block_v", 4, 1 << (problem.head_dim_v.bit_length() - 1)),
            powers_of_two("threads", _WARP, 256),
            powers_of_two("lanes", 8, _WARP),
            categorical("load", "direct", "cp_async", "tma"),
            categorical("store", "direct", "tma", active_when=_STREAMED),
            powers_of_two("block_tiles", 2, 64, active_when=_STREAMED),
            ordered("num_stages", 2, 3, 4, 6, active_when=_STREAMED),
            categorical(
                "state_eviction",
                "evict_normal",
                "evict_first",
                active_when=ActiveWhen("load", ("tma",)),
            ),
        ),
        constraints=(
            Constraint("whole tiles", lambda c: _has_whole_tiles(problem, c)),
            Constraint("vectors of a thread", lambda c: _has_vectors(problem, c)),
            Constraint("state within registers", lambda c: _state_fits(problem, c)),
            Constraint("ring within a run", _ring_is_used),
            Constraint("shared memory", lambda c: _ring_fits(problem, device, c)),
            Constraint("blocks for the device", lambda c: _fills_device(problem, device, c)),
        ),
        default=_direct(problem, 8, 32, 32),
        seeds=_seeds(problem),
    )


def _has_whole_tiles(problem: GdnDecodeProblem, config: Config) -> str | None:
    block_v = int(config["block_v"])
    if problem.head_dim_v % block_v:
        return f"head_dim_v={problem.head_dim_v} is no multiple of block_v={block_v}"
    return None


def _has_vectors(problem: GdnDecodeProblem, config: Config) -> str | None:
    """Rows of a thread are vectors; so are its columns where V comes last."""
    lanes, block_v = int(config["lanes"]), int(config["block_v"])
    if problem.head_dim_k % (lanes * _VECTOR):
        return f"head_dim_k={problem.head_dim_k} gives {lanes} lanes no whole vectors of {_VECTOR}"
    least = _least_columns(problem, int(config["threads"]), lanes)
    if block_v < least:
        return f"block_v={block_v} is below {least}, the columns that a block takes at once"
    return None


def _state_fits(problem: GdnDecodeProblem, config: Config) -> str | None:
    """The fp32 tile, q and k twice, and what a column brings live in registers."""
    lanes = int(config["lanes"])
    columns = int(config["block_v"]) * lanes // int(config["threads"])
    rows = problem.head_dim_k // lanes
    needed = rows * columns + 3 * (rows + columns)
    if needed > TILE_REGISTERS:
        return f"about {needed} registers a thread for the state, above {TILE_REGISTERS}"
    return None


def _lead(config: Config) -> int:
    return int(config["num_stages"]) - (2 if config["store"] == "tma" else 1)


def _ring_is_used(config: Config) -> str | None:
    """A tile that TMA still stores keeps its place; places behind the last tile have no use."""
    if config["load"] == "direct":
        return None
    lead, tiles = _lead(config), int(config["block_tiles"])
    if lead < 1:
        return f"num_stages={config['num_stages']} leaves no tile to load ahead of stores by TMA"
    if lead >= tiles:
        return f"{lead} tiles ahead in runs of block_tiles={tiles}"
    return None


def _ring_fits(problem: GdnDecodeProblem, device: DeviceSpec, config: Config) -> str | None:
    if config["load"] == "direct":
        return None
    tile = problem.head_dim_k * int(config["block_v"]) * DTYPE_BYTES[problem.state_dtype]
    return fits_shared_memory(int(config["num_stages"]) * (tile + _BARRIER_BYTES), device)


def _fills_device(problem: GdnDecodeProblem, device: DeviceSpec, config: Config) -> str | None:
    """Runs of tiles must not leave multiprocessors without a block."""
    if config["load"] == "direct":
        return None
    tiles = problem.batch * problem.num_v_heads * problem.head_dim_v // int(config["block_v"])
    blocks = -(-tiles // int(config["block_tiles"]))
    if blocks < device.num_sms:
        return f"{blocks} blocks for {device.num_sms} multiprocessors"
    return None


def _direct(problem: GdnDecodeProblem, block_v: int, threads: int, lanes: int) -> Config:
    """A block for each tile, as hand-written kernels have it."""
    lanes = _lanes(problem, lanes)
    least = _least_columns(problem, threads, lanes)
    values: dict[str, ParameterValue] = {"threads": threads, "lanes": lanes, "load": "direct"}
    return Config.of(_TEMPLATE, {**values, "block_v": max(block_v, least)})


def _least_columns(problem: GdnDecodeProblem, threads: int, lanes: int) -> int:
    """Columns that all groups of a block take at once; vectors of them where V comes last."""
    return threads // lanes * (1 if problem.state_layout == "VK" else _VECTOR)


def _lanes(problem: GdnDecodeProblem, lanes: int) -> int:
    while problem.head_dim_k % (lanes * _VECTOR):
        lanes //= 2
    return lanes


def _seeds(problem: GdnDecodeProblem) -> tuple[Config, ...]:
    """One tile a block, and streams of tiles of 8 to 32 KiB in rings of each kind."""
    direct = ((16, 128, 32), (32, 128, 16), (4, 32, 32), (16, 64, 8))
    streams: tuple[dict[str, ParameterValue], ...] = (
        {"load": "tma", "store": "tma", "block_v": 16, "block_tiles": 8, "num_stages": 4},
        {"load": "tma", "store": "tma", "block_v": 32, "block_tiles": 16, "num_stages": 4},
        {"load": "tma", "store": "direct", "block_v": 16, "block_tiles": 8, "num_stages": 3},
        {"load": "tma", "store": "tma", "block_v": 64, "block_tiles": 4, "num_stages": 4},
        {"load": "cp_async", "store": "direct", "block_v": 16, "block_tiles": 8, "num_stages": 3},
        {"load": "cp_async", "store": "tma", "block_v": 32, "block_tiles": 4, "num_stages": 4},
    )
    configs = [_direct(problem, *shape) for shape in direct]
    lanes = _lanes(problem, 16)
    for stream in streams:
        block_v = max(int(stream["block_v"]), _least_columns(problem, 128, lanes))
        values = {**stream, "threads": 128, "lanes": lanes, "block_v": block_v}
        if stream["load"] == "tma":
            values["state_eviction"] = "evict_first"
        configs.append(Config.of(_TEMPLATE, values))
    return tuple(dict.fromkeys(configs))
