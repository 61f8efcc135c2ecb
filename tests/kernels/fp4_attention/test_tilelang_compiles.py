"""The TileLang template cross-compiles: a kernel of every kind, its products, no spills."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fp4_calls import MODES, problem_of
from tilescout.kernels.base import Config
from tilescout.kernels.fp4_attention import Fp4AttentionFwdOutputs
from tilescout.kernels.fp4_attention import reference as ref
from tilescout.kernels.registry import module_of, template
from tilescout.search_spaces.fp4_attention_fwd import SPACES
from tilescout.tuner.catalog import gpu
from tilescout.tuner.compile_pool import CompilePool
from tilescout.tuner.records import TrialStatus

NAME = "tilelang_emulated"
SIZES = {"num_qo_heads": 16, "num_kv_heads": 16, "query_len": 4096, "kv_len": 4096}
CASES = {
    "fp8_p": ("fp8_p", {"head_dim": 128}, (128, 128, 2, "tma_ws")),
    "direct, causal": ("direct ceil", {"head_dim": 128, "is_causal": True}, (64, 64, 2, "tma")),
    "affine, means": ("direct affine", {"q_mean": "block"}, (128, 128, 2, "tma_ws")),
    "nvfp4": ("nvfp4", {"head_dim": 128, "out_dtype": "bfloat16"}, (192, 64, 2, "tma_ws")),
}


def problem_and_config(case):
    mode, changes, values = CASES[case]
    names = ("block_m", "block_n", "num_stages", "load")
    config = Config.of(NAME, dict(zip(names, values, strict=True)))
    return problem_of(**{**SIZES, **MODES[mode], **changes}), config


@pytest.fixture(scope="module")
def results():
    """What the compile pool made of every case."""
    module = module_of("fp4_attention_fwd")
    with CompilePool(2) as pool:
        jobs = {
            case: pool.submit("fp4_attention_fwd", module, NAME, *problem_and_config(case), 90)
            for case in CASES
        }
        return {case: job.result() for case, job in jobs.items()}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_compiles_to_what_the_config_asks_for(case, results, h200) -> None:
    problem, config = problem_and_config(case)
    result = results[case]
    assert result.status is TrialStatus.OK, result.reason
    specs = template(problem.op, NAME).kernel_specs(problem, config)
    assert [facts.kernel for facts in result.facts] == [spec.name for spec in specs]
    assert all(facts.spill_bytes == 0 for facts in result.facts)
    attention = result.facts[-1]
    loading = 128 if config["load"] == "tma_ws" else 0
    assert attention.threads_per_block == 2 * config["block_m"] + loading
    assert attention.mma_kind.startswith("HGMMA")
    space = SPACES[NAME]
    assert space(problem, h200).check(config) is None
    # The space counts what the block takes, to the byte.
    bytes_a_key = 3 if problem.mode == "fp8_p" else 4
    ring = config["num_stages"] * config["block_n"] * bytes_a_key
    assert attention.smem_bytes == (2 * config["block_m"] + ring) * problem.head_dim
    widest = config.replace(num_stages=4, block_m=192, block_n=128)
    if problem.head_dim == 128:
        assert "bytes a block" in space(problem, h200).check(widest)


def test_a_wide_tile_leaves_no_registers(h200) -> None:
    problem, config = problem_and_config("fp8_p")
    reason = SPACES[NAME](problem, h200).check(config.replace(block_m=192))
    assert "registers a thread, of which the block leaves 160" in reason
    reason = SPACES[NAME](problem, h200).check(config.replace(block_m=64))
    assert "nothing to alternate with" in reason


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_space_and_estimates(mode, head_dim, h200) -> None:
    problem = problem_of(**{**SIZES, **MODES[mode], "head_dim": head_dim})
    space = SPACES[NAME](problem, h200)
    configs = list(space)
    assert space.default in configs
    assert len(configs) == len(set(configs)) >= 8
    assert len(space.valid_seeds()) >= 3
    for config in configs:
        estimates = template(problem.op, NAME).estimate(problem, config, h200)
        specs = template(problem.op, NAME).kernel_specs(problem, config)
        assert {e.kernel for e in estimates} == {s.name for s in specs}
        assert estimates[-1].flops >= problem.flops
        rows = -(-4096 // config["block_m"])
        assert estimates[-1].num_programs == 16 * rows


def test_sizes_of_a_call_are_no_part_of_a_kernel() -> None:
    problem, config = problem_and_config("fp8_p")
    other = replace(problem, batch=3, kv_len=77, query_len=5, num_qo_heads=2, num_kv_heads=2)
    chosen = template(problem.op, NAME)
    assert chosen.kernel_specs(other, config) == chosen.kernel_specs(problem, config)


REFUSED = {
    "head_dim=96 is not one of 64, 128": {"head_dim": 96},
    "batch=65536 is above 65535": {"batch": 65536},
    "num_qo_heads=65536 is above 65535": {"num_qo_heads": 65536},
    "products='native': TileLang 0.1.15": {"products": "native"},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_refuses_what_it_cannot_do_with_its_reason(reason, h200) -> None:
    chosen, problem = template("fp4_attention_fwd", NAME), problem_and_config("nvfp4")[0]
    assert chosen.supports(problem, h200) is None
    assert reason in chosen.supports(replace(problem, **REFUSED[reason]), h200)


def test_other_architectures_are_refused() -> None:
    chosen, problem = template("fp4_attention_fwd", NAME), problem_and_config("nvfp4")[0]
    assert "capability 10.0 is not 9.0" in chosen.supports(problem, gpu("b200"))


def test_outputs_that_it_cannot_serve_are_named() -> None:
    problem = problem_of(query_len=8, kv_len=16, out_dtype="bfloat16")
    inputs = ref.make_inputs(problem, device="cpu", seed=1)
    chosen = template(problem.op, NAME)
    out = ref.make_outputs(problem, inputs).out
    assert chosen.supports_tensors(problem, inputs, Fp4AttentionFwdOutputs(out, None)) is None
    padded = torch.empty(1, 2, 8, 68, dtype=out.dtype)[..., :64]
    shifted = torch.empty(out.numel() + 4, dtype=out.dtype)[4:].view(out.shape)
    refused = {"strides (1088, 544, 68, 1)": padded, "starts 8 bytes after": shifted}
    for reason, tensor in refused.items():
        outputs = Fp4AttentionFwdOutputs(tensor, None)
        assert reason in chosen.supports_tensors(problem, inputs, outputs)
    turned = replace(inputs, k=replace(inputs.k, codes=inputs.k.codes.mT.contiguous().mT))
    assert "codes of k: not contiguous" in chosen.supports_tensors(problem, turned)
