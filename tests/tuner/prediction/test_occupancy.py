"""Blocks that fit on an SM, against figures of NVIDIA's occupancy calculator."""

from __future__ import annotations

import pytest
from tilescout.tuner.prediction.occupancy import infeasible_reason, occupancy
from tilescout.tuner.records import BinaryFacts


def facts(*, threads=128, registers=32, smem=0, tmem=0) -> BinaryFacts:
    return BinaryFacts("k", threads, registers, 0, smem, tmem, 100, "none")


@pytest.mark.parametrize(
    ("kernel", "blocks", "limit"),
    [
        (facts(threads=128, registers=32), 16, "threads"),
        (facts(threads=32, registers=16), 32, "blocks"),
        (facts(threads=128, registers=128), 4, "registers"),
        (facts(threads=256, registers=255), 1, "registers"),
        (facts(threads=128, registers=65), 7, "registers"),
        (facts(threads=128, smem=100 * 1024), 2, "shared memory"),
        (facts(threads=128, smem=227 * 1024), 1, "shared memory"),
        (facts(threads=128, smem=113 * 1024), 2, "shared memory"),
        (facts(threads=128, smem=113 * 1024 + 1), 1, "shared memory"),
        (facts(threads=128, tmem=256), 2, "tensor memory"),
        (facts(threads=1024, registers=64), 1, "registers"),
    ],
    ids=[
        "threads", "blocks", "registers", "registers-most", "register-rounding", "smem",
        "smem-largest", "smem-reserved-counts", "smem-one-byte-more", "tmem", "one-large-block",
    ],
)  # fmt: skip
def test_blocks_per_sm(h200, kernel, blocks, limit):
    assert infeasible_reason(kernel, h200) is None
    found = occupancy(kernel, h200)
    assert (found.blocks_per_sm, found.limit) == (blocks, limit)


@pytest.mark.parametrize(
    ("kernel", "words"),
    [
        (facts(smem=227 * 1024 + 1), ("232449", "shared memory", "232448", "h200")),
        (facts(threads=1024, registers=72), ("72 registers", "1024 threads", "65536")),
        (facts(registers=256), ("256 registers",)),
        (facts(tmem=513), ("513 columns", "512")),
        (facts(threads=1056), ("1056 threads", "1024")),
    ],
    ids=["smem", "register-file", "registers-a-thread", "tmem", "threads"],
)
def test_what_cannot_launch_says_why(h200, kernel, words):
    reason = infeasible_reason(kernel, h200)
    assert reason is not None
    for word in words:
        assert word in reason
