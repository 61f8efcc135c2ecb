#!/usr/bin/env python3
"""Decode of requests that share a prefix: in two levels, in one table, and FlashInfer's cascade.

    python benchmarks/shared_prefix.py --json shared_prefix.json

A cell is batch x prefix + suffix, pages in random order. ``one table`` is ``paged_decode`` with the
prefix's pages named by every request. Winners come from the shipped and the user's databases; what
was not tuned runs the default. The least traffic counts the prefix once. FlashInfer is optional;
its planning is not timed. ``side_by_side`` says how contenders are timed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from side_by_side import _time_contenders as time_contenders
from side_by_side import require_gpu, write_record
from tilescout import ops
from tilescout.errors import TilescoutError
from tilescout.kernels.device import DeviceSpec
from tilescout.tuner.measure import MeasureSettings, count_copies
from tilescout.tuner.timers import Call

NUM_QO_HEADS, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE = 32, 8, 128, 16
TOKEN_BYTES = 2 * 2 * NUM_KV_HEADS * HEAD_DIM
CELLS = ((16, 2048, 256), (64, 2048, 256), (64, 8192, 256), (128, 8192, 512), (16, 32768, 256))
"""Batch, tokens of the prefix, tokens of each suffix."""
ONE_TABLE, TWO_LEVELS, CASCADE = "one table", "two levels", "cascade"
MAX_RELATIVE_RMS = 1.5e-2
"""Between two contenders in bf16, each of which may be off by a few roundings of 2^-8."""


@dataclass(frozen=True)
class Copy:
    """One private copy of the data of a cell."""

    q: torch.Tensor
    pool: torch.Tensor
    prefix: ops.PageTable
    suffix: ops.PageTable
    whole: ops.PageTable
    out: torch.Tensor
    lse: torch.Tensor


def bytes_moved(batch: int, prefix: int, suffix: int) -> int:
    """Prefix once, suffixes, q and the output."""
    return (prefix + batch * suffix) * TOKEN_BYTES + batch * NUM_QO_HEADS * HEAD_DIM * 4


def make_copy(batch: int, prefix: int, suffix: int, seed: int) -> Copy:
    """Random values, random pages; prefix and suffix fill their pages."""
    generator = torch.Generator("cuda").manual_seed(seed)
    num_shared, num_own = prefix // PAGE_SIZE, suffix // PAGE_SIZE
    order = torch.randperm(
        num_shared + batch * num_own, generator=generator, device="cuda", dtype=torch.int32
    )
    shared, own = order[:num_shared], order[num_shared:].view(batch, num_own)
    pool = torch.empty(
        (len(order), 2, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM), dtype=torch.bfloat16, device="cuda"
    ).normal_(generator=generator)
    q = torch.empty(batch, NUM_QO_HEADS, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    rows = torch.cat([shared.expand(batch, -1), own], dim=1)
    return Copy(
        q=q.normal_(generator=generator),
        pool=pool,
        prefix=full_table(shared[None]),
        suffix=full_table(own),
        whole=full_table(rows),
        out=torch.empty_like(q),
        lse=torch.empty(q.shape[:2], device="cuda"),
    )


def full_table(rows: torch.Tensor) -> ops.PageTable:
    """A CSR table of equally long requests whose pages are full."""
    batch, pages = rows.shape
    indptr = torch.arange(batch + 1, dtype=torch.int32, device="cuda") * pages
    last = torch.full((batch,), PAGE_SIZE, dtype=torch.int32, device="cuda")
    return ops.PageTable.csr(indptr, rows.flatten().contiguous(), last)


def two_levels(copy: Copy) -> None:
    """Ours, the prefix read once."""
    ops.shared_prefix_decode(
        *(copy.q, copy.pool, copy.prefix, copy.suffix), out=copy.out, lse=copy.lse
    )


def one_table(copy: Copy) -> None:
    """Ours, the prefix named by every request."""
    table = copy.whole
    ops.paged_decode(
        *(copy.q, copy.pool, table.indptr, table.indices, table.last_page_len),
        out=copy.out,
        lse=copy.lse,
    )


def cascade_calls(copies: Sequence[Copy]) -> list[Call]:
    """FlashInfer's two-level wrapper, planned for exactly these lengths; one wrapper a copy."""
    import flashinfer

    workspace = torch.zeros(256 << 20, dtype=torch.uint8, device="cuda")
    calls: list[Call] = []
    for copy in copies:
        wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace, "NHD")
        batch = copy.q.shape[0]
        tables = (copy.prefix, copy.suffix)
        starts = [torch.tensor([0, batch]), torch.arange(batch + 1)]
        wrapper.plan(
            [start.to(torch.int32).cuda() for start in starts],
            [table.indptr for table in tables],
            [table.indices for table in tables],
            [table.last_page_len for table in tables],
            *(NUM_QO_HEADS, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE),
            q_data_type=torch.bfloat16,
        )
        # Compared once here: it allocates its output, and a copy of it is not to be timed.
        copy.out.copy_(wrapper.run(copy.q, copy.pool))
        calls.append(partial(run_cascade, wrapper, copy))
    return calls


def run_cascade(wrapper: Any, copy: Copy) -> None:
    """One launch of a planned wrapper."""
    wrapper.run(copy.q, copy.pool)


def check(name: str, copies: Sequence[Copy], expected: Sequence[torch.Tensor]) -> None:
    """Raises TilescoutError where a contender's outputs are not those of decode in one table."""
    for copy, out in zip(copies, expected, strict=True):
        error = (copy.out.float() - out).square().mean() / out.square().mean()
        if not error.sqrt().item() <= MAX_RELATIVE_RMS:
            raise TilescoutError(f"{name} is off by {error.sqrt().item():.3g} of the output's RMS")


def time_cell(batch: int, prefix: int, suffix: int, device: DeviceSpec) -> dict[str, Any]:
    """Median microseconds of every contender that agrees with decode in one table."""
    held = (prefix + batch * suffix) * TOKEN_BYTES
    num_copies = count_copies(
        bytes_moved=bytes_moved(batch, prefix, suffix),
        bytes_held=held,
        l2_bytes=device.l2_bytes,
        free_bytes=torch.cuda.mem_get_info()[0],
        settings=MeasureSettings(),
    )
    copies = [make_copy(batch, prefix, suffix, seed) for seed in range(num_copies)]
    one: list[Call] = [partial(one_table, copy) for copy in copies]
    two: list[Call] = [partial(two_levels, copy) for copy in copies]
    for call in one:
        call()
    expected = [copy.out.float() for copy in copies]
    for call in two:
        call()
    check(TWO_LEVELS, copies, expected)
    contenders = {ONE_TABLE: one, TWO_LEVELS: two}
    try:
        contenders[CASCADE] = cascade_calls(copies)
        check(CASCADE, copies, expected)
    except TilescoutError:
        raise
    except Exception as error:
        # Absent, or whatever else somebody else's library raises.
        print(f"FlashInfer is not timed: {type(error).__name__}: {error}", file=sys.stderr)
        contenders.pop(CASCADE, None)
    times = time_contenders(contenders)
    least = bytes_moved(batch, prefix, suffix)
    return {
        **{"batch": batch, "prefix": prefix, "suffix": suffix, "us": times},
        "tb_per_s": {name: least / us / 1e6 for name, us in times.items()},
    }


def main() -> None:
    """Times every cell and prints a line for each."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="also write the record here")
    arguments = parser.parse_args()
    device = require_gpu()
    names = (ONE_TABLE, TWO_LEVELS, CASCADE)
    columns = (*names, "TB/s", "one/two", "casc/two")
    print(f"{'batch x prefix + suffix':<26}" + "".join(f"{c:>11}" for c in columns))
    rows = []
    for batch, prefix, suffix in CELLS:
        row = time_cell(batch, prefix, suffix, device)
        rows.append(row)
        us = [row["us"].get(name, float("nan")) for name in names]
        values = (*us, row["tb_per_s"][TWO_LEVELS], us[0] / us[1], us[2] / us[1])
        label = f"{batch} x {prefix} + {suffix}"
        print(f"{label:<26}" + "".join(f"{value:>11.2f}" for value in values), flush=True)
    if arguments.json:
        write_record(arguments.json, device, rows)


if __name__ == "__main__":
    main()
