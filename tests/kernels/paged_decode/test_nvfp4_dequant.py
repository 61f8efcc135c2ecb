"""The assembly that turns codes into fp16, run word by word; and what the template compiles to."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ptx_words import run_ptx
from tilescout.kernels.base import Config
from tilescout.kernels.paged_decode import PagedDecodeProblem
from tilescout.kernels.paged_decode import triton_kernel_nvfp4_dequant as device_code
from tilescout.kernels.quantization.codec import decode
from tilescout.kernels.registry import module_of, template
from tilescout.search_spaces.paged_decode_nvfp4 import nvfp4_space
from tilescout.tuner.catalog import gpu
from tilescout.tuner.compile_pool import compile_config
from tilescout.tuner.records import TrialStatus

NVFP4 = PagedDecodeProblem(64, 8192, 32, 8, 128, 16, "bfloat16", kv_dtype="nvfp4")
PLANES = {
    "shift": device_code._PLANES_BY_SHIFT,
    "carry": device_code._PLANES_BY_CARRY,
    "hardware": device_code._PLANES_BY_HARDWARE,
}
WORDS = {
    "shift": device_code._WORD_BY_SHIFT,
    "carry": device_code._WORD_BY_CARRY,
    "hardware": device_code._WORD_BY_HARDWARE,
}


def values_of(codes: np.ndarray, dequant: str) -> np.ndarray:
    """What the assembly should give for codes."""
    exact = decode(torch.from_numpy(codes.astype(np.uint8))).numpy()
    return (exact * (1.0 if dequant == "hardware" else 2.0**-14)).astype(np.float16)


def bits_of(halves: np.ndarray) -> np.ndarray:
    return halves.view(np.uint16)


@pytest.mark.parametrize("dequant", PLANES)
def test_planes_are_the_codes_of_two_words_of_four(dequant: str) -> None:
    low = np.arange(2**16, dtype=np.uint32)
    high = np.random.default_rng(0).permutation(2**16).astype(np.uint32)
    registers = run_ptx(PLANES[dequant].value, {"$4": low | (high << 16)})
    for index in range(4):
        plane = registers[f"${index}"]
        for half, word in ((plane & 0xFFFF, low), (plane >> 16, high)):
            expected = values_of((word >> (4 * index)) & 15, dequant)
            assert np.array_equal(half.astype(np.uint16), bits_of(expected))


@pytest.mark.parametrize("dequant", WORDS)
def test_a_word_of_eight_gives_its_codes_in_order(dequant: str) -> None:
    words = np.random.default_rng(1).integers(0, 2**32, 2**17, dtype=np.uint32)
    registers = run_ptx(WORDS[dequant].value, {"$8": words})
    for index in range(8):
        expected = values_of((words >> (4 * index)) & 15, dequant)
        assert np.array_equal(registers[f"${index}"].astype(np.uint16), bits_of(expected))


def test_a_wrong_instruction_would_show() -> None:
    text = PLANES["carry"].value.replace("0x70707070", "0x60606060")
    low = np.arange(2**16, dtype=np.uint32)
    plane = run_ptx(text, {"$4": low})["$0"] & 0xFFFF
    assert not np.array_equal(plane.astype(np.uint16), bits_of(values_of(low & 15, "carry")))


def test_every_product_of_a_code_and_a_scale_is_exact_in_fp16() -> None:
    codes = decode(torch.arange(16, dtype=torch.uint8))
    scales = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    for factor in (1.0, 2.0**-14):
        halves = (codes * factor).half()[:, None] * scales.half()[None, :]
        assert torch.equal(halves.float(), codes[:, None] * factor * scales[None, :])


def compiled(problem: PagedDecodeProblem, config: Config, sku: str):
    result = compile_config(
        "paged_decode",
        module_of("paged_decode"),
        "triton_nvfp4",
        problem,
        config,
        gpu(sku).arch,
    )
    assert result.status is TrialStatus.OK, result.reason
    return result.facts


@pytest.mark.slow
@pytest.mark.parametrize("sku", ["h200", "b200", "rtx5090"])
def test_seeds_of_every_operand_compile_without_a_spill(sku: str) -> None:
    device = gpu(sku)
    assert template("paged_decode", "triton_nvfp4").supports(NVFP4, device) is None
    seeds = nvfp4_space(NVFP4, device).valid_seeds()
    unsplit = {
        (seed["dequant"], seed["v_operand"]): seed for seed in seeds if seed["split_rule"] == "none"
    }
    assert {seed["dequant"] for seed in unsplit.values()} >= {"shift", "carry"}
    for seed in unsplit.values():
        (attention,) = compiled(NVFP4, seed, sku)
        assert attention.spill_bytes == 0, seed
        assert attention.smem_bytes <= device.smem_per_block_bytes, seed
        # 16-bit products: the specification refuses any other kind when it compiles.
        assert "E2M1" not in attention.mma_kind, seed
        assert attention.mma_kind != "none", seed


@pytest.mark.parametrize("split_rule", ["none", "count"])
def test_estimates_are_of_the_kernels_that_are_launched(split_rule: str) -> None:
    found, device = template("paged_decode", "triton_nvfp4"), gpu("h200")
    seeds = nvfp4_space(NVFP4, device).valid_seeds()
    seed = next(seed for seed in seeds if seed["split_rule"] == split_rule)
    specs = [spec.name for spec in found.kernel_specs(NVFP4, seed)]
    estimates = found.estimate(NVFP4, seed, device)
    assert [estimate.kernel for estimate in estimates] == specs
    assert estimates[0].bytes_moved >= NVFP4.bytes_moved


def loop_instructions_per_value(config: Config) -> float:
    """Lane operations of one pass of the loop for each value of K and V."""
    (attention, *_) = compiled(NVFP4, config, "h200")
    values = 2 * int(config["block_n"]) * NVFP4.head_dim
    return attention.loop_instructions * 32 * int(config["num_warps"]) / values


@pytest.mark.parametrize(("dequant", "bound"), [("shift", 3.8), ("carry", 3.65)])
def test_the_loop_is_within_the_budget_of_instructions(dequant: str, bound: float) -> None:
    # At full issue rate 6.9 lane operations a value take as long as reading an 8-bit cache.
    space = nvfp4_space(NVFP4, gpu("h200"))
    for tile in ((128, 4, "shared"), (64, 2, "registers")):
        seed = next(
            seed
            for seed in space.valid_seeds()
            if (seed["block_n"], seed["num_warps"], seed["v_operand"]) == tile
            and seed["maxnreg"] == 128
        )
        config = seed.replace(dequant=dequant)
        assert 2.0 < loop_instructions_per_value(config) < bound
        (attention, *_) = compiled(NVFP4, config, "h200")
        assert (attention.registers <= 128, attention.spill_bytes) == (True, 0)
