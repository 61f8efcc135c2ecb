"""A TileLang kernel on disk: compiled once, whole or not at all, and read without TileLang."""

from __future__ import annotations

import pickle
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from tilescout.errors import DeviceError
from tilescout.kernels.tilelang_spec import TileLangKernelSpec, lowered
from tilescout.tuner.prediction.binary import read_facts

SPEC = TileLangKernelSpec(
    module="tilescout.kernels.paged_decode.tilelang_merge_kernel",
    factory="merge_program",
    program="paged_decode_merge",
    parameters={
        "dtype": "bfloat16",
        "head_dim": 128,
        "group_size": 4,
        "block_s": 8,
        "threads": 128,
        "has_window": False,
        "has_sinks": False,
        "stores_lse": True,
    },
)
READ = """
import pickle, sys
spec = pickle.loads(bytes.fromhex(sys.argv[1]))
binary = spec.compile(90)
assert not {"tilelang", "torch", "tvm"} & set(sys.modules), "a kernel on disk needs no compiler"
print(len(binary.cubin), binary.kernel, binary.threads_per_block, binary.smem_bytes)
"""

LISTED = """
import sys
from tilescout.kernels.paged_decode import PagedDecodeProblem
from tilescout.kernels.registry import template
from tilescout.search_spaces.registry import joint_space
from tilescout.tuner.catalog import gpu
problem = PagedDecodeProblem(16, 8192, 32, 8, 128, 16, "bfloat16")
seeds = joint_space(problem, gpu("h200")).valid_seeds()
assert {"triton", "tilelang_gather", "tilelang_page"} <= {seed.template for seed in seeds}
for seed in seeds:
    template("paged_decode", seed.template).kernel_specs(problem, seed)
assert not {"tilelang", "tvm"} & set(sys.modules)
"""


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """The folder of this test's kernels, not there yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "tilescout" / "tilelang"


def test_a_kernel_is_compiled_once_and_read_without_a_compiler(cache) -> None:
    binary = SPEC.compile(90)
    (folder,) = cache.iterdir()
    assert sorted(f.name for f in folder.iterdir()) == ["facts.json", "kernel.cubin", "launch.so"]
    facts = read_facts(binary)
    assert facts.kernel == "paged_decode_merge_kernel"
    assert facts.threads_per_block == 128
    assert 16 <= facts.registers <= 255
    assert facts.spill_bytes == 0
    assert facts.instruction_mix["load_global"] > 0
    command = [sys.executable, "-c", READ, pickle.dumps(SPEC).hex()]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    expected = (len(binary.cubin), binary.kernel, binary.threads_per_block, binary.smem_bytes)
    assert done.stdout.split() == list(map(str, expected))
    assert list(cache.iterdir()) == [folder]


def test_processes_that_need_one_kernel_compile_it_once(cache, monkeypatch) -> None:
    filled = []

    def fill(spec, folder, arch) -> None:
        filled.append(arch)
        time.sleep(0.2)
        folder.mkdir()
        (folder / "facts.json").write_text("{}")

    monkeypatch.setattr(TileLangKernelSpec, "_fill", fill)
    with ThreadPoolExecutor(4) as pool:
        folders = list(pool.map(SPEC._compiled, [90] * 4))
    assert filled == [90]
    assert list(cache.iterdir()) == [*set(folders)]


def test_the_instructions_are_those_of_tilelangs_own_compiler(cache) -> None:
    artifact = lowered(SPEC, 90)
    from tilelang.contrib.nvcc import compile_cuda
    from tilelang.env import CUTLASS_INCLUDE_DIR, TILELANG_TEMPLATE_PATH

    include = [f"-I{path}" for path in (TILELANG_TEMPLATE_PATH, CUTLASS_INCLUDE_DIR)]
    theirs = compile_cuda(
        artifact.kernel_source, "cubin", ["-arch=sm_90a"], options=["-std=c++20", *include]
    )
    ours = SPEC.compile(90)
    assert len(ours.cubin) < len(theirs)
    assert read_facts(ours) == read_facts(replace(ours, cubin=bytes(theirs)))


def test_what_shapes_a_kernel_is_its_key_and_nothing_else() -> None:
    shuffled = replace(SPEC, parameters=dict(reversed(SPEC.parameters.items())))
    assert shuffled._digest(90) == SPEC._digest(90)
    others = [
        SPEC._digest(100),
        replace(SPEC, parameters={**SPEC.parameters, "block_s": 16})._digest(90),
        replace(SPEC, pass_configs={"tl.disable_wgmma": True})._digest(90),
    ]
    assert len({SPEC._digest(90), *others}) == 4


def test_a_machine_without_a_toolkit_is_told(cache, monkeypatch) -> None:
    import tilelang

    monkeypatch.setattr(tilelang.env, "CUDA_HOME", "", raising=True)
    with pytest.raises(DeviceError, match=r"no CUDA toolkit.*set CUDA_HOME"):
        SPEC.compile(90)
    assert list(cache.iterdir()) == []


def test_templates_and_spaces_need_no_tilelang() -> None:
    command = [sys.executable, "-c", LISTED]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_failure_leaves_nothing_behind(cache) -> None:
    wrong = replace(SPEC, parameters={**SPEC.parameters, "dtype": "no such type"})
    with pytest.raises(Exception, match="no such type"):
        wrong.compile(90)
    assert list(cache.iterdir()) == []
