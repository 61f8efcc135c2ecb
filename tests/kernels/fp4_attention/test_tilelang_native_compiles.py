"""The TileLang template for sm_120 cross-compiles: seeds, their products, no spills; its space."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace

import pytest
import torch
from fp4_calls import problem_of
from tilescout.kernels.fp4_attention import Fp4AttentionFwdOutputs
from tilescout.kernels.fp4_attention import reference as ref
from tilescout.kernels.fp4_attention.tilelang_native_launcher import native_arguments
from tilescout.kernels.quantization.reference import dequantize
from tilescout.kernels.registry import module_of, template
from tilescout.search_spaces.fp4_attention_fwd import SPACES
from tilescout.tuner.catalog import gpu
from tilescout.tuner.compile_pool import compile_config
from tilescout.tuner.prediction.binary import cuobjdump_path
from tilescout.tuner.records import TrialStatus

NAME = "tilelang_native"
SIZES = {"num_qo_heads": 24, "num_kv_heads": 24, "query_len": 4096, "kv_len": 4096}
NVFP4_PRODUCT = "OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X"
"""The opcode of ``mma`` with ``kind::mxf4nvf4``, ``scale_vec::4X`` and e4m3 scales."""
KINDS = {
    "D 128": {"head_dim": 128},
    "D 64": {"head_dim": 64},
    "causal, means": {"head_dim": 128, "is_causal": True, "q_mean": "block"},
}


def native(**changes):
    return problem_of(**{**SIZES, "products": "native", "out_dtype": "bfloat16", **changes})


def products_of(spec, arch, folder):
    """Opcodes of all matrix instructions in a kernel."""
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(spec.compile(arch).cubin)
    command = [str(cuobjdump_path()), "-sass", str(cubin)]
    sass = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return set(re.findall(r"\b[A-Z]*MMA\b[\w.]*", sass))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_seeds_multiply_nvfp4_and_do_not_spill(kind, tmp_path) -> None:
    device, problem = gpu("rtx5090"), native(**KINDS[kind])
    chosen, space = template(problem.op, NAME), SPACES[NAME](problem, device)
    for config in dict.fromkeys((space.default, *space.valid_seeds())):
        result = compile_config(
            problem.op, module_of(problem.op), NAME, problem, config, device.arch
        )
        assert result.status is TrialStatus.OK, (config, result.reason)
        (facts,) = result.facts
        assert facts.mma_kind == NVFP4_PRODUCT
        assert facts.spill_bytes == 0, config
        assert facts.threads_per_block == config["threads"]
        (spec,) = chosen.kernel_specs(problem, config)
        assert facts.kernel == spec.name
        assert products_of(spec, device.arch, tmp_path) == {NVFP4_PRODUCT}
        # The space counts what the block takes, but for the start of the ring.
        rows, keys = config["block_m"], config["block_n"]
        codes = rows * (problem.head_dim + keys)
        codes += 2 * config["num_stages"] * keys * problem.head_dim
        assert codes * 9 // 16 <= facts.smem_bytes <= codes * 9 // 16 + 1024


@pytest.mark.parametrize("sku", ["rtx5090", "rtxpro6000"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_space_and_estimates(sku, head_dim) -> None:
    device, problem = gpu(sku), native(head_dim=head_dim)
    chosen, space = template(problem.op, NAME), SPACES[NAME](problem, device)
    assert chosen.supports(problem, device) is None
    configs = list(space)
    assert space.default in configs
    assert len(configs) == len(set(configs)) >= 15
    assert len(space.valid_seeds()) >= 5
    for config in configs:
        (estimate,) = chosen.estimate(problem, config, device)
        assert estimate.kernel == chosen.kernel_specs(problem, config)[0].name
        assert estimate.flops >= problem.flops
        assert estimate.num_programs == 24 * -(-4096 // config["block_m"])


def test_what_the_space_refuses_has_its_reason() -> None:
    problem = native(head_dim=128)
    space = SPACES[NAME](problem, gpu("rtx5090"))
    refused = {
        "8 warps with 16 rows each, of 64": {"threads": 256},
        "256 registers a thread for output and scores": {"threads": 64, "block_n": 128},
    }
    for reason, changes in refused.items():
        assert reason in space.check(space.default.replace(**changes))
    widest = space.default.replace(block_m=128, block_n=128, threads=256, num_stages=4)
    assert space.check(widest) is None
    less = replace(gpu("rtx5090"), smem_per_block_bytes=93_183)
    assert "93184 bytes a block" in SPACES[NAME](problem, less).check(widest)


def test_sizes_of_a_call_are_no_part_of_a_kernel() -> None:
    problem = native(head_dim=128)
    config = SPACES[NAME](problem, gpu("rtx5090")).default
    other = replace(problem, batch=3, kv_len=77, query_len=5, num_qo_heads=2, num_kv_heads=2)
    chosen = template(problem.op, NAME)
    assert chosen.kernel_specs(other, config) == chosen.kernel_specs(problem, config)


REFUSED = {
    "head_dim=96 is not one of 64, 128": {"head_dim": 96},
    "batch=65536 is above 65535": {"batch": 65536},
    "num_qo_heads=65536 is above 65535": {"num_qo_heads": 65536, "num_kv_heads": 65536},
    "products='emulated': the template triton_emulated": {"products": "emulated"},
    "mode='direct': TileLang 0.1.15 has no product of MXFP4": {"mode": "direct"},
    "mode='fp8_p': it multiplies P and V as NVFP4": {"mode": "fp8_p"},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_refuses_what_it_cannot_do_with_its_reason(reason) -> None:
    chosen, device, problem = template("fp4_attention_fwd", NAME), gpu("rtx5090"), native()
    assert chosen.supports(problem, device) is None
    assert reason in chosen.supports(replace(problem, **REFUSED[reason]), device)


@pytest.mark.parametrize("sku", ["h200", "b200", "b300"])
def test_other_architectures_are_refused(sku) -> None:
    reason = template("fp4_attention_fwd", NAME).supports(native(), gpu(sku))
    assert "is not 12.0, for which alone TileLang 0.1.15" in reason


def test_outputs_that_it_cannot_serve_are_named() -> None:
    problem = native(query_len=8, kv_len=16)
    inputs = ref.make_inputs(problem, device="cpu", seed=1)
    chosen, out = template(problem.op, NAME), ref.make_outputs(problem, inputs).out
    assert chosen.supports_tensors(problem, inputs) is None
    assert chosen.supports_tensors(problem, inputs, Fp4AttentionFwdOutputs(out, None)) is None
    padded = torch.empty(*out.shape[:3], 68, dtype=out.dtype)[..., :64]
    reason = chosen.supports_tensors(problem, inputs, Fp4AttentionFwdOutputs(padded, None))
    assert "no multiples of 8" in reason


def test_arguments_are_codes_and_words_of_four_scales() -> None:
    problem = native(query_len=5, kv_len=70, num_qo_heads=2, num_kv_heads=2)
    inputs = ref.make_inputs(problem, device="cpu", seed=1)
    arguments = native_arguments(problem, inputs, ref.make_outputs(problem, inputs))
    operands = (inputs.q, inputs.k, inputs.v)
    for operand, codes, words in zip(operands, arguments[0:6:2], arguments[1:6:2], strict=True):
        assert codes.data_ptr() == operand.codes.data_ptr()
        assert words.data_ptr() == operand.scales.data_ptr()
        assert words.dtype == torch.uint32
        # Byte b of word w scales codes 64 w + 16 b on, low nibbles first.
        raw = words.view(torch.int32)[..., None] >> torch.tensor([0, 8, 16, 24])
        scales = (raw & 255).to(torch.uint8).flatten(-2).view(torch.float8_e4m3fn).float()
        nibbles = torch.stack((codes & 15, codes >> 4), -1).flatten(-2).long()
        table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        values = table[nibbles & 7] * torch.where(nibbles & 8 > 0, -1.0, 1.0)
        values = values * scales.repeat_interleave(16, -1) * operand.tensor_scale
        torch.testing.assert_close(values, dequantize(operand), rtol=1e-6, atol=0)
    assert arguments[-2:] == (problem.padded_keys // 64, 1)
