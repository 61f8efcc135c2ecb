"""The Triton template compiles for every architecture that it claims, with every option."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from moving_pointers import disassembled
from tilescout.kernels.paged_decode import PagedDecodeProblem
from tilescout.kernels.registry import module_of, template
from tilescout.search_spaces.paged_decode import triton_space
from tilescout.tuner.catalog import gpu, gpu_names
from tilescout.tuner.compile_pool import compile_config
from tilescout.tuner.records import TrialStatus

ARCHITECTURES = {gpu(sku).arch: sku for sku in gpu_names()}
PROBLEM = PagedDecodeProblem(64, 8192, 32, 8, 128, 16, "bfloat16")
OPTIONS = {
    "plain": {},
    "all but ALiBi": {
        "query_len": 3,
        "window_left": 127,
        "has_soft_cap": True,
        "has_sinks": True,
        "has_rope": True,
    },
    "ALiBi, e4m3": {"has_alibi": True, "kv_dtype": "float8_e4m3fn"},
    "e5m2, 96 of 128": {"head_dim": 96, "kv_dtype": "float8_e5m2", "dtype": "float16"},
}


@pytest.mark.parametrize("arch", sorted(ARCHITECTURES))
@pytest.mark.parametrize("options", OPTIONS)
def test_default_compiles_and_fits(arch: int, options: str) -> None:
    device = gpu(ARCHITECTURES[arch])
    problem = PROBLEM.changed(OPTIONS[options])
    assert template("paged_decode", "triton").supports(problem, device) is None
    result = compile_config(
        *("paged_decode", module_of("paged_decode"), "triton"),
        *(problem, triton_space(problem, device).default, arch),
    )
    assert result.status is TrialStatus.OK, result.reason
    attention, merge = result.facts
    assert attention.smem_bytes <= device.smem_per_block_bytes
    assert attention.spill_bytes == merge.spill_bytes == 0
    assert attention.mma_kind != "none"


DOUBLE = re.compile(r"\bD(?:ADD|MUL|FMA|SETP)\b|\.F64\b")


def code_of(sku: str, **changes: object) -> str:
    """Machine code of the attention kernel."""
    device, problem = gpu(sku), PROBLEM.changed(changes)
    config = triton_space(problem, device).default
    attention, *_ = template("paged_decode", "triton").kernel_specs(problem, config)
    return disassembled(attention.compile(device.arch).cubin)


def loops_over_tokens(sass: str) -> list[str]:
    """Code between a label and a branch back to it where that has matrix products."""
    labels = {match[1]: match.end() for match in re.finditer(r"^(\.L_\w+):", sass, re.MULTILINE)}
    branches = re.finditer(r"\bBRA\b.*`\((\.L_\w+)\)", sass)
    loops = (sass[labels[match[1]] : match.start()] for match in branches)
    return [loop for loop in loops if "MMA" in loop]


@pytest.mark.parametrize("sku", ["h200", "rtx5090"])
def test_doubles_of_rope_lie_before_the_loop_and_in_no_other_kernel(sku: str) -> None:
    # Consumer GPUs compute one double where they compute 64 floats.
    rotating = code_of(sku, has_rope=True)
    loops = loops_over_tokens(rotating)
    assert DOUBLE.search(rotating)
    assert loops
    assert not any(map(DOUBLE.search, loops))
    assert not DOUBLE.search(code_of(sku))


def test_every_architecture_of_the_issue_is_there() -> None:
    assert set(ARCHITECTURES) >= {90, 100, 103, 120}


def test_older_architectures_are_refused(h200) -> None:
    older = replace(h200, compute_capability=(8, 9))
    reason = template("paged_decode", "triton").supports(PROBLEM, older)
    assert reason is not None
    assert "8.9" in reason
