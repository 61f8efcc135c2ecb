"""The search space of the FP4 attention backward.

The algorithm is one choice; the tiles of each pass are a space of their own. Accuracy belongs to
the operation: no parameter changes it.
"""

from __future__ import annotations

from ..kernels.base import Config, ParameterValue
from ..kernels.device import DeviceSpec
from ..kernels.fp4_attention_bwd import Fp4AttentionBwdProblem
from .constraints import Constraint, fits_shared_memory
from .parameters import ActiveWhen, Parameter, categorical, ordered
from .space import SearchSpace

__all__ = ["SPACES", "triton_space"]

_PASSES = ("dkdv", "dk", "dv", "dq")
_SUMS = {"dkdv": 2, "dk": 1, "dv": 1, "dq": 1}
"""Gradients that a pass sums up."""
_SCORES = {"dkdv": 2, "dk": 2, "dv": 1, "dq": 2}
"""Tiles of scores: P, and dP where the pass has it."""
_HELD_TOKEN_BYTES = {"dkdv": 1, "dk": 1, "dv": 0, "dq": 1}
"""FP8 bytes an element of what a program keeps, beside Q or K: V, or dO."""
_LOOP_TOKEN_BYTES = {"dkdv": 3, "dk": 2, "dv": 1, "dq": 2}
"""FP8 bytes an element of what a step loads, beside Q or K."""
_MAX_REGISTERS = 256
"""Of the 255 of a thread: P and dP are over before the product that takes most begins."""
_CODE_BYTES, _VALUE_BYTES = 0.5625, 2
_TMEM_COLUMNS = 384
"""Of 512: the rest is for FP8 operands that come from registers."""


def triton_space(problem: Fp4AttentionBwdProblem, device: DeviceSpec) -> SearchSpace:
    """The space of the Triton template."""
    return SearchSpace(
        template="triton",
        parameters=_parameters(problem, device),
        constraints=(
            Constraint("tiles within shared memory", lambda c: _fits_smem(problem, device, c)),
            Constraint("tiles within registers", lambda c: _fits_registers(problem, c)),
            Constraint("tensor memory", lambda c: _fits_tmem(problem, device, c)),
        ),
        default=_default(problem, device),
        seeds=_seeds(problem, device),
    )


def _has_tensor_memory(device: DeviceSpec) -> bool:
    return device.compute_capability[0] == 10


def _parameters(problem: Fp4AttentionBwdProblem, device: DeviceSpec) -> tuple[Parameter, ...]:
    found: list[Parameter] = [
        categorical("algorithm", "together", "apart"),
        ordered("prepare_block_m", 16, 32, 64, 128, part="prepare"),
        ordered("prepare_num_warps", 2, 4, 8, part="prepare"),
    ]
    # With 64 rows, Triton takes 16-bit products in place of FP4 ones on sm_100.
    held = (128,) if problem.products == "native" and _has_tensor_memory(device) else (64, 128)
    for part in _PASSES:
        condition = {
            "dkdv": ActiveWhen("algorithm", ("together",)),
            "dq": None,
        }.get(part, ActiveWhen("algorithm", ("apart",)))
        is_dq = part == "dq"
        rows, keys = (held, (32, 64, 128)) if is_dq else ((32, 64, 128), held)
        found += [
            ordered(f"{part}_block_m", *rows, active_when=condition, part=part),
            ordered(f"{part}_block_n", *keys, active_when=condition, part=part),
            ordered(f"{part}_num_warps", 4, 8, active_when=condition, part=part),
            ordered(f"{part}_num_stages", 1, 2, 3, 4, active_when=condition, part=part),
        ]
    return tuple(found)


def _config(algorithm: str, **tiles: tuple[int, int, int, int]) -> Config:
    """A config from (block_m, block_n, num_warps, num_stages) of each pass."""
    values: dict[str, ParameterValue] = {
        "algorithm": algorithm,
        "prepare_block_m": 64,
        "prepare_num_warps": 4,
    }
    for part in ("dkdv", "dq") if algorithm == "together" else ("dk", "dv", "dq"):
        block_m, block_n, num_warps, num_stages = tiles[part]
        values |= {f"{part}_block_m": block_m, f"{part}_block_n": block_n}
        values |= {f"{part}_num_warps": num_warps, f"{part}_num_stages": num_stages}
    return Config.of("triton", values)


def _default(problem: Fp4AttentionBwdProblem, device: DeviceSpec) -> Config:
    """Spills nowhere; fits the 99 KiB of shared memory of the smallest device."""
    if _has_tensor_memory(device):
        tile = (64, 128, 8, 2)
        if problem.products == "native":
            return _config("together", dkdv=tile, dq=(128, 64, 8, 2))
        return _config("apart", dk=tile, dv=tile, dq=(128, 64, 8, 2))
    if device.arch >= 120:
        tile = (64, 64, 8, 2) if problem.products == "native" else (32, 64, 8, 2)
        return _config("together", dkdv=tile, dq=(64, 32, 8, 2))
    return _config("together", dkdv=(64, 64, 8, 2), dq=(128, 64, 8, 2))


def _seeds(problem: Fp4AttentionBwdProblem, device: DeviceSpec) -> tuple[Config, ...]:
    """Both algorithms; wide tiles for one block on a multiprocessor, narrow ones for two."""
    if _has_tensor_memory(device):
        wide, deep = (64, 128, 8, 2), (64, 128, 8, 3)
        if problem.products == "native":
            return (
                _config("together", dkdv=deep, dq=(128, 128, 8, 2)),
                _config("apart", dk=wide, dv=deep, dq=(128, 64, 8, 3)),
            )
        # Both gradients together spill, and so do three stages of dK.
        return (
            _config("apart", dk=wide, dv=deep, dq=(128, 64, 8, 3)),
            _config("apart", dk=wide, dv=(32, 128, 8, 3), dq=(128, 32, 8, 3)),
        )
    if device.arch >= 120:
        # With two stages dK spills where nothing is masked.
        return (
            _config("together", dkdv=(32, 64, 8, 3), dq=(64, 32, 8, 3)),
            _config("apart", dk=(32, 64, 8, 1), dv=(32, 64, 8, 2), dq=(64, 32, 4, 2)),
        )
    return (
        _config("together", dkdv=(64, 64, 8, 3), dq=(128, 64, 8, 3)),
        _config("apart", dk=(64, 128, 8, 2), dv=(64, 128, 8, 2), dq=(64, 64, 4, 2)),
        _config("apart", dk=(64, 64, 4, 2), dv=(64, 64, 4, 2), dq=(128, 64, 8, 2)),
        _config("apart", dk=(64, 128, 8, 3), dv=(128, 128, 8, 2), dq=(128, 128, 8, 1)),
    )


def _passes(config: Config) -> tuple[tuple[str, int, int], ...]:
    """Name, tokens that a program keeps and tokens that a step takes in, of each pass."""
    found = []
    for part in _PASSES:
        if config.get(f"{part}_block_m") is None:
            continue
        rows, keys = int(config[f"{part}_block_m"]), int(config[f"{part}_block_n"])
        found.append((part, rows, keys) if part == "dq" else (part, keys, rows))
    return tuple(found)


def _fits_smem(problem: Fp4AttentionBwdProblem, device: DeviceSpec, config: Config) -> str | None:
    """What a program keeps, and the operands of every stage: seen in binaries for sm_90 and sm_100.

    One buffer less in those for sm_120, where products read registers.
    """
    operand = _CODE_BYTES if problem.products == "native" else _VALUE_BYTES
    for part, held, looped in _passes(config):
        buffers = max(1, int(config[f"{part}_num_stages"]) - (device.arch >= 120))
        needed = held * (operand + _HELD_TOKEN_BYTES[part])
        needed += buffers * looped * (operand + _LOOP_TOKEN_BYTES[part])
        reason = fits_shared_memory(int(needed * problem.head_dim), device)
        if reason is not None:
            return f"{part}: {reason}"
    return None


def _fits_registers(problem: Fp4AttentionBwdProblem, config: Config) -> str | None:
    """Sums, the product that is added to them, and the scores, over the threads of a block."""
    for part, held, looped in _passes(config):
        columns = (_SUMS[part] + 1) * problem.head_dim + _SCORES[part] * looped
        needed = held * columns // (32 * int(config[f"{part}_num_warps"]))
        if needed > _MAX_REGISTERS:
            return f"{needed} registers a thread for the tiles of {part}, above {_MAX_REGISTERS}"
    return None


def _fits_tmem(problem: Fp4AttentionBwdProblem, device: DeviceSpec, config: Config) -> str | None:
    """Sums and scores as fp32, one column for each of 128 rows."""
    if not _has_tensor_memory(device):
        return None
    for part, _, looped in _passes(config):
        needed = _SUMS[part] * problem.head_dim + _SCORES[part] * looped
        if needed > _TMEM_COLUMNS:
            return f"{needed} columns of tensor memory for {part}, above {_TMEM_COLUMNS}"
    return None


SPACES = {"triton": triton_space}
