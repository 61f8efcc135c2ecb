"""The problems that ``covering.py`` compiles for, and the batches on which it checks a config.

An operation has a few families, set apart by what kernels are specialised on; each has a grid of
small batches. Operations are known by their public functions alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tilescout.kernels.base import Problem
from tilescout.kernels.paged_decode.reference import paged_inputs
from tilescout.kernels.registry import operation

__all__ = [
    "BATCH",
    "FAMILIES",
    "Case",
    "cases",
    "grid_problems",
    "length_mixes",
    "problem_of",
    "shares_launcher",
]

BATCH = 6
"""Requests of a paged-decode problem."""
_PAGED: Mapping[str, Any] = {"batch": BATCH, "kv_len": 2048, "dtype": "bfloat16"}
_HEADS = ("num_qo_heads", "num_kv_heads", "head_dim", "page_size")

# As many states as make work for every multiprocessor, else no config that streams tiles is valid.
_STATES: Mapping[str, Any] = {"batch": 64, "num_steps": 1, "num_heads": 16, "num_v_heads": 32}
# As many tokens as leave segments of every size something to be cut into.
_LONG: Mapping[str, Any] = {"num_sequences": 1, "num_tokens": 20480, "max_seqlen": 20480}
_UNEVEN: Mapping[str, Any] = {"num_sequences": 5, "num_tokens": 24576, "max_seqlen": 18000}
_FUSED: Mapping[str, Any] = {"gate": "fused", "use_qk_l2norm": True, "state_layout": "VK"}

FAMILIES: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "paged_decode": {
        name: {**_PAGED, **dict(zip(_HEADS, sizes, strict=True)), **fields}
        for name, sizes, fields in (
            ("llama", (16, 4, 128, 16), {}),
            ("group 8, page 1", (8, 1, 64, 1), {}),
            ("group 7, page 48", (14, 2, 128, 48), {"dtype": "float16"}),
            ("no groups, HND, page 256", (4, 4, 64, 256), {"kv_layout": "HND"}),
            ("fp8, window", (8, 2, 128, 64), {"kv_dtype": "float8_e4m3fn", "window_left": 699}),
            ("mla", (16, 1, 576, 64), {"head_dim_v": 512}),
        )
    },
    "gdn_decode": {
        name: {**_STATES, "head_dim_k": dim_k, "head_dim_v": dim_v, "dtype": dtype, **fields}
        for name, dim_k, dim_v, dtype, fields in (
            ("qwen3-next", 128, 128, "bfloat16", {}),
            (
                "bf16 state, given gate",
                128,
                128,
                "float16",
                {
                    "state_dtype": "bfloat16",
                    "state_layout": "VK",
                    "gate": "given",
                    "use_qk_l2norm": False,
                },
            ),
            ("wide keys", 256, 64, "bfloat16", {"state_layout": "VK"}),
            ("fp32", 64, 192, "float32", {}),
        )
    },
    "gdn_chunk_fwd": {
        name: {"head_dim_k": 128, "head_dim_v": 128, "num_heads": 1, "num_v_heads": 2, **fields}
        for name, fields in (
            ("one long", {**_LONG, "dtype": "bfloat16"}),
            ("uneven, fused gate, norm", {**_UNEVEN, **_FUSED, "dtype": "float16"}),
        )
    },
}
"""Fields of a problem, by operation and by what sets the family apart."""

_CHANGES: Mapping[str, Mapping[str, Mapping[str, object]]] = {
    "paged_decode": {"as it is": {}},
    "gdn_decode": {
        "skips and forgets": {},
        "three tokens each": {"batch": 5, "num_steps": 3},
        "one sequence": {"batch": 1},
    },
    "gdn_chunk_fwd": {
        "ragged": {},
        "less than a chunk": {"num_sequences": 3, "num_tokens": 50, "max_seqlen": 30},
    },
}
"""Dynamic fields of the problems on which configs of a family are checked."""


@dataclass(frozen=True)
class Case:
    """One batch of the grid."""

    name: str
    problem: Problem
    inputs: Any


def problem_of(op: str, family: str) -> Problem:
    """The problem that configs of the family are compiled for."""
    return operation(op).problem_type.from_dict(FAMILIES[op][family])


def shares_launcher(op: str) -> bool:
    """Whether one launcher serves every case: then scratch memory goes from one to the next."""
    return op == "paged_decode"


def cases(problem: Problem, device: str) -> tuple[Case, ...]:
    """The grid of a family's problem."""
    make = _paged_cases if problem.op == "paged_decode" else _gdn_cases
    return make(problem, device)


def grid_problems(problem: Problem) -> dict[str, Problem]:
    """The problems of the grid: what a config has to be compiled for."""
    return {name: problem.changed(fields) for name, fields in _CHANGES[problem.op].items()}


def length_mixes(kv_len: int) -> dict[str, list[int]]:
    """Tokens of the six requests: what a launcher built for ``kv_len`` each must serve in turn."""
    return {
        "full": [kv_len] * BATCH,
        "ragged with an empty one": [kv_len, 1, 0, 77, kv_len // 3, 33],
        "one long": [16, 16, kv_len, 16, 16, 16],
        "nearly all empty": [0, 0, 1, 0, 17, 0],
    }


def _paged_cases(problem: Any, device: str) -> tuple[Case, ...]:
    """Page tables of equal size, and NaN where no kernel may look."""
    room = -(-problem.kv_len // problem.page_size) * problem.batch
    return tuple(
        Case(
            name,
            problem,
            paged_inputs(
                problem,
                lengths,
                device=device,
                seed=seed,
                num_unused_pages=3,
                num_table_pages=room,
                poison=True,
            ),
        )
        for seed, (name, lengths) in enumerate(length_mixes(problem.kv_len).items())
    )


def _gdn_cases(problem: Problem, device: str) -> tuple[Case, ...]:
    """Inputs as they are timed, then those to verify of every problem of the grid."""
    known = operation(problem.op)
    found = [Case("as timed", problem, known.make_inputs(problem, device=device, seed=0))]
    for seed, (name, changed) in enumerate(grid_problems(problem).items(), 1):
        inputs = known.make_validation_inputs(changed, device=device, seed=seed)
        found.append(Case(name, changed, inputs))
    return tuple(found)
