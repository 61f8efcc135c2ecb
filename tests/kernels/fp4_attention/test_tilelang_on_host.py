"""The TileLang kernels against the reference of their numerics: their CUDA, computed on the CPU.

``HostKernel`` stands in for the hardware: warp groups, matrix products from swizzled tiles, TMA,
barriers. Needs no GPU and no CUDA toolkit.
"""

from __future__ import annotations

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from fp4_calls import MODES, problem_of
from fp4_codes import check_codes
from tilelang_on_host import HostKernel
from tilescout.kernels.fp4_attention import reference as ref
from tilescout.kernels.fp4_attention.tilelang_kernel import ELEMENTS_PER_STRIDE, key_of_column
from tilescout.kernels.fp4_attention.tilelang_specs import (
    Fp4AttentionTileLangConfig,
    attention_spec,
)
from tilescout.kernels.quantization.block_tensor import BlockTensor
from tilescout.kernels.quantization.reference import dequantize

SMALL = Fp4AttentionTileLangConfig(64, 64, 2, "tma")
LARGE = Fp4AttentionTileLangConfig(128, 128, 2, "tma_ws")
TAILS = {"query_len": 150, "kv_len": 197}
CASES = {
    **{f"{mode}, tails": (LARGE, mode, TAILS) for mode in MODES},
    "fp8_p, small tiles": (SMALL, "fp8_p", TAILS),
    "direct, small tiles": (SMALL, "direct ceil", TAILS),
    "nvfp4, three warp groups": (
        Fp4AttentionTileLangConfig(192, 64, 3, "tma_ws"),
        "nvfp4",
        {"query_len": 200, "kv_len": 260},
    ),
    "D 128, grouped heads": (
        LARGE,
        "direct ceil",
        {"head_dim": 128, "num_qo_heads": 4, "num_kv_heads": 2, "query_len": 130, "kv_len": 130},
    ),
    "fp8_p, D 128, two entries": (
        SMALL,
        "fp8_p",
        {"head_dim": 128, "batch": 2, "query_len": 64, "kv_len": 300},
    ),
    "causal": (LARGE, "fp8_p", {"query_len": 190, "kv_len": 260, "is_causal": True}),
    "causal, rows that see no key": (
        SMALL,
        "nvfp4",
        {"query_len": 200, "kv_len": 70, "is_causal": True},
    ),
    "means of blocks": (LARGE, "fp8_p", {**TAILS, "q_mean": "block"}),
    "means, small tiles": (SMALL, "direct affine", {**TAILS, "q_mean": "block"}),
    "bf16": (LARGE, "direct ceil", {**TAILS, "out_dtype": "bfloat16"}),
}


def values_of(tensor):
    """bf16 values of a block tensor without its tensor scale."""
    return dequantize(replace(tensor, tensor_scale=torch.ones_like(tensor.tensor_scale))).bfloat16()


def arguments_of(problem, inputs, outputs):
    """What the kernel is given, by the names it has for it."""
    k = torch.nn.functional.pad(
        values_of(inputs.k), (0, 0, 0, problem.padded_keys - problem.kv_len)
    )
    if problem.mode == "fp8_p":
        k = k[:, :, [key_of_column(column) for column in range(problem.padded_keys)]]
    strides = (stride // ELEMENTS_PER_STRIDE for stride in outputs.out.stride()[:3])
    return {
        "Q": values_of(inputs.q).contiguous(),
        "K": k.contiguous(),
        "V": values_of(inputs.v) if isinstance(inputs.v, BlockTensor) else inputs.v,
        "QScale": inputs.q.tensor_scale.view(-1),
        "KScale": inputs.k.tensor_scale.view(-1),
        "VScale": inputs.v_scale.view(-1),
        "Delta": inputs.delta,
        "Out": outputs.out,
        "Lse": outputs.lse,
        "logit_scale": inputs.sm_scale * np.log2(np.e),
        **dict(zip(("out_stride_b", "out_stride_h", "out_stride_s"), strides, strict=True)),
        **{"batch": problem.batch, "num_heads": problem.num_qo_heads},
        **{"num_kv_heads": problem.num_kv_heads, "query_len": problem.query_len},
        **{"kv_len": problem.kv_len, "padded_keys": problem.padded_keys},
        "num_means": problem.num_q_means,
    }


def kernel_of(problem, config, folder, *, change=None):
    """The attention kernel that the launcher would take, for the CPU."""
    return HostKernel.of(attention_spec(problem, config, stores_lse=True), folder, change=change)


def outputs_of(problem, config, inputs, kernel, *, is_reversed=False):
    """Outputs that the kernel computes."""
    outputs = ref.make_outputs(problem, inputs)
    grid = (-(-problem.query_len // config.block_m), problem.num_qo_heads, problem.batch)
    kernel(grid, arguments_of(problem, inputs, outputs), is_reversed=is_reversed)
    return outputs


@pytest.fixture(scope="module", autouse=True)
def _needs_a_compiler() -> None:
    if shutil.which("g++") is None:
        pytest.skip("no g++")


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_kernels_match_the_reference(case, tmp_path) -> None:
    config, mode, changes = CASES[case]
    problem = problem_of(**MODES[mode], **changes)
    inputs = ref.make_validation_inputs(problem, device="cpu", seed=3)
    kernel = kernel_of(problem, config, tmp_path)
    outputs = outputs_of(problem, config, inputs, kernel)
    comparison = ref.compare(problem, inputs, outputs)
    assert comparison.reason is None
    bound = 4e-3 if problem.out_dtype == "bfloat16" else 5e-5
    assert comparison.relative_rms_error <= bound
    # Loading warps run ahead of the others there, and behind them here.
    assert ref.outputs_equal(outputs, outputs_of(problem, config, inputs, kernel, is_reversed=True))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["nvfp4", "direct affine", "fp8_p"])
def test_codes_are_the_references(mode, tmp_path) -> None:
    problem = problem_of(**MODES[mode], query_len=128, kv_len=256, head_dim=128)
    inputs = ref.make_inputs(problem, device="cpu", seed=3)
    kernel = kernel_of(problem, LARGE, tmp_path)

    def launch(problem, inputs):
        return outputs_of(problem, LARGE, inputs, kernel)

    check_codes(mode, problem, inputs, launch)


def changed(mode, right, wrong, folder):
    """A small problem, its inputs and the outputs of a kernel with one thing wrong."""
    problem = problem_of(**MODES[mode], query_len=128, kv_len=256)
    inputs = ref.make_validation_inputs(problem, device="cpu", seed=3)

    def change(cuda):
        assert right in cuda
        return cuda.replace(right, wrong)

    return problem, inputs, kernel_of(problem, LARGE, folder, change=change)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "right", "wrong"),
    [
        ("fp8_p", "__NV_SATFINITE, __NV_E4M3);", "__NV_SATFINITE, __NV_E4M3) & 0xF0F0;"),
        ("direct ceil", ", -0x1p+22f", ", -0x1p+21f"),
        ("direct ceil", "tl::warpgroup_wait<0>();", ""),
    ],
)
def test_a_mistake_in_the_kernel_is_found(mode, right, wrong, tmp_path) -> None:
    problem, inputs, kernel = changed(mode, right, wrong, tmp_path)
    outputs = outputs_of(problem, LARGE, inputs, kernel)
    assert ref.compare(problem, inputs, outputs).reason is not None


@pytest.mark.slow
def test_a_wait_without_an_end_is_found(tmp_path) -> None:
    waits = "mbarrier[8].wait(0)", "mbarrier[8].wait(1)"
    problem, inputs, kernel = changed("nvfp4", *waits, tmp_path)
    with pytest.raises(RuntimeError, match="wait for one another"):
        outputs_of(problem, LARGE, inputs, kernel)
