#!/usr/bin/env python3
"""Chunked gated delta net on the GPU at hand: ours, FLA, FlashQLA and FlashInfer, in one run.

Head dims 128, bf16, fp32 states before and after, log decay and beta given, keys of length one, a
quarter of the heads without decay; ``side_by_side`` says how contenders are timed.

    python benchmarks/gdn_chunk.py --db results.db --json gdn_chunk.json

The libraries are optional and each is verified against the reference: one that is wrong or cannot
run is left out of the row, with its reason. FLA runs its own Triton kernels even where FlashQLA is
installed. FlashInfer gets e^g and states as [V, K], made beforehand.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

# FLA would hand these shapes to FlashQLA: read when it is imported.
os.environ["FLA_FLASH_QLA"] = "0"

import torch
from side_by_side import (
    DEFAULT,
    OURS,
    Baseline,
    Cell,
    LeftOutError,
    require_gpu,
    time_cell,
    write_record,
)
from tilescout.kernels.gdn_chunk_fwd import GdnChunkProblem
from tilescout.kernels.registry import operation
from tilescout.tuner.timers import Call

# (lengths, heads of q and k, heads of v)
ROWS = {
    "1x32768 2/8": ((32768,), 2, 8),
    "1x8192 4/16": ((8192,), 4, 16),
    "1x32768 16/64": ((32768,), 16, 64),
    "1x8192 16/32": ((8192,), 16, 32),
    "4x8192 16/32": ((8192,) * 4, 16, 32),
    "8x1024 16/32": ((1024,) * 8, 16, 32),
    "2x16384 8/24": ((16384,) * 2, 8, 24),
    "1x2048 16/48": ((2048,), 16, 48),
}
RMS_BOUND = 2.0e-2
"""Relative RMS error that FlashQLA's own tests allow; ours is tighter."""

Forward = Callable[[], tuple[torch.Tensor, torch.Tensor]]
"""(output, state after) of one forward; states as [K, V]."""


def fla_forward(i: Any) -> Forward:
    """FLA's chunked forward."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    # FLA numbers chunks by 64-bit bounds.
    bounds = i.cu_seqlens.long()
    return lambda: chunk_gated_delta_rule(
        i.q,
        i.k,
        i.v,
        g=i.gate,
        beta=i.beta,
        scale=i.scale,
        initial_state=i.initial_state,
        output_final_state=True,
        cu_seqlens=bounds,
    )


def flash_qla_forward(i: Any) -> Forward:
    """FlashQLA's forward, with its own choice of context parallelism."""
    from flash_qla import chunk_gated_delta_rule_fwd

    bounds = i.cu_seqlens.int()

    def forward() -> tuple[torch.Tensor, torch.Tensor]:
        found = chunk_gated_delta_rule_fwd(
            i.q,
            i.k,
            i.v,
            i.gate,
            i.beta,
            scale=i.scale,
            initial_state=i.initial_state,
            cu_seqlens=bounds,
            output_final_state=True,
            output_h=False,
        )
        return found[2], found[4]

    return forward


def flashinfer_forward(i: Any) -> Forward:
    """FlashInfer's prefill: the decay itself instead of its logarithm, states as [V, K]."""
    from flashinfer.gdn_prefill import chunk_gated_delta_rule

    q, k, v, beta = (x[0] for x in (i.q, i.k, i.v, i.beta))
    decay, bounds = i.gate[0].exp(), i.cu_seqlens.long()
    before = i.initial_state.transpose(-1, -2).contiguous()
    after = torch.empty_like(before)

    def forward() -> tuple[torch.Tensor, torch.Tensor]:
        found = chunk_gated_delta_rule(
            q=q,
            k=k,
            v=v,
            g=decay,
            beta=beta,
            scale=i.scale,
            initial_state=before,
            cu_seqlens=bounds,
            output_final_state=True,
            output_state=after,
        )
        return found[0], after.transpose(-1, -2)

    return forward


LIBRARIES = {"fla": fla_forward, "flash_qla": flash_qla_forward, "flashinfer": flashinfer_forward}


def calls_of(make: Callable[[Any], Forward], cell: Cell) -> list[Call]:
    """Launches of a library, one a copy, verified on the first."""
    forwards = [make(inputs) for inputs in cell.inputs]
    with torch.no_grad():
        # Each once outside any capture: they compile, tune and read bounds on the host.
        results = [forward() for forward in forwards]
    verified = cell.outputs[0]
    out, state = results[0]
    outputs = type(verified)(out.reshape(verified.out.shape), state.float().contiguous())
    comparison = operation(cell.problem.op).compare(cell.problem, cell.inputs[0], outputs)
    rms = comparison.relative_rms_error
    if not comparison.is_ok and not (math.isfinite(rms) and rms <= RMS_BOUND):
        raise LeftOutError(f"wrong: {comparison.reason}")
    return [partial(_discard, forward) for forward in forwards]


def _discard(forward: Forward) -> None:
    with torch.no_grad():
        forward()


def usable(names: list[str]) -> dict[str, Baseline]:
    """The libraries that can be imported here; says why others cannot."""
    found: dict[str, Baseline] = {}
    for name in names:
        try:
            module = __import__("fla" if name == "fla" else name)
        except ImportError as error:
            print(f"{name} is not timed: {error}", file=sys.stderr)
            continue
        print(f"{name} {getattr(module, '__version__', '')}", file=sys.stderr)
        found[name] = partial(calls_of, LIBRARIES[name])
    return found


def problem_of(row: str) -> GdnChunkProblem:
    """The problem of a row of the table."""
    lengths, heads, v_heads = ROWS[row]
    return GdnChunkProblem(
        *(len(lengths), sum(lengths), max(lengths), heads, v_heads, 128, 128), "bfloat16"
    )


def main() -> None:
    """Times every row, prints the table, writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--row", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--library", nargs="+", choices=LIBRARIES, default=list(LIBRARIES))
    parser.add_argument("--db", action="append", help="database of winners; default: as dispatch")
    parser.add_argument("--json", type=Path, help="write everything here")
    arguments = parser.parse_args()
    device = require_gpu()
    baselines = usable(arguments.library)
    columns = [OURS, DEFAULT, *baselines]
    print(f"{'row':>14}", *(f"{name:>11}" for name in columns), " best/ours  config")
    rows = []
    for name in arguments.row:
        row = time_cell(problem_of(name), device, arguments.db, baselines, is_verified=baselines)
        rows.append({"row": name, **row})
        us = row["us"]
        figures = " ".join(f"{us[c]:>11.1f}" if c in us else f"{'-':>11}" for c in columns)
        best = min((us[c] for c in baselines if c in us), default=math.nan)
        config = " ".join(f"{k}={v}" for k, v in row["config"].items())
        print(f"{name:>14} {figures} {best / us[OURS]:>9.2f}  {config}", flush=True)
        torch.cuda.empty_cache()
        if arguments.json:
            write_record(arguments.json, device, rows)


if __name__ == "__main__":
    main()
