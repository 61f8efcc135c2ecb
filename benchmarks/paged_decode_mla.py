#!/usr/bin/env python3
"""MLA decode: ours, FlashInfer's wrapper at each backend, and how near the limits of the GPU.

    python benchmarks/paged_decode_mla.py --db results.db --json paged_decode_mla.json

A problem is batch x KV length x query heads over latent rows of 512 + 64 values, pages in random
order. The ceiling is the slower of two times: of the bytes at the bandwidth of a copy, and of the
floating-point operations at the rate of a large matrix product, both measured in the same run.
FlashInfer is optional; its planning is not timed, and it compiles a module a backend at first use:
``--archive`` compiles them without a GPU and packs them as ``flashinfer_modules.py`` does.
``side_by_side`` says how contenders are timed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from flashinfer_modules import write_archive
from flashinfer_paged import with_equal_tables
from side_by_side import DEFAULT, OURS, Baseline, Cell, require_gpu, time_cell, write_record
from tilescout.kernels.paged_decode import PagedDecodeProblem
from tilescout.tuner.timers import Call, CudaTimer

LATENT_DIM, ROPE_DIM = 512, 64
BACKENDS = ("fa2", "fa3")
TARGETS = {128: 0.5, 16: 0.7}
"""Least share of the ceiling by query heads, at batch 64 and 8192 tokens."""
MATRIX_SIZE = 8192
COPY_BYTES = 2 << 30
_WORKSPACE_BYTES = 512 << 20
_NUM_CEILING_ROUNDS = 15


@dataclass(frozen=True)
class Ceilings:
    """What the GPU reaches in this run."""

    copy_tb_per_s: float
    """Bytes read and written by a large copy."""
    matmul_tflops: float
    """Of a bf16 product of square matrices."""

    def least_us(self, problem: PagedDecodeProblem) -> float:
        """The time below which the problem cannot be done at these rates."""
        return max(
            problem.bytes_moved / self.copy_tb_per_s / 1e6, problem.flops / self.matmul_tflops / 1e6
        )


def measure_ceilings() -> Ceilings:
    """Medians over rounds of both rates."""
    source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy_us = _median_us(partial(target.copy_, source))
    del source, target
    shape = (MATRIX_SIZE, MATRIX_SIZE)
    left, right = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = torch.empty_like(left)
    matmul_us = _median_us(partial(torch.matmul, left, right, out=product))
    del left, right, product
    torch.cuda.empty_cache()
    return Ceilings(2 * COPY_BYTES / copy_us / 1e6, 2 * MATRIX_SIZE**3 / matmul_us / 1e6)


def _median_us(call: Callable[[], object]) -> float:
    def launch() -> None:
        call()

    timer = CudaTimer(is_graph=False)
    run = timer.prepare([launch], 5)
    return statistics.median(timer.time_us([run] * _NUM_CEILING_ROUNDS))


def flashinfer_calls(cell: Cell, *, backend: str) -> list[Call]:
    """Launches of ``BatchMLAPagedAttentionWrapper``, planned for exactly these lengths.

    With its fixed buffers, as serving frameworks capture it in a graph.
    """
    import flashinfer

    problem, first = cell.problem, cell.inputs[0]
    qo_indptr = torch.arange(problem.batch + 1, dtype=torch.int32, device="cuda")
    lengths = torch.full((problem.batch,), problem.kv_len, dtype=torch.int32, device="cuda")
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(
        torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device="cuda"),
        use_cuda_graph=True,
        qo_indptr=torch.zeros_like(qo_indptr),
        kv_indptr=torch.zeros_like(first.kv_indptr),
        kv_indices=torch.zeros_like(first.kv_indices),
        kv_len_arr=torch.zeros_like(lengths),
        backend=backend,
    )
    dtype = getattr(torch, problem.dtype)
    wrapper.plan(
        qo_indptr,
        first.kv_indptr,
        first.kv_indices,
        lengths,
        problem.num_qo_heads,
        LATENT_DIM,
        ROPE_DIM,
        problem.page_size,
        False,  # one query token: nothing to mask
        first.sm_scale,
        dtype,
        dtype,
    )

    def call(i: Any, o: Any) -> None:
        rows = i.k_cache[:, :, 0]
        wrapper.run(
            i.q[..., :LATENT_DIM],
            i.q[..., LATENT_DIM:],
            rows[..., :LATENT_DIM],
            rows[..., LATENT_DIM:],
            out=o.out,
        )

    return [partial(call, i, o) for i, o in zip(cell.inputs, cell.outputs, strict=True)]


BASELINES: dict[str, Baseline] = {
    f"flashinfer:{backend}": partial(flashinfer_calls, backend=backend) for backend in BACKENDS
}


def build_archive(dtype: str, path: Path) -> None:
    """Compiles FlashInfer's modules of both backends and packs them."""
    try:
        from flashinfer.jit.attention.modules import gen_batch_mla_module
        from flashinfer.jit.core import build_jit_specs
    except ImportError as error:
        raise SystemExit(f"FlashInfer cannot be imported: {error}") from None
    q = getattr(torch, dtype)
    specs = [
        gen_batch_mla_module(backend, q, q, q, torch.int32, LATENT_DIM, ROPE_DIM, False)
        for backend in BACKENDS
    ]
    build_jit_specs(specs)
    write_archive(specs, path)


def available_baselines() -> dict[str, Baseline]:
    """The baselines that can run here; says if none can."""
    try:
        import flashinfer
    except ImportError as error:
        print(f"FlashInfer is not timed: {error}", file=sys.stderr)
        return {}
    print(f"FlashInfer {flashinfer.__version__}", file=sys.stderr)
    return BASELINES


def print_table(rows: Sequence[dict[str, Any]], ceilings: Ceilings) -> None:
    """One line a problem: microseconds, share of the ceiling, ratio to the best baseline."""
    print(f"copy {ceilings.copy_tb_per_s:.2f} TB/s, matmul {ceilings.matmul_tflops:.0f} TFLOP/s")
    names = [OURS, DEFAULT, *BASELINES]
    print(f"{'batch x tokens x heads':>24}", *(f"{n.split(':')[-1]:>10}" for n in names), end="")
    print(f"{'ceiling':>10}{'share':>7}{'target':>8}{'best/':>7}  tier   config")
    for row in rows:
        us, problem = row["us"], row["problem"]
        theirs = [us[name] for name in BASELINES if name in us]
        ratio = min(theirs, default=float("nan")) / us[OURS]
        label = f"{problem['batch']} x {problem['kv_len']} x {problem['num_qo_heads']}"
        print(f"{label:>24}", *(f"{us.get(n, float('nan')):>10.2f}" for n in names), end="")
        target = "" if row["target"] is None else f"{row['target']:.2f}"
        print(f"{row['ceiling_us']:>10.2f}{row['share']:>7.3f}{target:>8}{ratio:>7.3f}", end="")
        print(f"  {row['tier']:<6}", *(f"{k}={v}" for k, v in row["config"].items()), flush=True)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, nargs="+", default=[64])
    parser.add_argument("--kv-len", type=int, nargs="+", default=[8192])
    parser.add_argument("--num-qo-heads", type=int, nargs="+", default=[128, 16])
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--db", action="append", help="database of winners; default: as dispatch")
    parser.add_argument("--archive", type=Path, help="only compile FlashInfer's modules into this")
    parser.add_argument("--json", type=Path, help="write everything here")
    return parser.parse_args()


def main() -> None:
    """Measures the ceilings, times every problem, prints the table, writes the JSON."""
    arguments = parse_arguments()
    if arguments.archive:
        build_archive(arguments.dtype, arguments.archive)
        return
    device = require_gpu()
    baselines = available_baselines()
    ceilings = measure_ceilings()
    rows = []
    for batch in arguments.batch:
        for kv_len in arguments.kv_len:
            for heads in arguments.num_qo_heads:
                problem = PagedDecodeProblem(
                    batch=batch,
                    kv_len=kv_len,
                    num_qo_heads=heads,
                    num_kv_heads=1,
                    head_dim=LATENT_DIM + ROPE_DIM,
                    head_dim_v=LATENT_DIM,
                    page_size=arguments.page_size,
                    dtype=arguments.dtype,
                )
                row = time_cell(
                    problem, device, arguments.db, baselines, adjust_inputs=with_equal_tables
                )
                least_us = ceilings.least_us(problem)
                is_target = (batch, kv_len) == (64, 8192)
                row["ceiling_us"], row["share"] = least_us, least_us / row["us"][OURS]
                row["target"] = TARGETS.get(heads) if is_target else None
                rows.append(row)
                torch.cuda.empty_cache()
    print_table(rows, ceilings)
    if arguments.json:
        write_record(arguments.json, device, rows, ceilings=vars(ceilings))


if __name__ == "__main__":
    main()
