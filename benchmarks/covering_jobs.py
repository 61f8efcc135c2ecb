"""What ``covering.py`` runs on the GPU, in worker processes: one config on batches of all sorts."""

from __future__ import annotations

import os
import sys
from functools import lru_cache
from typing import Any

import torch
from tilescout.kernels.base import Config
from tilescout.kernels.paged_decode import PagedDecodeProblem
from tilescout.kernels.paged_decode.reference import paged_inputs
from tilescout.kernels.registry import operation, template
from tilescout.tuner.compile_pool import short_reason
from tilescout.tuner.launch_errors import failures, status_of
from tilescout.tuner.records import TrialStatus
from tilescout.tuner.validate import Verdict, build_on_poison, judge_repeat

__all__ = ["BATCH", "check_config", "length_mixes"]

BATCH = 6


def length_mixes(kv_len: int) -> dict[str, list[int]]:
    """Tokens of the six requests: what a launcher built for ``kv_len`` each must serve in turn."""
    return {
        "full": [kv_len] * BATCH,
        "ragged with an empty one": [kv_len, 1, 0, 77, kv_len // 3, 33],
        "one long": [16, 16, kv_len, 16, 16, 16],
        "nearly all empty": [0, 0, 1, 0, 17, 0],
    }


def check_config(
    problem: PagedDecodeProblem, config: Config, device: str = "cuda"
) -> tuple[str, str]:
    """Status and reason of a config that was compiled.

    One launcher, whose scratch memory starts as NaN, serves every mix of lengths; each twice.
    """
    try:
        verdict = _verdict(problem, config, device)
    except failures() as error:
        status, reason = status_of(error), short_reason(error)
        if device == "cuda" and _is_device_lost():
            # The context fails for ever: the pool replaces a process that ends, and reads this.
            print(f"{status.value}: {reason}", file=sys.stderr, flush=True)
            os._exit(1)
        return status.value, reason
    return verdict.status.value, verdict.reason


def _verdict(problem: PagedDecodeProblem, config: Config, device: str) -> Verdict:
    op, kernel = operation(problem.op), template(problem.op, config.template)
    mixes = _inputs(problem, device)
    launcher = build_on_poison(kernel, problem, config, mixes["full"])
    verdict = Verdict(TrialStatus.OK)
    for name, inputs in mixes.items():
        first, second = (op.make_outputs(problem, inputs) for _ in range(2))
        launcher.launch(inputs, first)
        launcher.launch(inputs, second)
        verdict = Verdict.of(op.compare(problem, inputs, first), name)
        if verdict.is_ok:
            verdict = judge_repeat(op, verdict, first, second, f"a second launch ({name})")
        if not verdict.is_ok:
            break
    return verdict


@lru_cache(maxsize=8)
def _inputs(problem: PagedDecodeProblem, device: str) -> dict[str, Any]:
    """Inputs of every mix, with page tables of equal size and NaN where no kernel may look."""
    room = -(-problem.kv_len // problem.page_size) * problem.batch
    return {
        name: paged_inputs(
            problem,
            lengths,
            device=device,
            seed=seed,
            num_unused_pages=3,
            num_table_pages=room,
            poison=True,
        )
        for seed, (name, lengths) in enumerate(length_mixes(problem.kv_len).items())
    }


def _is_device_lost() -> bool:
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False
