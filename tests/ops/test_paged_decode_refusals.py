"""What the public paged-decode function refuses, and in which words."""

from __future__ import annotations

import math
import os
from dataclasses import replace

import pytest
import torch
from decode_calls import call, pool_of, problem_of, table_of
from tilescout import ops
from tilescout.errors import UsageError
from tilescout.kernels.paged_decode import PagedDecodeInputs
from tilescout.kernels.paged_decode import reference as ref

needs_interpreter = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="set TRITON_INTERPRET=1 (make test does)"
)


def inputs_of(*, is_dense: bool = False) -> PagedDecodeInputs:
    return ref.paged_inputs(
        problem_of(), [50, 0, 64], device="cpu", seed=1, num_unused_pages=2, is_dense=is_dense
    )


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """Equal values, the last dimension two elements apart."""
    return tensor.repeat_interleave(2, -1)[..., ::2]


WRONG = {
    "q of two dimensions": (
        lambda i: {"q": i.q[0]},
        r"shape of q in paged_decode is \(4, 64\): must be \[batch \* query_len, num_qo_heads",
    ),
    "q in fp32": (
        lambda i: {"q": i.q.float()},
        r"dtype of q .*float32: must be torch\.bfloat16 or torch\.float16",
    ),
    "q with strided rows": (lambda i: {"q": strided(i.q)}, r"last stride of q .* is 2: must be 1"),
    "rows that are no multiple of the batch": (
        lambda i: {"q": i.q[:2]},
        r"rows of q in paged_decode is 2: must be a multiple of the 3 requests",
    ),
    "no rows": (lambda i: {"q": i.q[:0]}, r"rows of q .* is 0: must be a multiple of the 3"),
    "heads that do not divide": (
        lambda i: {"q": i.q[:, :3]},
        r"num_qo_heads of q .* is 3: must be a multiple of the 2 KV heads",
    ),
    "cache without the K and V axis": (
        lambda i: {"kv_cache": i.k_cache},
        r"shape of kv_cache .*must be \[num_pages, 2, page_size, num_kv_heads, 64\] \(NHD",
    ),
    "cache of another head_dim": (
        lambda i: {"kv_cache": pool_of(i)[..., :32]},
        r"shape of kv_cache .*32\): must be",
    ),
    "K before V in one tensor": (
        lambda i: {"kv_cache": pool_of(i).transpose(0, 1)},
        r"shape of kv_cache .*pass kv_cache\.unbind\(0\) where K and V come before the pages",
    ),
    "three caches": (
        lambda i: {"kv_cache": (i.k_cache,) * 3},
        r"length of kv_cache in paged_decode is 3: must be 2",
    ),
    "V of another size": (
        lambda i: {"kv_cache": (i.k_cache, i.v_cache[:-1])},
        r"shape of kv_cache\[1\] .*must be that of K, .*for MLA call mla_decode",
    ),
    "V of another head_dim": (
        lambda i: {"kv_cache": (i.k_cache, i.v_cache[..., :32])},
        r"shape of kv_cache\[1\] .*must be \[num_pages, page_size, num_kv_heads, 64\]",
    ),
    "cache of another dtype": (
        lambda i: {"kv_cache": pool_of(i).bfloat16()},
        r"dtype of kv_cache .*bfloat16: must be that of q, torch\.float16, or "
        r"torch\.float8_e4m3fn or torch\.float8_e5m2",
    ),
    "bytes without a name": (
        lambda i: {"kv_cache": pool_of(i).to(torch.uint8)},
        r"dtype of kv_cache .*uint8: must be named by kv_dtype= where it is torch\.uint8: "
        r"float8_e4m3fn or float8_e5m2",
    ),
    "bytes with a wide name": (
        lambda i: {"kv_cache": pool_of(i).to(torch.uint8), "kv_dtype": "bfloat16"},
        r"must be named by kv_dtype=",
    ),
    "kv_dtype that is not the cache's": (
        lambda i: {"kv_dtype": "float8_e5m2"},
        r"dtype of kv_cache\[0\] .*float16: must be torch\.float8_e5m2, as kv_dtype says",
    ),
    "unknown kv_dtype": (
        lambda i: {"kv_dtype": "int4"},
        r"kv_dtype='int4' of paged_decode: one of bfloat16, float16, float8_e4m3fn, float8_e5m2",
    ),
    "unknown layout": (
        lambda i: {"kv_layout": "HDN"},
        r"kv_layout='HDN' of paged_decode: one of NHD, HND",
    ),
    "strided V": (
        lambda i: {"kv_cache": (i.k_cache, strided(i.v_cache))},
        r"last stride of kv_cache\[1\] .* is 2: must be 1",
    ),
    "cache elsewhere": (
        lambda i: {"kv_cache": pool_of(i).to("meta")},
        r"device of kv_cache .*'meta': must be that of q, cpu",
    ),
    "two tables": (
        lambda i: {"block_table": i.kv_indices[None], "seq_lens": i.kv_last_page_len},
        r"paged_decode got kv_indptr, .*, block_table, seq_lens: it takes kv_indptr, kv_indices "
        r"and kv_last_page_len \(CSR\), or block_table and seq_lens \(dense\)",
    ),
    "no table": (
        lambda i: dict.fromkeys(("kv_indptr", "kv_indices", "kv_last_page_len")),
        r"paged_decode got no page table: it takes",
    ),
    "half a table": (
        lambda i: {"kv_indptr": None},
        r"paged_decode got kv_indices, kv_last_page_len: it takes",
    ),
    "indptr too short": (
        lambda i: {"kv_indptr": i.kv_indptr[:-1]},
        r"shape of kv_indptr in paged_decode is \(3,\): must be \[4\], by the number of requests",
    ),
    "int64 indices": (
        lambda i: {"kv_indices": i.kv_indices.long()},
        r"dtype of kv_indices .*int64: must be torch\.int32: call \.to\(torch\.int32\)",
    ),
    "strided indices": (
        lambda i: {"kv_indices": strided(i.kv_indices)},
        r"stride of kv_indices .*\(2,\): must be \(1,\): call \.contiguous\(\)",
    ),
    "indices of two dimensions": (
        lambda i: {"kv_indices": i.kv_indices[None]},
        r"shape of kv_indices .*: must be one dimension",
    ),
    "table elsewhere": (
        lambda i: {"kv_indptr": i.kv_indptr.to("meta")},
        r"device of kv_indptr .*'meta': must be that of q, 'cpu'",
    ),
    "scale that is not a number": (
        lambda i: {"sm_scale": math.nan},
        r"sm_scale=nan of paged_decode must be finite",
    ),
    "scale that no float holds": (
        lambda i: {"sm_scale": 10**400},
        r"sm_scale=inf of paged_decode must be finite",
    ),
    "return_lse that is no truth value": (
        lambda i: {"return_lse": torch.ones(2)},
        r"return_lse of paged_decode is a tensor: must be True or False",
    ),
    "scale of q on the device": (
        lambda i: {"q_scale": torch.ones(1)},
        r"q_scale of paged_decode is a tensor: must be a number",
    ),
    "scale of K for each head": (
        lambda i: {"k_scale": torch.ones(2)},
        r"k_scale .*float32, \(2,\)\): must be a number, or torch\.float32 of one element",
    ),
    "scale of V in half": (
        lambda i: {"v_scale": torch.ones(1).half()},
        r"v_scale .*float16, \(1,\)\): must be a number",
    ),
    "scale elsewhere": (
        lambda i: {"k_scale": torch.ones(1, device="meta")},
        r"device of k_scale .*'meta': must be that of q, 'cpu'",
    ),
    "window of less than nothing": (
        lambda i: {"window_left": -2},
        r"window_left=-2 of paged_decode must be -1 \(no window\) or the number of tokens",
    ),
    "window of a fraction": (lambda i: {"window_left": 1.5}, r"window_left=1\.5"),
    "negative cap": (
        lambda i: {"soft_cap": -1.0},
        r"soft_cap=-1\.0 of paged_decode must be above 0, or None",
    ),
    "cap and ALiBi": (
        lambda i: {"soft_cap": 1.0, "alibi_slopes": torch.ones(4)},
        r"soft_cap and alibi_slopes of paged_decode exclude each other: kernels disagree",
    ),
    "sinks of another number": (
        lambda i: {"sinks": torch.ones(2)},
        r"shape of sinks in paged_decode is \(2,\): must be \[4\]",
    ),
    "sinks in bf16": (
        lambda i: {"sinks": torch.ones(4).bfloat16()},
        r"dtype of sinks .*bfloat16: must be torch\.float32: call \.float\(\) once",
    ),
    "strided slopes": (
        lambda i: {"alibi_slopes": strided(torch.ones(4))},
        r"stride of alibi_slopes .*\(2,\): must be \(1,\)",
    ),
    "rope that is a number": (
        lambda i: {"rope": 10000.0},
        r"rope=10000\.0 of paged_decode must be a Rope\(theta=\.\.\., scale=\.\.\.\)",
    ),
    "rope without a base": (
        lambda i: {"rope": ops.Rope(theta=0.0)},
        r"rope theta=0\.0 of paged_decode must be above 0 and finite",
    ),
    "unknown mix": (
        lambda i: {"lengths": "long"},
        r"lengths='long' of paged_decode: one of equal, skewed, uniform, mixed, or None",
    ),
    "unknown base": (
        lambda i: {"lse_base": 2},
        r"lse_base=2 of paged_decode must be '2' or 'e'",
    ),
    "out of another shape": (
        lambda i: {"out": i.q[:2].clone()},
        r"shape of out in paged_decode is \(2, 4, 64\): must be \[3, 4, 64\]",
    ),
    "out in fp32": (lambda i: {"out": i.q.float()}, r"dtype of out .*float32: must be"),
    "out elsewhere": (lambda i: {"out": i.q.to("meta")}, r"device of out .*'meta'"),
    "strided out": (lambda i: {"out": strided(i.q)}, r"last stride of out .* is 2: must be 1"),
    "out over q": (
        lambda i: {"out": i.q},
        r"out of paged_decode shares memory with q: other blocks still read q; pass another",
    ),
    "lse of one dimension": (
        lambda i: {"lse": torch.empty(12)},
        r"shape of lse in paged_decode is \(12,\): must be \[3, 4\]",
    ),
    "lse in half": (lambda i: {"lse": torch.empty(3, 4).half()}, r"dtype of lse .*float16"),
    "strided lse": (
        lambda i: {"lse": torch.empty(4, 3).t()},
        r"stride of lse .*: must be that of a contiguous tensor",
    ),
    "q that requires grad": (
        lambda i: {"q": i.q.clone().requires_grad_()},
        r"an argument of paged_decode requires grad, and there is no backward",
    ),
    "q that is no tensor": (
        lambda i: {"q": [1.0]},
        r"type of q in paged_decode is 'list': must be torch\.Tensor",
    ),
    "no cache": (
        lambda i: {"kv_cache": None},
        r"type of kv_cache in paged_decode is 'NoneType': must be torch\.Tensor, or a pair",
    ),
    "K without V": (
        lambda i: {"kv_cache": (i.k_cache, None)},
        r"type of kv_cache\[1\] in paged_decode is 'NoneType': must be torch\.Tensor",
    ),
    "table of numbers": (
        lambda i: {"kv_indptr": [0, 1, 2, 3]},
        r"type of kv_indptr in paged_decode is 'list': must be torch\.Tensor",
    ),
    "sinks of numbers": (
        lambda i: {"sinks": [0.0] * 4},
        r"type of sinks in paged_decode is 'list': must be torch\.Tensor",
    ),
    "out that is no tensor": (
        lambda i: {"out": 1.0},
        r"type of out in paged_decode is 'float': must be torch\.Tensor",
    ),
    "window that is a flag": (lambda i: {"window_left": True}, r"window_left=True of paged_decode"),
    "cap that is a flag": (lambda i: {"soft_cap": True}, r"soft_cap of .* is True: must be a num"),
    "causal by a word": (
        lambda i: {"is_causal": "no"},
        r"is_causal of paged_decode is 'no': must be True or False",
    ),
    "rope with a base of text": (
        lambda i: {"rope": ops.Rope(theta="1e6")},
        r"rope theta of paged_decode is '1e6': must be a number",
    ),
    "out of one row for all": (
        lambda i: {"out": i.q[:1].clone().expand(3, 4, 64)},
        r"out of paged_decode has strides \(0, 64, 1\): its elements share memory",
    ),
    **{
        f"{name} that requires grad": (
            lambda i, name=name, make=make: {name: make(i).requires_grad_()},
            r"an argument of paged_decode requires grad, and there is no backward",
        )
        for name, make in {
            "sinks": lambda i: torch.ones(4),
            "alibi_slopes": lambda i: torch.ones(4),
            "k_scale": lambda i: torch.ones(1),
            "v_scale": lambda i: torch.ones(1),
            "out": lambda i: i.q.clone(),
            "lse": lambda i: torch.empty(3, 4),
        }.items()
    },
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_named(case: str) -> None:
    change, message = WRONG[case]
    inputs = inputs_of()
    changes = change(inputs)
    inputs = replace(inputs, q=changes.pop("q", inputs.q))
    with pytest.raises(UsageError, match=message):
        call(inputs, **changes)


WRONG_DENSE = {
    "one row too few": (
        lambda i: {"block_table": i.kv_indices[:2]},
        r"shape of block_table .*must be \[3, max_pages\], by the number of requests",
    ),
    "table of one dimension": (
        lambda i: {"block_table": i.kv_indices[0]},
        r"shape of block_table .*must be \[3, max_pages\]",
    ),
    "int64 table": (
        lambda i: {"block_table": i.kv_indices.long()},
        r"dtype of block_table .*int64: must be torch\.int32",
    ),
    "table with strided rows": (
        lambda i: {"block_table": strided(i.kv_indices)},
        r"last stride of block_table .* is 2: must be 1",
    ),
    "lengths of two dimensions": (
        lambda i: {"seq_lens": i.seq_lens[None]},
        r"shape of seq_lens .*must be one dimension",
    ),
    "lengths on another device": (
        lambda i: {"seq_lens": i.seq_lens.to("meta")},
        r"device of seq_lens .*'meta': must be that of q, 'cpu'",
    ),
}


@pytest.mark.parametrize("case", WRONG_DENSE)
def test_wrong_dense_tables_are_named(case: str) -> None:
    change, message = WRONG_DENSE[case]
    inputs = inputs_of(is_dense=True)
    with pytest.raises(UsageError, match=message):
        call(inputs, **change(inputs))


@needs_interpreter
@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")
def test_out_may_lie_beside_q_but_not_across_it() -> None:
    inputs = inputs_of()
    wide = torch.randn(3, 8, 64).half()
    expected = call(replace(inputs, q=wide[:, :4].clone()))
    out = call(replace(inputs, q=wide[:, :4]), out=wide[:, 4:])
    assert torch.equal(out, expected)
    rows = torch.randn(4, 4, 64).half()
    with pytest.raises(UsageError, match="out of paged_decode shares memory with q"):
        call(replace(inputs, q=rows[:3]), out=rows[1:])


def test_a_look_up_takes_no_other_options() -> None:
    inputs = inputs_of()
    pools = (inputs.k_cache, inputs.v_cache)
    with pytest.raises(UsageError, match=r"has no option 'window': it takes sm_scale, .*window_l"):
        ops.resolve_paged_decode(inputs.q, pools, table_of(inputs), window=3)
    with pytest.raises(UsageError, match=r"page_table of resolve_paged_decode is a tuple: must be"):
        ops.resolve_paged_decode(inputs.q, pools, (inputs.kv_indptr, inputs.kv_indices))
    half = ops.PageTable(inputs.kv_indices, indptr=inputs.kv_indptr)
    with pytest.raises(UsageError, match="is a PageTable that is neither CSR nor dense: must be"):
        ops.resolve_paged_decode(inputs.q, pools, half)


@needs_interpreter
@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")
def test_a_window_of_all_32_bits_is_none() -> None:
    inputs = inputs_of()
    pools = (inputs.k_cache, inputs.v_cache)
    found = ops.resolve_paged_decode(inputs.q, pools, table_of(inputs), window_left=2**31 - 1)
    assert found.problem.window_left == -1
    out = call(inputs, window_left=2**31 - 1)
    assert torch.equal(out, call(inputs))
