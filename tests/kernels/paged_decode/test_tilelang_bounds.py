"""No access of a generated TileLang kernel lies outside its memory: its CUDA, run on the CPU.

The kernels run under AddressSanitizer with tables and pools that are not one byte too long, on runs
that are empty, shorter than the ring of stages, and whole. Needs no GPU and no CUDA toolkit.
"""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from tilescout.kernels.base import Config
from tilescout.kernels.paged_decode import PagedDecodeProblem
from tilescout.kernels.registry import template
from tilescout.kernels.tilelang_spec import lowered
from tilescout.search_spaces.paged_decode import SPACES

HERE = Path(__file__).parent
SUPPORT = HERE.parents[1] / "support"
PROBLEM = PagedDecodeProblem(16, 8192, 32, 8, 128, 16, "bfloat16")
BASE = {
    **{"block_n": 16, "block_h": 4, "threads": 32, "num_stages": 5, "swap_ab": False},
    **{"matmul": "mma", "split_rule": "count", "num_splits": 24},
}
WIDE = {"block_n": 64, "threads": 128, "swap_ab": True, "num_stages": 3}
EVICTION = {"kv_eviction": "evict_first"}
CASES = {
    "page, one head": ("tilelang_page", 16, {"load": "page", "block_h": 1, "num_stages": 4}),
    "page, part of a page": ("tilelang_page", 64, {"load": "page", "block_n": 32, "num_stages": 4}),
    "rows": ("tilelang_gather", 16, {}),
    "rows, pages of 7": ("tilelang_gather", 7, WIDE),
    "tma": ("tilelang_page", 16, {"load": "tma", **EVICTION, "num_stages": 4}),
    "tma, four pages": ("tilelang_page", 16, {"load": "tma", **EVICTION, **WIDE}),
    "tma_ws": ("tilelang_page", 16, {"load": "tma_ws", **EVICTION}),
}
STRIDES = "head, kv_page, kv_token"
TAIL = "num_kv_heads, num_splits, q_token, head, 1.f)"
TENSORS = "partial, partial_lse, q"
TABLES = "indices, indptr, last, batch"
CALLS = {
    "rows": f"(k, {TENSORS}, v, {TABLES}, {STRIDES}, {TAIL}",
    "tma": f"(map, {TENSORS}, map, {TABLES}, {TAIL}",
    "tma_ws": f"(k, map, {TENSORS}, v, map, {TABLES}, {STRIDES}, {TAIL}",
}
MERGE_CALL = (
    "(out, partial, partial_lse, indptr, last, batch, block_n, num_kv_heads, num_splits, q_token, "
    "head, page_size)"
)
RUNS = [(24, 700), (3, 300), (7, 33), (64, 500)]
"""Splits and the longest request."""


@pytest.fixture(scope="module", autouse=True)
def _needs_a_compiler() -> None:
    if shutil.which("g++") is None:
        pytest.skip("no g++")


def kernels_of(case):
    """The attention and the merge kernel of a case, and the problem."""
    name, page_size, values = CASES[case]
    problem, config = replace(PROBLEM, page_size=page_size), Config.of(name, {**BASE, **values})
    assert template("paged_decode", name).kernel_specs(problem, config)
    return template("paged_decode", name).kernel_specs(problem, config), problem, config


def program_of(spec, folder, call, grid, page_size, block_n, change=lambda source: source):
    """The kernel with its driver as a program of the host."""
    artifact = lowered(spec, 90)
    (function,) = artifact.device_mod.functions.values()
    lines = artifact.kernel_source.splitlines()
    source = "\n".join(line for line in lines if not line.startswith("#include"))
    shared = "extern __shared__ __align__(1024) uchar buf_dyn_shmem[];"
    assert shared in source
    source = source.replace(shared, "uchar* buf_dyn_shmem = shared_memory;")
    path = folder / "kernel.inc"
    path.write_text(change(source))
    values = {
        "KERNEL": f'"{path}"',
        "LAUNCH": f"{spec.name}{call}",
        "NUM_THREADS": int(function.attrs["thread_extent"]["threadIdx.x"]),
        "SHARED_BYTES": int(function.attrs["dyn_shared_memory_buf"]),
        "PAGE_SIZE": page_size,
        "BLOCK_N": block_n,
        **dict(zip(("GRID_X", "GRID_Y", "GRID_Z"), grid, strict=True)),
    }
    program = folder / "program"
    subprocess.run(
        [
            *("g++", "-std=c++17", "-O1", "-w", "-fpermissive", "-fsanitize=address"),
            *(f"-D{name}={value}" for name, value in values.items()),
            *(f"-I{SUPPORT}", "-o", program, HERE / "tilelang_on_host.cpp"),
        ],
        check=True,
    )
    return program


def run(program, splits, longest, num_seeds=3):
    command = [program, str(splits), str(longest), str(num_seeds)]
    options = {"ASAN_OPTIONS": "detect_leaks=0"}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=options)


def attention_of(case, folder, change=lambda source: source):
    (attention, _), problem, config = kernels_of(case)
    load = config.get("load", "rows")
    call = CALLS["rows" if load == "page" else load]
    head_tiles = -(-problem.group_size // int(config["block_h"]))
    grid = (f"num_kv_heads*{head_tiles}", "num_splits", "batch")
    return program_of(attention, folder, call, grid, problem.page_size, config["block_n"], change)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_attention_stays_within_its_memory(case, tmp_path, h200) -> None:
    (_, _), problem, config = kernels_of(case)
    assert SPACES[config.template](problem, h200).check(config) is None
    program = attention_of(case, tmp_path)
    for splits, longest in RUNS:
        done = run(program, splits, longest)
        assert done.returncode == 0, done.stderr[:2000]
        assert int(done.stdout) > 100


@pytest.mark.slow
def test_a_prologue_without_its_condition_is_found(tmp_path) -> None:
    def change(source):
        guard = "if (slot < count) {"
        assert guard in source
        return source.replace(guard, "if (true) {")

    done = run(attention_of("page, one head", tmp_path, change), 24, 700)
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr


@pytest.mark.slow
def test_merge_stays_within_its_memory(tmp_path) -> None:
    (_, merge), problem, config = kernels_of("page, one head")
    grid = ("num_heads", "batch", 1)
    program = program_of(merge, tmp_path, MERGE_CALL, grid, problem.page_size, config["block_n"])
    for splits, longest in RUNS:
        done = run(program, splits, longest)
        assert done.returncode == 0, done.stderr[:2000]
