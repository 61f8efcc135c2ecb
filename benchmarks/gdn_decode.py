#!/usr/bin/env python3
"""Gated-delta-net decode on the GPU at hand: our winner, our untuned default and FLA, in one run.

One token a sequence, 16 heads of q and k, 32 of v, head dims 128, bf16, fp32 state, gate and norm
computed in the kernel; ``side_by_side`` says how contenders are timed.

    python benchmarks/gdn_decode.py --db results.db --json gdn_decode.json

FLA (fla-core) is optional; its fused recurrent kernel gets the same raw projections. It returns the
final state in new memory, which a CUDA graph reuses. Bandwidth counts the state read and written,
q, k, v, the gates and the output once.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from side_by_side import OURS, Baseline, Cell, require_gpu, time_cell, write_record
from tilescout.kernels.gdn_decode import GdnDecodeProblem
from tilescout.kernels.registry import operation
from tilescout.tuner.timers import Call

FLA = "fla"


def fla_calls(cell: Cell) -> list[Call]:
    """Launches of FLA's fused recurrent kernel, which takes its states in batch order."""
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

    def call(i: Any, o: Any, state: torch.Tensor) -> None:
        out, _ = fused_recurrent_gated_delta_rule(
            i.q,
            i.k,
            i.v,
            g=i.gate,
            beta=i.beta,
            scale=i.scale,
            initial_state=state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            A_log=i.a_log,
            dt_bias=i.dt_bias,
            use_beta_sigmoid_in_kernel=True,
            state_v_first=cell.problem.state_layout == "VK",
        )
        if o is not None:
            o.out.copy_(out)

    states = [i.state[i.slots.long()].contiguous() for i in cell.inputs]
    verified = cell.outputs[0]
    with torch.no_grad():
        # Once outside any capture, with the output where the reference is compared.
        call(cell.inputs[0], verified, states[0])
    problem = cell.problem
    comparison = operation(problem.op).compare(
        problem, cell.inputs[0], type(verified)(verified.out, None)
    )
    if not comparison.is_ok:
        raise SystemExit(f"fla is wrong on {problem}: {comparison.reason}")
    return [partial(call, i, None, s) for i, s in zip(cell.inputs, states, strict=True)]


def has_fla() -> bool:
    """Whether FLA can run here; says why not."""
    try:
        import fla
    except ImportError as error:
        print(f"FLA is not timed: {error}", file=sys.stderr)
        return False
    print(f"FLA {fla.__version__}", file=sys.stderr)
    return True


def main() -> None:
    """Times every batch, prints the table, writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16, 64, 256])
    parser.add_argument("--state-layout", choices=["KV", "VK"], default="VK")
    parser.add_argument("--db", action="append", help="database of winners; default: as dispatch")
    parser.add_argument("--json", type=Path, help="write everything here")
    arguments = parser.parse_args()
    device = require_gpu()
    baselines: dict[str, Baseline] = {FLA: fla_calls} if has_fla() else {}
    rows = []
    for batch in arguments.batch:
        problem = GdnDecodeProblem(
            *(batch, 1, 16, 32, 128, 128, "bfloat16"), state_layout=arguments.state_layout
        )
        rows.append(time_cell(problem, device, arguments.db, baselines, is_verified=baselines))
        torch.cuda.empty_cache()
    names = list(rows[0]["us"])
    print(f"{'batch':>6}", *(f"{name:>11}" for name in names), f"{'TB/s':>6}", " config")
    for row in rows:
        figures = " ".join(f"{row['us'][name]:>11.2f}" for name in names)
        config = " ".join(f"{k}={v}" for k, v in row["config"].items())
        print(f"{row['problem']['batch']:>6} {figures} {row['tb_per_s'][OURS]:>6.2f}  {config}")
    if arguments.json:
        write_record(arguments.json, device, rows)


if __name__ == "__main__":
    main()
