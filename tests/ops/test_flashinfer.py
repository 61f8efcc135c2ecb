"""FlashInfer's wrapper over ours: signatures, values, buffers; what is refused says why."""

from __future__ import annotations

import math
import os
from dataclasses import replace

import pytest
import torch
from decode_calls import assert_right, pool_of, problem_of
from tilescout.errors import UnsupportedError, UsageError
from tilescout.kernels.paged_decode import reference as ref
from tilescout.kernels.paged_decode.inputs import Rope
from tilescout.ops.flashinfer import (
    BatchDecodeWithPagedKVCacheWrapper,
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
)
from tilescout.ops.flashinfer_plan import alibi_slopes

interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"
)
LENGTHS = [50, 7, 64]


def inputs_of(lengths=LENGTHS, device="cpu", **changes):
    return ref.paged_inputs(problem_of(**changes), lengths, device=device, seed=1)


def sizes(problem) -> tuple[int, int, int, int]:
    return problem.num_qo_heads, problem.num_kv_heads, problem.head_dim, problem.page_size


def planned(inputs, problem, layout="NHD", **options):
    wrapper = BatchDecodeWithPagedKVCacheWrapper(inputs.q.new_empty(16), layout)
    table = (inputs.kv_indptr, inputs.kv_indices, inputs.kv_last_page_len)
    wrapper.plan(*table, *sizes(problem), **options)
    return wrapper


class OnADevice:
    device: str

    @pytest.mark.parametrize("layout", ["NHD", "HND"])
    def test_plan_and_run(self, layout: str) -> None:
        problem = problem_of()
        inputs = inputs_of(device=self.device)
        wrapper = planned(inputs, problem, layout, q_data_type=torch.float16)
        pool = pool_of(inputs, layout)
        assert_right(inputs, wrapper.run(inputs.q, pool), None)
        out = torch.full_like(inputs.q, math.nan)
        lse = inputs.q.new_full(inputs.q.shape[:2], math.nan, dtype=torch.float32)
        got = wrapper.run(inputs.q, pool, out=out, lse=lse, return_lse=True)
        assert got[0] is out
        assert got[1] is lse
        assert_right(inputs, out, lse)
        assert_right(inputs, *wrapper.run_return_lse(inputs.q, tuple(pool.unbind(1))))

    def test_everything_that_plan_says_counts(self) -> None:
        problem = problem_of(window_left=20)
        inputs = inputs_of(device=self.device, window_left=20)
        inputs = replace(inputs, sm_scale=0.2, soft_cap=4.0, rope=Rope(5e4, 2.0))
        wrapper = planned(
            inputs,
            problem,
            data_type="float16",
            window_left=20,
            logits_soft_cap=4.0,
            sm_scale=0.2,
            pos_encoding_mode="ROPE_LLAMA",
            rope_theta=5e4,
            rope_scale=2.0,
        )
        assert_right(inputs, *wrapper.run(inputs.q, pool_of(inputs), return_lse=True))
        plain = planned(inputs, problem, data_type="float16", window_left=20)
        assert not torch.allclose(
            plain.run(inputs.q, pool_of(inputs)), wrapper.run(inputs.q, pool_of(inputs)), atol=1e-2
        )

    def test_alibi_has_the_slopes_of_the_paper(self) -> None:
        problem = problem_of(num_qo_heads=6)
        inputs = inputs_of(device=self.device, num_qo_heads=6)
        inputs = replace(inputs, alibi_slopes=alibi_slopes(6).to(self.device))
        wrapper = planned(inputs, problem, pos_encoding_mode="ALIBI")
        assert_right(inputs, wrapper.run(inputs.q, pool_of(inputs)), None)

    def test_a_dense_table_is_read_where_it_is_given_with_lengths(self) -> None:
        problem = problem_of()
        inputs = ref.paged_inputs(problem, LENGTHS, device=self.device, seed=1, is_dense=True)
        wrong = torch.zeros(4, dtype=torch.int32), inputs.kv_indices[0], torch.ones(3)
        wrapper = BatchDecodeWithPagedKVCacheWrapper(inputs.q.new_empty(1))
        tables = {"block_tables": inputs.kv_indices, "seq_lens": inputs.seq_lens}
        wrapper.plan(*wrong, *sizes(problem), **tables)
        assert_right(inputs, wrapper.run(inputs.q, pool_of(inputs)), None)

    def test_several_query_tokens(self) -> None:
        problem = problem_of(query_len=3)
        inputs = inputs_of(device=self.device, query_len=3)
        wrapper = planned(inputs, problem, q_len_per_req=3, is_causal=True)
        assert_right(inputs, wrapper.run(inputs.q, pool_of(inputs)), None)

    def test_the_table_lives_in_the_buffers(self) -> None:
        problem = problem_of()
        first, second = inputs_of([64, 64, 64], self.device), inputs_of([3, 40, 17], self.device)
        buffers = (
            torch.zeros(4, dtype=torch.int32, device=self.device),
            torch.zeros(32, dtype=torch.int32, device=self.device),
            torch.zeros(3, dtype=torch.int32, device=self.device),
        )
        wrapper = CUDAGraphBatchDecodeWithPagedKVCacheWrapper(first.q.new_empty(1), *buffers)
        for inputs in (first, second):
            table = (inputs.kv_indptr.cpu(), inputs.kv_indices, inputs.kv_last_page_len.cpu())
            wrapper.plan(*table, *sizes(problem))
            assert wrapper._plan.table.indices is buffers[1]
            assert_right(inputs, wrapper.run(inputs.q, pool_of(inputs)), None)
        longer = inputs_of([400, 200, 64], self.device)
        table = (longer.kv_indptr, longer.kv_indices, longer.kv_last_page_len)
        with pytest.raises(UsageError, match=r"length of indices.*at most 32, the length of paged"):
            wrapper.plan(*table, *sizes(problem))
        two = (longer.kv_indptr[:3], longer.kv_indices, longer.kv_last_page_len[:2])
        with pytest.raises(UsageError, match=r"batch of plan.* is 2: must be 3"):
            wrapper.plan(*two, *sizes(problem))

    def test_older_callers_plan_and_forward(self) -> None:
        problem = problem_of()
        inputs = replace(inputs_of(device=self.device), sm_scale=0.3)
        wrapper = BatchDecodeWithPagedKVCacheWrapper(inputs.q.new_empty(1), use_tensor_cores=True)
        table = (inputs.kv_indptr, inputs.kv_indices, inputs.kv_last_page_len)
        wrapper.begin_forward(*table, *sizes(problem), "NONE", -1, 0.0, "float16")
        assert_right(inputs, wrapper.forward(inputs.q, pool_of(inputs), sm_scale=0.3), None)
        results = wrapper.forward_return_lse(inputs.q, pool_of(inputs), pos_encoding_mode="NONE")
        assert_right(inputs, *results)
        wrapper.end_forward()


@pytest.mark.interpreter
@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:overflow encountered in exp2:RuntimeWarning")
@interpreted
class TestInterpreted(OnADevice):
    device = "cpu"


@pytest.mark.gpu
class TestOnGpu(OnADevice):
    device = "cuda"

    def test_a_captured_run_serves_the_next_plan(self) -> None:
        problem = problem_of()
        first, second = inputs_of([64, 64, 64], "cuda"), inputs_of([3, 40, 17], "cuda")
        buffers = [torch.zeros(n, dtype=torch.int32, device="cuda") for n in (4, 32, 3)]
        wrapper = CUDAGraphBatchDecodeWithPagedKVCacheWrapper(first.q.new_empty(1), *buffers)
        q, pool = first.q.clone(), pool_of(first)
        wrapper.plan(first.kv_indptr, first.kv_indices, first.kv_last_page_len, *sizes(problem))
        out = wrapper.run(q, pool)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            wrapper.run(q, pool, out=out)
        for inputs in (first, second):
            table = (inputs.kv_indptr, inputs.kv_indices, inputs.kv_last_page_len)
            wrapper.plan(*table, *sizes(problem))
            q.copy_(inputs.q)
            pool[: inputs.k_cache.shape[0]].copy_(pool_of(inputs))
            graph.replay()
            assert_right(inputs, out, None)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"fixed_split_size": 64}, "fixed_split_size=64 is not supported: how KV is split"),
        ({"disable_split_kv": True}, "disable_split_kv=True is not supported"),
        ({"window_right": 4}, "window_right=4 is not supported"),
        ({"use_token_head_sf": True}, "use_token_head_sf=True is not supported"),
        ({"o_data_type": "bfloat16"}, "the output has q's dtype"),
    ],
)
def test_plan_refuses_with_the_reason(options: dict, reason: str) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        planned(inputs_of(), problem_of(), **options)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"pos_encoding": "NONE"}, "plan has no argument 'pos_encoding': it takes pos_encoding_m"),
        ({"pos_encoding_mode": "ROPE"}, "'ROPE': must be one of NONE, ROPE_LLAMA, ALIBI"),
        ({"q_data_type": "half8"}, "data type .* is 'half8'"),
        ({"q_len_per_req": 0}, "q_len_per_req .* is 0: must be at least 1"),
    ],
)
def test_plan_names_what_is_wrong(options: dict, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        planned(inputs_of(), problem_of(), **options)


def test_plan_names_an_argument_given_twice() -> None:
    inputs = inputs_of()
    wrapper = BatchDecodeWithPagedKVCacheWrapper(inputs.q.new_empty(1))
    table = (inputs.kv_indptr, inputs.kv_indices, inputs.kv_last_page_len)
    with pytest.raises(UsageError, match="pos_encoding_mode of plan is given twice"):
        wrapper.plan(*table, *sizes(problem_of()), "NONE", pos_encoding_mode="NONE")
    with pytest.raises(UsageError, match=r"shape of indptr.*\(3,\)"):
        wrapper.plan(inputs.kv_indptr[:3], *table[1:], *sizes(problem_of()))


@pytest.mark.parametrize(
    ("change", "error", "reason"),
    [
        ({"kv_cache_sf": 1}, UsageError, "shape of kv_cache .* two codes a byte"),
        ({"skip_softmax_threshold_scale_factor": 1.0}, UnsupportedError, "softmax here is exact"),
        ({"window_left": 4}, UsageError, "window_left .* is 4: must be -1, as planned"),
        ({"q_len_per_req": 2}, UsageError, "q_len_per_req .* is 2: must be 1, as planned"),
    ],
)
def test_run_refuses_with_the_reason(change: dict, error: type, reason: str) -> None:
    inputs = inputs_of()
    wrapper = planned(inputs, problem_of())
    with pytest.raises(error, match=reason):
        wrapper.run(inputs.q, pool_of(inputs), **change)


def test_run_checks_tensors_against_the_plan() -> None:
    inputs = inputs_of()
    wrapper = planned(inputs, problem_of())
    pool = pool_of(inputs)
    with pytest.raises(UsageError, match=r"shape of q .*\(2, 4, 64\): must be \[3, 4, 64\]"):
        wrapper.run(inputs.q[:2], pool)
    with pytest.raises(UsageError, match=r"dtype of q .*bfloat16.*float16, as planned"):
        wrapper.run(inputs.q.bfloat16(), pool)
    with pytest.raises(UsageError, match=r"dtype of paged_kv_cache .*bfloat16"):
        wrapper.run(inputs.q, pool.bfloat16())
    with pytest.raises(UsageError, match=r"of a NHD cache .*\(2, 16\): must be \(16, 2\)"):
        wrapper.run(inputs.q, pool.transpose(2, 3))
    with pytest.raises(UsageError, match="run needs a plan"):
        BatchDecodeWithPagedKVCacheWrapper(inputs.q).run(inputs.q, pool)


@pytest.mark.parametrize(
    ("options", "error", "reason"),
    [
        ({"kv_layout": "HNDX"}, UsageError, "kv_layout"),
        ({"backend": "fa9"}, UsageError, "'fa9': must be one of auto, fa2"),
        ({"jit_args": []}, UnsupportedError, "custom attention variant"),
        ({"use_cuda_graph": True}, UsageError, "paged_kv_indptr_buffer is missing"),
    ],
)
def test_the_wrapper_names_what_is_wrong(options: dict, error: type, reason: str) -> None:
    with pytest.raises(error, match=reason):
        BatchDecodeWithPagedKVCacheWrapper(torch.empty(1), **options)


def test_slopes_of_a_number_of_heads_that_is_no_power_of_two() -> None:
    expected = [2.0**-e for e in (2, 4, 6, 8, 1, 3)]
    assert alibi_slopes(6).tolist() == expected
    assert alibi_slopes(8).tolist() == [2.0**-i for i in range(1, 9)]
