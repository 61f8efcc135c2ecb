"""The TileLang templates cross-compile: a kernel of every kind, with what its config asks for."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tilescout.kernels.base import Config
from tilescout.kernels.paged_decode import PagedDecodeProblem
from tilescout.kernels.paged_decode.reference import make_outputs, paged_inputs
from tilescout.kernels.registry import module_of, template
from tilescout.search_spaces.paged_decode import SPACES
from tilescout.tuner.compile_pool import CompilePool
from tilescout.tuner.records import TrialStatus

PROBLEM = PagedDecodeProblem(16, 8192, 32, 8, 128, 128, "bfloat16")
FULL = replace(PROBLEM, window_left=127, has_soft_cap=True, has_sinks=True, page_size=16)
SHAPE = {"block_n": 64, "block_h": 4, "threads": 128, "num_stages": 3, "swap_ab": False}
CASES = {
    "gather": (90, "tilelang_gather", FULL, {"matmul": "mma"}),
    "gather, split": (90, "tilelang_gather", PROBLEM, {"matmul": "mma", "num_splits": 8}),
    "page": (90, "tilelang_page", PROBLEM, {"matmul": "wgmma", "load": "page", "swap_ab": True}),
    "tma, small pages": (90, "tilelang_page", FULL, {"matmul": "mma", "load": "tma"}),
    "tma, warps of its own": (90, "tilelang_page", PROBLEM, {"matmul": "mma", "load": "tma_ws"}),
    "sm_100": (100, "tilelang_page", PROBLEM, {"matmul": "mma", "load": "tma"}),
    "sm_120": (120, "tilelang_gather", PROBLEM, {"matmul": "mma", "num_stages": 2}),
}


def config_of(name: str, values: dict[str, object]) -> Config:
    rule = {"split_rule": "count" if "num_splits" in values else "none"}
    eviction = {"kv_eviction": "evict_first"} if values.get("load", "page") != "page" else {}
    return Config.of(name, {**SHAPE, **rule, **eviction, **values})


@pytest.fixture(scope="module")
def results():
    """What the compile pool made of every case."""
    module = module_of("paged_decode")
    with CompilePool(2) as pool:
        jobs = {
            case: pool.submit("paged_decode", module, name, problem, config_of(name, values), arch)
            for case, (arch, name, problem, values) in CASES.items()
        }
        return {case: job.result() for case, job in jobs.items()}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_compiles_to_what_the_config_asks_for(case, results, h200) -> None:
    arch, name, problem, values = CASES[case]
    result, config = results[case], config_of(name, values)
    assert result.status is TrialStatus.OK, result.reason
    assert len(result.facts) == (2 if "num_splits" in values else 1)
    facts = result.facts[0]
    assert facts.kernel == "paged_decode_attention_kernel"
    assert facts.threads_per_block == (256 if values.get("load") == "tma_ws" else 128)
    assert facts.registers <= 255
    assert facts.instruction_mix["async_copy"] > 0
    assert facts.mma_kind.startswith("HGMMA" if values["matmul"] == "wgmma" else "HMMA")
    device = replace(h200, compute_capability=(arch // 10, arch % 10))
    assert template("paged_decode", name).supports(problem, device) is None
    # The space refuses the config where a block may have one byte less than this one takes.
    space = SPACES[name]
    assert space(problem, device).check(config) is None
    small = replace(device, smem_per_block_bytes=facts.smem_bytes - 1)
    assert "shared memory" in space(problem, small).check(config)


@pytest.mark.parametrize("name", ["tilelang_gather", "tilelang_page"])
def test_an_estimate_names_the_kernels(name, h200) -> None:
    chosen = template("paged_decode", name)
    split = SPACES[name](PROBLEM, h200).default
    whole = Config.of(name, {k: v for k, v in split.values if k != "num_splits"})
    for config in (split, whole.replace(split_rule="none")):
        estimates = chosen.estimate(PROBLEM, config, h200)
        specs = chosen.kernel_specs(PROBLEM, config)
        assert [e.kernel for e in estimates] == [s.name for s in specs]
        assert all(e.num_programs > 0 and e.bytes_moved > 0 for e in estimates)


@pytest.mark.parametrize("name", ["tilelang_gather", "tilelang_page"])
def test_sizes_of_a_call_are_no_part_of_a_kernel(name, h200) -> None:
    space = SPACES[name](PROBLEM, h200)
    specs = template("paged_decode", name).kernel_specs(PROBLEM, space.default)
    other = replace(PROBLEM, batch=3, kv_len=4097, num_qo_heads=4, num_kv_heads=1, kv_layout="HND")
    assert template("paged_decode", name).kernel_specs(other, space.default) == specs


REFUSED = {
    "is not one of": {"head_dim": 80, "head_dim_v": 80},
    "at most 64": {"num_qo_heads": 1024},
    "third axis": {"batch": 65536},
    "query_len=2 is not 1": {"query_len": 2},
    "is not q's dtype": {"kv_dtype": "float8_e4m3fn"},
    "head_dim_v=64 is not": {"num_kv_heads": 1, "num_qo_heads": 4, "head_dim_v": 64},
    "has_alibi is true": {"has_alibi": True},
    "has_rope is true": {"has_rope": True},
}


@pytest.mark.parametrize("name", ["tilelang_gather", "tilelang_page"])
@pytest.mark.parametrize("reason", REFUSED)
def test_refuses_what_it_cannot_do_with_its_reason(name, reason, h200) -> None:
    chosen = template("paged_decode", name)
    assert chosen.supports(PROBLEM, h200) is None
    assert reason in chosen.supports(replace(PROBLEM, **REFUSED[reason]), h200)


def test_pages_that_no_tile_divides_are_gathered(h200) -> None:
    odd = replace(PROBLEM, page_size=7)
    assert "page_size=7" in template("paged_decode", "tilelang_page").supports(odd, h200)
    assert template("paged_decode", "tilelang_gather").supports(odd, h200) is None


def test_other_architectures_are_refused(h200) -> None:
    ampere = replace(h200, compute_capability=(8, 0))
    assert "8.0" in template("paged_decode", "tilelang_gather").supports(PROBLEM, ampere)


@pytest.mark.parametrize("name", ["tilelang_gather", "tilelang_page"])
def test_tensors_that_it_cannot_serve_are_named(name) -> None:
    chosen, problem = template("paged_decode", name), replace(PROBLEM, batch=4, page_size=16)
    inputs = paged_inputs(problem, [70, 0, 1, 16], device="cpu", seed=8)
    assert chosen.supports_tensors(problem, inputs, make_outputs(problem, inputs)) is None
    padded = inputs.q.new_zeros((*inputs.q.shape[:-1], 129))
    shifted = inputs.q.new_zeros(inputs.q.numel() + 4)[4:].view(inputs.q.shape)
    dense = paged_inputs(problem, [70, 0, 1, 16], device="cpu", seed=8, is_dense=True)
    refused = {
        "q has strides (4128, 129, 1)": replace(inputs, q=padded[..., :128]),
        "q has strides (4096, 1, 32); the last": replace(inputs, q=inputs.q.mT.contiguous().mT),
        "q starts 8 bytes after": replace(inputs, q=shifted),
        "different strides": replace(inputs, v_cache=inputs.v_cache.clone()),
        "k_scale and v_scale": replace(inputs, v_scale=0.5),
        "seq_lens": dense,
    }
    for reason, tensors in refused.items():
        assert reason in chosen.supports_tensors(problem, tensors)
