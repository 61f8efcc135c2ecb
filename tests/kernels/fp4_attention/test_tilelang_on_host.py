"""The TileLang kernels against the reference of their numerics: their CUDA, computed on the CPU.

``hopper_on_host.h`` stands in for the hardware: warp groups, matrix products from swizzled tiles,
TMA, barriers. Needs no GPU and no CUDA toolkit.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from fp4_calls import MODES, problem_of
from tilescout.kernels.fp4_attention import reference as ref
from tilescout.kernels.fp4_attention.tilelang_kernel import key_of_column
from tilescout.kernels.fp4_attention.tilelang_specs import (
    Fp4AttentionTileLangConfig,
    attention_spec,
)
from tilescout.kernels.quantization.block_tensor import BlockTensor
from tilescout.kernels.quantization.reference import dequantize
from tilescout.kernels.tilelang_spec import lowered

HERE = Path(__file__).parent
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


def kernel_of(problem, config, folder):
    """(program, path of its source) of the kernel as TileLang generates it."""
    spec = attention_spec(problem, config, stores_lse=True)
    artifact = lowered(spec, 90)
    (function,) = artifact.device_mod.functions.values()
    source = artifact.kernel_source
    start = source.index('extern "C" __global__')
    source = source[start:]
    shared = "extern __shared__ __align__(1024) uchar buf_dyn_shmem[];"
    assert shared in source
    source = source.replace(shared, "uchar* buf_dyn_shmem = shared_memory;")
    parameters = re.search(rf"{spec.name}\((.*?)\);", source)[1]
    names = [parameter.split()[-1] for parameter in parameters.split(", ")]
    values = {
        "LAUNCH": f"{spec.name}({', '.join(names)})",
        "NUM_THREADS": int(function.attrs["thread_extent"]["threadIdx.x"]),
        "SHARED_BYTES": int(function.attrs["dyn_shared_memory_buf"]),
        "HEAD_DIM": problem.head_dim,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "V_BYTES": 1 if problem.mode == "fp8_p" else 2,
        "HAS_MEANS": int(problem.q_mean != "none"),
        "OUT_TYPE": {"float32": "float", "bfloat16": "bfloat16_t"}[problem.out_dtype],
    }
    path = folder / "kernel.inc"
    path.write_text(source)
    return path, values


def compiled(path, values, folder):
    program = folder / "program"
    subprocess.run(
        [
            *(
                "g++",
                "-std=c++17",
                "-O2",
                "-fno-strict-aliasing",
                "-w",
                "-fpermissive",
                f'-DKERNEL="{path}"',
            ),
            *(f"-D{name}={value}" for name, value in values.items()),
            *("-o", program, HERE / "tilelang_on_host.cpp"),
        ],
        check=True,
    )
    return program


def values_of(tensor):
    """bf16 values of a block tensor without its tensor scale."""
    return dequantize(replace(tensor, tensor_scale=torch.ones_like(tensor.tensor_scale))).bfloat16()


def raw_inputs(problem, inputs):
    """What the driver reads, as bytes."""
    k = torch.nn.functional.pad(
        values_of(inputs.k), (0, 0, 0, problem.padded_keys - problem.kv_len)
    )
    if problem.mode == "fp8_p":
        k = k[:, :, [key_of_column(column) for column in range(problem.padded_keys)]]
    v = values_of(inputs.v) if isinstance(inputs.v, BlockTensor) else inputs.v
    sizes = (
        *(problem.batch, problem.num_qo_heads, problem.num_kv_heads, problem.query_len),
        *(problem.kv_len, problem.padded_keys, problem.num_q_means),
    )
    factor = inputs.sm_scale * np.log2(np.e)
    scales = (factor, inputs.q.tensor_scale.item(), inputs.k.tensor_scale.item())
    num_kv = problem.batch * problem.num_kv_heads
    v_scale = inputs.v_scale.flatten().expand(num_kv) if num_kv > 1 else inputs.v_scale.flatten()
    tensors = [
        v_scale,
        *([] if inputs.delta is None else [inputs.delta]),
        values_of(inputs.q),
        k,
        v,
    ]
    return b"".join(
        (
            np.array(sizes, np.int32).tobytes(),
            np.array(scales, np.float32).tobytes(),
            *(t.contiguous().flatten().view(torch.uint8).numpy().tobytes() for t in tensors),
        )
    )


def outputs_of(problem, inputs, program, folder, *, is_reversed=False):
    """Outputs that the program computes."""
    given, made = folder / "inputs", folder / "outputs"
    given.write_bytes(raw_inputs(problem, inputs))
    subprocess.run([program, given, made, str(int(is_reversed))], check=True, timeout=120)
    outputs = ref.make_outputs(problem, inputs)
    raw = torch.frombuffer(bytearray(made.read_bytes()), dtype=torch.uint8)
    size = outputs.out.numel() * outputs.out.element_size()
    outputs.out.copy_(raw[:size].view(outputs.out.dtype).view(outputs.out.shape))
    outputs.lse.copy_(raw[size:].view(torch.float32).view(outputs.lse.shape))
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
    program = compiled(*kernel_of(problem, config, tmp_path), tmp_path)
    outputs = outputs_of(problem, inputs, program, tmp_path)
    comparison = ref.compare(problem, inputs, outputs)
    assert comparison.reason is None
    bound = 4e-3 if problem.out_dtype == "bfloat16" else 5e-5
    assert comparison.relative_rms_error <= bound
    # Loading warps run ahead of the others there, and behind them here.
    assert ref.outputs_equal(
        outputs, outputs_of(problem, inputs, program, tmp_path, is_reversed=True)
    )


def changed(mode, right, wrong, folder):
    """A small problem, its inputs and the kernel with one thing wrong."""
    problem = problem_of(**MODES[mode], query_len=128, kv_len=128)
    inputs = ref.make_validation_inputs(problem, device="cpu", seed=3)
    path, values = kernel_of(problem, LARGE, folder)
    source = path.read_text()
    assert right in source
    path.write_text(source.replace(right, wrong))
    return problem, inputs, compiled(path, values, folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "right", "wrong"),
    [
        ("fp8_p", "__NV_SATFINITE, __NV_E4M3);", "__NV_SATFINITE, __NV_E4M3) & 0xF0F0;"),
        ("direct ceil", ", -0x1p+22f", ", -0x1p+21f"),
    ],
)
def test_a_mistake_in_the_kernel_is_found(mode, right, wrong, tmp_path) -> None:
    problem, inputs, program = changed(mode, right, wrong, tmp_path)
    outputs = outputs_of(problem, inputs, program, tmp_path)
    assert ref.compare(problem, inputs, outputs).reason is not None


@pytest.mark.slow
def test_a_wait_without_an_end_is_found(tmp_path) -> None:
    waits = "mbarrier[8].wait(0)", "mbarrier[8].wait(1)"
    problem, inputs, program = changed("nvfp4", *waits, tmp_path)
    with pytest.raises(subprocess.CalledProcessError) as raised:
        outputs_of(problem, inputs, program, tmp_path)
    assert raised.value.returncode == 3
