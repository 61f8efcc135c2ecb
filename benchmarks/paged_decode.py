#!/usr/bin/env python3
"""Paged decode on the GPU at hand: our winner, our untuned default and FlashInfer, in one run.

Cells are batch x KV length, pages in random order; ``side_by_side`` says how contenders are timed.

    python benchmarks/paged_decode.py --db results.db --json paged_decode.json

FlashInfer is optional: without it only ours is timed. Its planning runs before capture and is not
timed, as in a serving loop. Bandwidth counts K, V, q and the output once.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from side_by_side import DEFAULT, OURS, Baseline, Cell, require_gpu, time_cell, write_record
from tilescout.kernels.paged_decode import PagedDecodeProblem
from tilescout.tuner.timers import Call


def flashinfer_wrapper_calls(
    cell: Cell, *, use_tensor_cores: bool, is_graph_wrapper: bool = True
) -> list[Call]:
    """Launches of FlashInfer's decode wrapper with FA2 kernels.

    The graph wrapper has fixed buffers and a padded grid, as serving frameworks use it; the plain
    one, captured all the same, plans for exactly these lengths.
    """
    import flashinfer

    problem, first = cell.problem, cell.inputs[0]
    options: dict[str, Any] = {"backend": "fa2"} if use_tensor_cores else {}
    if is_graph_wrapper:
        options |= {
            "use_cuda_graph": True,
            "paged_kv_indptr_buffer": torch.zeros_like(first.kv_indptr),
            "paged_kv_indices_buffer": torch.zeros_like(first.kv_indices),
            "paged_kv_last_page_len_buffer": torch.ones_like(first.kv_last_page_len),
        }
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        torch.zeros(512 << 20, dtype=torch.uint8, device="cuda"),
        kv_layout="NHD",
        use_tensor_cores=use_tensor_cores,
        **options,
    )
    dtype = getattr(torch, problem.dtype)
    wrapper.plan(
        first.kv_indptr,
        first.kv_indices,
        first.kv_last_page_len,
        problem.num_qo_heads,
        problem.num_kv_heads,
        problem.head_dim,
        problem.page_size,
        pos_encoding_mode="NONE",
        q_data_type=dtype,
        kv_data_type=dtype,
        sm_scale=first.sm_scale,
    )
    # The wrapper keeps one page table, so every copy is read through the first one's.
    return [
        partial(wrapper.run, i.q, i.kv_cache, out=o.out)
        for i, o in zip(cell.inputs, cell.outputs, strict=True)
    ]


def flashinfer_xqa_calls(cell: Cell) -> list[Call]:
    """Launches of FlashInfer's XQA kernel, which serves ``trtllm_batch_decode`` on Hopper."""
    from flashinfer.decode import trtllm_batch_decode_with_kv_cache

    problem, first = cell.problem, cell.inputs[0]
    block_tables = first.kv_indices.view(problem.batch, -1)
    seq_lens = torch.full((problem.batch,), problem.kv_len, dtype=torch.int32, device="cuda")
    workspace = torch.zeros(512 << 20, dtype=torch.uint8, device="cuda")

    def call(i: Any, o: Any) -> None:
        trtllm_batch_decode_with_kv_cache(
            i.q,
            i.kv_cache,
            workspace,
            block_tables,
            seq_lens,
            problem.kv_len,
            bmm1_scale=i.sm_scale,
            bmm2_scale=1.0,
            out=o.out,
            kv_layout="NHD",
            backend="xqa",
        )

    return [partial(call, i, o) for i, o in zip(cell.inputs, cell.outputs, strict=True)]


BASELINES: dict[str, Baseline] = {
    "flashinfer:fa2": lambda cell: flashinfer_wrapper_calls(cell, use_tensor_cores=False),
    "flashinfer:fa2_tc": lambda cell: flashinfer_wrapper_calls(cell, use_tensor_cores=True),
    "flashinfer:fa2_tc_plain": lambda cell: flashinfer_wrapper_calls(
        cell, use_tensor_cores=True, is_graph_wrapper=False
    ),
    "flashinfer:xqa": flashinfer_xqa_calls,
}


def summarise(rows: Sequence[dict[str, Any]], baselines: Sequence[str]) -> dict[str, float]:
    """Geometric means over the cells."""
    summary = {
        "default_over_tuned": statistics.geometric_mean(
            [row["us"][DEFAULT] / row["us"][OURS] for row in rows]
        )
    }
    if baselines:
        ratios = [min(row["us"][b] for b in baselines) / row["us"][OURS] for row in rows]
        summary["best_baseline_over_tuned"] = statistics.geometric_mean(ratios)
        summary["worst_cell"] = min(ratios)
    return summary


def print_table(rows: Sequence[dict[str, Any]], baselines: Sequence[str]) -> None:
    """One line a cell: microseconds, bandwidth of ours, ratios to ours."""
    names = [OURS, DEFAULT, *baselines]
    print(
        f"{'batch x kv_len':>15}", *(f"{n.removeprefix('flashinfer:'):>12}" for n in names), end=""
    )
    print(f"{'TB/s':>7}{'default/':>10}{'best/':>8}  config")
    for row in rows:
        us, problem = row["us"], row["problem"]
        best = min((us[b] for b in baselines), default=float("nan"))
        print(f"{problem['batch']:>6} x {problem['kv_len']:<6}", end="")
        print("".join(f"{us[name]:>12.2f}" for name in names), end="")
        print(f"{row['tb_per_s'][OURS]:>7.2f}{us[DEFAULT] / us[OURS]:>10.3f}", end="")
        print(f"{best / us[OURS]:>8.3f}  ", end="")
        print(" ".join(f"{k}={v}" for k, v in row["config"].items()), flush=True)


def available_baselines(wanted: Sequence[str]) -> list[str]:
    """The baselines that can run here; says which cannot."""
    try:
        import flashinfer
    except ImportError as error:
        print(f"FlashInfer is not timed: {error}", file=sys.stderr)
        return []
    print(f"FlashInfer {flashinfer.__version__}", file=sys.stderr)
    return list(wanted)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 64, 128])
    parser.add_argument("--kv-len", type=int, nargs="+", default=[1024, 8192, 32768])
    parser.add_argument("--num-qo-heads", type=int, default=32)
    parser.add_argument("--num-kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--db", action="append", help="database of winners; default: as dispatch")
    parser.add_argument("--baseline", choices=BASELINES, nargs="*", default=list(BASELINES))
    parser.add_argument("--json", type=Path, help="write everything here")
    return parser.parse_args()


def main() -> None:
    """Times every cell, prints the table, writes the JSON."""
    arguments = parse_arguments()
    device = require_gpu()
    baselines = available_baselines(arguments.baseline)
    rows = []
    for batch in arguments.batch:
        for kv_len in arguments.kv_len:
            problem = PagedDecodeProblem(
                batch=batch,
                kv_len=kv_len,
                num_qo_heads=arguments.num_qo_heads,
                num_kv_heads=arguments.num_kv_heads,
                head_dim=arguments.head_dim,
                page_size=arguments.page_size,
                dtype=arguments.dtype,
            )
            rows.append(
                time_cell(
                    problem, device, arguments.db, {name: BASELINES[name] for name in baselines}
                )
            )
            torch.cuda.empty_cache()
            print(f"{problem.batch} x {problem.kv_len} done", file=sys.stderr, flush=True)
    print_table(rows, baselines)
    summary = summarise(rows, baselines)
    print(" ".join(f"{name}={value:.3f}" for name, value in summary.items()))
    if arguments.json:
        write_record(arguments.json, device, rows, summary=summary)


if __name__ == "__main__":
    main()
