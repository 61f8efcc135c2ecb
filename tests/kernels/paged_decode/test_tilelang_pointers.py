"""No read of shared memory in a TileLang kernel goes through the ring's moving pointer by mistake.

ptxas of CUDA 12.9 to 13.1 does so in some kernels of one warp whose stages are no power of two:
results were wrong, or the read left shared memory and faulted (H200, 2026-11-30). The space leaves
them out. The source is right, so only SASS shows it.
"""

from __future__ import annotations

import pytest
from moving_pointers import disassembled, misplaced_accesses
from tilescout.kernels.base import Config
from tilescout.kernels.paged_decode import PagedDecodeProblem
from tilescout.kernels.registry import template
from tilescout.search_spaces.paged_decode import SPACES

PROBLEM = PagedDecodeProblem(6, 2048, 16, 4, 128, 16, "bfloat16")
BASE = {
    **{"block_n": 16, "block_h": 1, "threads": 32, "num_stages": 5, "swap_ab": False},
    **{"matmul": "mma", "split_rule": "count", "num_splits": 16},
}
TMA = {"load": "tma", "kv_eviction": "evict_normal"}
CASES = {
    "tma, two warps": {**TMA, "block_n": 32, "threads": 64},
    "tma, two warps, swapped": {**TMA, "block_n": 32, "threads": 64, "swap_ab": True},
    "tma, four warps": {**TMA, "block_n": 64, "threads": 128, "block_h": 4},
    "tma, one warp, four stages": {**TMA, "block_n": 32, "num_stages": 4},
    "rows, four warps": {"block_n": 64, "threads": 128, "num_stages": 3},
}


def cubin_of(values) -> bytes:
    name = "tilelang_page" if "load" in values else "tilelang_gather"
    config = Config.of(name, {**BASE, **values})
    spec = template("paged_decode", name).kernel_specs(PROBLEM, config)[0]
    return spec.compile(90).cubin


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_only_the_ring_is_read_through_its_moving_pointer(case, h200) -> None:
    values = {**BASE, **CASES[case]}
    name = "tilelang_page" if "load" in values else "tilelang_gather"
    assert SPACES[name](PROBLEM, h200).check(Config.of(name, values)) is None
    tile_bytes = values["block_n"] * PROBLEM.head_dim * 2
    sass = disassembled(cubin_of(CASES[case]))
    misplaced, num_moving = misplaced_accesses(sass, tile_bytes, values["num_stages"])
    assert not misplaced
    # A tile of K and one of V: 16 rows and 64 bytes of columns an instruction. A power of two needs
    # no moving pointer.
    assert num_moving >= 2 * 4 or values["num_stages"] == 4


def test_one_warp_needs_a_power_of_two_of_stages(h200) -> None:
    def check(**values):
        config = Config.of("tilelang_page", {**BASE, **TMA, "block_n": 32, **values})
        return SPACES["tilelang_page"](PROBLEM, h200).check(config)

    assert "ptxas misplaces a buffer" in check(num_stages=3)
    assert "ptxas misplaces a buffer" in check(num_stages=6, block_n=16)
    assert check(num_stages=4) is None
    assert check(num_stages=3, threads=64) is None


LOOP = """
.L_x_1:
        /*0010*/                   IMAD R8, R5, 0x2, R4 ;
        /*0020*/                   IMAD R9, R6, -0x5000, R8 ;
        /*0030*/                   LDSM.16.M88.4 R12, [R9] ;
        /*0040*/                   {q} ;
        /*0050*/                   LDSM.16.M88.4 R16, [R10+0x5200] ;
        /*0060*/                   HMMA.16816.F32.BF16 R20, R12, R16, R20 ;
        /*0070*/                   VIADD R4, R4, 0x1000 ;
        /*0080*/              @!P0 BRA `(.L_x_1) ;
"""


def test_a_read_of_q_through_the_moving_pointer_is_found() -> None:
    fixed = LOOP.replace("{q}", "LEA R10, R7, UR4, 0x1")
    moving = LOOP.replace("{q}", "IMAD R10, R7, 0x2, R4")
    assert misplaced_accesses(fixed, 0x1000, 5) == ([], 1)
    assert misplaced_accesses(moving, 0x1000, 5) == (["LDSM.16.M88.4 R16, [R10+0x5200]"], 2)
