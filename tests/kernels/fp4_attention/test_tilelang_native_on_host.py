"""The TileLang kernel for sm_120 against the reference of its numerics: its CUDA, on the CPU.

``HostKernel`` stands in for the hardware: block-scaled products from the registers that the PTX ISA
gives each lane, ldmatrix, TMA, barriers. Needs no GPU and no CUDA toolkit.
"""

from __future__ import annotations

import re
import shutil

import pytest
import torch
from fp4_calls import problem_of
from tilelang_on_host import HostKernel
from tilescout.kernels.fp4_attention import reference as ref
from tilescout.kernels.fp4_attention.tilelang_native_launcher import native_arguments
from tilescout.kernels.fp4_attention.tilelang_native_specs import (
    Fp4AttentionTileLangNativeConfig,
    native_attention_spec,
)

SMALL = Fp4AttentionTileLangNativeConfig(64, 64, 128, 2)
LARGE = Fp4AttentionTileLangNativeConfig(128, 128, 256, 3)
TAILS = {"query_len": 150, "kv_len": 197}
CASES = {
    "tails": (LARGE, TAILS),
    "ring of two, five tiles": (SMALL, {"query_len": 70, "kv_len": 300}),
    "ring of four, warps with 32 rows": (
        Fp4AttentionTileLangNativeConfig(64, 64, 64, 4),
        {"query_len": 70, "kv_len": 401},
    ),
    "D 128, grouped heads, two entries": (
        LARGE,
        {"head_dim": 128, "batch": 2, "num_qo_heads": 4, "num_kv_heads": 2, **TAILS},
    ),
    "causal": (LARGE, {"query_len": 190, "kv_len": 260, "is_causal": True}),
    "causal, rows that see no key": (SMALL, {"query_len": 200, "kv_len": 70, "is_causal": True}),
    "means of blocks": (SMALL, {**TAILS, "q_mean": "block"}),
    "one key": (SMALL, {"query_len": 1, "kv_len": 1}),
    "bf16": (LARGE, {**TAILS, "out_dtype": "bfloat16"}),
}
ARGUMENTS = (
    *("Q", "QWords", "K", "KWords", "V", "VWords", "QScale", "KScale", "VScale"),
    *("Delta", "Out", "Lse", "logit_scale", "out_stride_b", "out_stride_h", "out_stride_s"),
    *("batch", "num_heads", "query_len", "kv_len", "padded_words", "num_means"),
)
"""Names that the generated code has for what the launcher passes."""


@pytest.fixture(scope="module", autouse=True)
def _needs_a_compiler() -> None:
    if shutil.which("g++") is None:
        pytest.skip("no g++")


def kernel_of(problem, config, folder, *, change=None):
    spec = native_attention_spec(problem, config, stores_lse=True)
    return HostKernel.of(spec, folder, arch=120, change=change)


def outputs_of(problem, config, inputs, kernel, *, is_reversed=False):
    """What the kernel makes of the launcher's own arguments."""
    outputs = ref.make_outputs(problem, inputs)
    outputs.out.fill_(float("nan"))
    outputs.lse.fill_(float("nan"))
    values = dict(zip(ARGUMENTS, native_arguments(problem, inputs, outputs), strict=True))
    values["num_kv_heads"] = problem.num_kv_heads
    grid = (config.row_tiles(problem), problem.num_qo_heads, problem.batch)
    kernel(grid, values, is_reversed=is_reversed)
    return outputs


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_kernel_matches_the_reference(case, tmp_path) -> None:
    config, changes = CASES[case]
    problem = problem_of(products="native", **changes)
    inputs = ref.make_validation_inputs(problem, device="cpu", seed=3)
    kernel = kernel_of(problem, config, tmp_path)
    outputs = outputs_of(problem, config, inputs, kernel)
    comparison = ref.compare(problem, inputs, outputs)
    assert comparison.reason is None
    bound = 4e-3 if problem.out_dtype == "bfloat16" else 5e-5
    assert comparison.relative_rms_error <= bound
    # The last warp runs first.
    assert ref.outputs_equal(outputs, outputs_of(problem, config, inputs, kernel, is_reversed=True))


@pytest.mark.slow
def test_outputs_do_not_depend_on_the_tile(tmp_path) -> None:
    problem = problem_of(products="native", head_dim=128, query_len=140, kv_len=333)
    inputs = ref.make_validation_inputs(problem, device="cpu", seed=5)
    small, large = (
        outputs_of(problem, config, inputs, kernel_of(problem, config, folder))
        for config, folder in ((SMALL, tmp_path / "small"), (LARGE, tmp_path / "large"))
        if folder.mkdir() is None
    )
    assert (small.out - large.out).norm() / large.out.norm() <= 2e-6
    torch.testing.assert_close(small.lse, large.lse, rtol=0, atol=2e-6)


MISTAKES = {
    "scales of another tile": (r"k_words\)\[(\(+)\(t % 2\)", r"k_words)[\1((t + 1) % 2)"),
    "the other slot of the ring": (r"k_tiles\)\[(\(+)\(t % 2\)", r"k_tiles)[\1((t + 1) % 2)"),
    "nibbles of P changed": (
        r"= __tl_cvt_float2_to_fp4x2\((.*?)\);",
        r"= __tl_cvt_float2_to_fp4x2(\1), __3.bits = __3.bits >> 4 | __3.bits << 4;",
    ),
}


def changed_kernel(problem, right, wrong, folder):
    def change(cuda: str) -> str:
        changed, count = re.subn(right, wrong, cuda)
        assert count > 0
        return changed

    return kernel_of(problem, SMALL, folder, change=change)


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_kernel_is_found(mistake, tmp_path) -> None:
    problem = problem_of(products="native", head_dim=128, query_len=64, kv_len=256)
    inputs = ref.make_validation_inputs(problem, device="cpu", seed=3)
    kernel = changed_kernel(problem, *MISTAKES[mistake], tmp_path)
    outputs = outputs_of(problem, SMALL, inputs, kernel)
    assert ref.compare(problem, inputs, outputs).reason is not None


@pytest.mark.slow
def test_a_missing_wait_is_found(tmp_path) -> None:
    problem = problem_of(products="native", head_dim=128, query_len=64, kv_len=256)
    inputs = ref.make_validation_inputs(problem, device="cpu", seed=3)
    kernel = changed_kernel(problem, r"ready\[\(t % 2\)\]\.wait\(.*?\);", "", tmp_path)
    with pytest.raises(RuntimeError, match="more arrivals than it counts"):
        outputs_of(problem, SMALL, inputs, kernel)
