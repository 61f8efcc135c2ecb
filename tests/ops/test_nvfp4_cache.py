"""NVFP4 caches through the public functions: append, decode, their operators, refusals."""

from __future__ import annotations

import math
import os
from dataclasses import replace

import pytest
import torch
from decode_calls import problem_of, semantics_arguments, table_arguments, table_of
from tilescout import ops
from tilescout.errors import UsageError
from tilescout.kernels.paged_decode import PagedDecodeOutputs
from tilescout.kernels.paged_decode import reference as ref
from tilescout.kernels.quantization.block_tensor import amax_tensor_scale
from tilescout.kernels.quantization.formats import FOUR_OVER_SIX_LARGEST_SCALE, NVFP4
from tilescout.kernels.quantization.reference import quantize
from tilescout.ops.flashinfer import BatchDecodeWithPagedKVCacheWrapper
from tilescout.ops.warmup import _paged_decode_calls

INTERPRETED = [
    pytest.mark.interpreter,
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") != "1", reason="set TRITON_INTERPRET=1 (make test does)"
    ),
    # The interpreter takes log2(0) = -inf of a request without tokens through numpy.
    pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),
]
DEVICES = [
    pytest.param("cpu", marks=INTERPRETED, id="interpreter"),
    pytest.param("cuda", marks=pytest.mark.gpu, id="gpu"),
]
CPU = [pytest.param("cpu", marks=INTERPRETED, id="interpreter")]


@pytest.fixture(autouse=True)
def _shim():
    import interpreter_shim

    if os.environ.get("TRITON_INTERPRET") == "1":
        interpreter_shim.install()


def make(device: str, lengths=(33, 0, 17), **changes):
    problem = problem_of(**{"kv_dtype": "nvfp4", **changes})
    return ref.paged_inputs(problem, list(lengths), device=device, seed=3, poison=True)


def whole(first: torch.Tensor, second: torch.Tensor, layout: str = "NHD") -> torch.Tensor:
    """K and V in one new tensor of five dimensions."""
    pool = torch.stack([x.view(torch.uint8) for x in (first, second)], dim=1)
    pool = pool.transpose(2, 3) if layout == "HND" else pool
    return pool.contiguous().view(first.dtype)


def call(inputs, *, layout="NHD", function=ops.paged_decode, **changes):
    arguments = {
        "kv_cache": whole(inputs.k_cache, inputs.v_cache, layout),
        "kv_block_scales": whole(inputs.k_block_scales, inputs.v_block_scales, layout),
        "kv_dtype": "nvfp4",
        "kv_layout": layout,
        **table_arguments(inputs),
        **semantics_arguments(inputs),
        **changes,
    }
    return function(inputs.q, arguments.pop("kv_cache"), **arguments)


def reason(inputs, out, lse=None, base="2"):
    return ref.compare(problem_of(), inputs, PagedDecodeOutputs(out, lse, base)).reason


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_the_whole_call_is_the_reference(device: str, layout: str) -> None:
    inputs = make(device)
    out, lse = call(inputs, layout=layout, return_lse=True, lse_base="e")
    assert reason(inputs, out, lse, "e") is None
    # The comparison sees a wrong scale and codes whose halves are swapped.
    assert reason(replace(inputs, v_scale=0.5), out) is not None
    codes = inputs.v_cache
    swapped = (codes >> 4) | (codes << 4)
    assert reason(replace(inputs, v_cache=swapped), out) is not None


@pytest.mark.parametrize("device", DEVICES)
def test_pairs_bytes_and_dense_tables_are_the_same_call(device: str) -> None:
    inputs = make(device)
    expected = call(inputs)
    pair = (inputs.k_cache, inputs.v_cache)
    scales = (inputs.k_block_scales, inputs.v_block_scales)
    as_bytes = tuple(x.view(torch.uint8) for x in scales)
    assert torch.equal(call(inputs, kv_cache=pair, kv_block_scales=scales), expected)
    unsaid = call(inputs, kv_cache=pair, kv_block_scales=as_bytes, kv_dtype=None)
    assert torch.equal(unsaid, expected)
    operator = torch.ops.tilescout.paged_decode(
        [inputs.q],
        list(pair),
        *(inputs.kv_indptr, inputs.kv_indices, inputs.kv_last_page_len),
        kv_dtype="nvfp4",
        kv_block_scales=list(scales),
        sm_scale=inputs.sm_scale,
        k_scale=inputs.k_scale,
        v_scale=inputs.v_scale,
    )
    assert torch.equal(operator[0], expected)


@pytest.mark.parametrize("device", DEVICES)
def test_scales_on_the_device_count(device: str) -> None:
    inputs = make(device)
    tensors = {
        name: torch.tensor([getattr(inputs, name)], device=device)
        for name in ("k_scale", "v_scale")
    }
    assert torch.allclose(call(inputs, **tensors), call(inputs), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("device", DEVICES)
def test_flashinfers_wrapper_takes_the_same_cache(device: str) -> None:
    inputs = make(device)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(inputs.q.new_empty(16))
    wrapper.plan(
        *(inputs.kv_indptr, inputs.kv_indices, inputs.kv_last_page_len, 4, 2, 64, 16),
        q_data_type=torch.float16,
        kv_data_type=torch.uint8,
    )
    out = wrapper.run(
        inputs.q,
        (inputs.k_cache, inputs.v_cache),
        kv_cache_sf=(inputs.k_block_scales, inputs.v_block_scales),
        k_scale=inputs.k_scale,
        v_scale=inputs.v_scale,
    )
    assert torch.equal(out, call(inputs))


@pytest.mark.parametrize("device", CPU)
def test_requests_that_share_a_prefix(device: str) -> None:
    inputs = make(device, lengths=(33, 17))
    one = inputs.kv_indices[:1].clone()
    prefix = ops.PageTable.csr(
        torch.tensor([0, 1], dtype=torch.int32),
        one,
        torch.tensor([16], dtype=torch.int32),
    )
    arguments = {"sm_scale": inputs.sm_scale, "k_scale": inputs.k_scale, "v_scale": inputs.v_scale}
    out = ops.shared_prefix_decode(
        inputs.q,
        (inputs.k_cache, inputs.v_cache),
        prefix,
        table_of(inputs),
        kv_block_scales=(inputs.k_block_scales, inputs.v_block_scales),
        **arguments,
    )
    first, end = inputs.kv_indices[:3], inputs.kv_indices[3:]
    joined = replace(
        inputs,
        kv_indices=torch.cat([one, first, one, end]),
        kv_indptr=torch.tensor([0, 4, 4 + 1 + len(end)], dtype=torch.int32),
    )
    assert reason(joined, out) is None


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("on_device", [False, True], ids=["numbers", "tensors"])
def test_appended_tokens_are_the_reference_codec_bit_for_bit(device, layout, on_device) -> None:
    generator = torch.Generator().manual_seed(5)
    k, v = (torch.randn((6, 2, 64), generator=generator).to(device).bfloat16() for _ in range(2))
    k[0, 0, 3] = math.nan
    k[1, 1] = 0.0
    v[2] *= 1e4  # saturates: the tensor scale is too small for it
    slots = torch.tensor([5, -1, 0, 39, 17, 18], device=device)
    order = (4, 2) if layout == "NHD" else (2, 4)
    codes = torch.full((10, 2, *order, 32), 0xAA, dtype=torch.uint8, device=device)
    scales = torch.full((10, 2, *order, 4), 0x55, dtype=torch.uint8, device=device)
    tensor_scale = torch.tensor([0.013], device=device)
    given = tensor_scale if on_device else float(tensor_scale)
    before = k.clone()
    ops.append_nvfp4_kv_cache(
        k, v, slots, codes, scales, kv_layout=layout, k_scale=given, v_scale=given
    )
    expected_codes, expected_scales = torch.full_like(codes, 0xAA), torch.full_like(scales, 0x55)
    for half, rows in enumerate((k, v)):
        quantized = quantize(rows, tensor_scale=tensor_scale)
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                for pool, values in (
                    (expected_codes, quantized.codes),
                    (expected_scales, quantized.scales.view(torch.uint8)),
                ):
                    page = pool[slot // 4, half]
                    page = page if layout == "NHD" else page.transpose(0, 1)
                    page[slot % 4] = values[token]
    assert torch.equal(codes, expected_codes)
    assert torch.equal(scales, expected_scales)
    assert torch.equal(k.view(torch.int16), before.view(torch.int16))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("convention", NVFP4.conventions)
def test_block_scales_are_of_the_convention_named(device: str, convention: str) -> None:
    generator = torch.Generator().manual_seed(6)
    k, v = (torch.randn((32, 2, 96), generator=generator).to(device) for _ in range(2))
    k[0, 0, 3] = math.inf
    k[1] *= 1e-5  # scales near the least e4m3
    v[2] *= 1e4  # saturates
    scale = amax_tensor_scale(k[2:], largest_scale=FOUR_OVER_SIX_LARGEST_SCALE)
    codes = torch.zeros((2, 2, 16, 2, 48), dtype=torch.uint8, device=device)
    scales = torch.zeros((2, 2, 16, 2, 6), dtype=torch.uint8, device=device)
    slots = torch.arange(32, device=device)
    ops.append_nvfp4_kv_cache(
        k, v, slots, codes, scales, k_scale=scale, v_scale=scale, convention=convention
    )
    for half, rows in enumerate((k, v)):
        found = scales[:, half].flatten(0, 1)
        by_name = {n: quantize(rows, tensor_scale=scale, convention=n) for n in NVFP4.conventions}
        assert torch.equal(found, by_name[convention].scales.view(torch.uint8))
        assert torch.equal(codes[:, half].flatten(0, 1), by_name[convention].codes)
        if half == 0:  # and no two conventions give K the same scales
            equal = [torch.equal(found, x.scales.view(torch.uint8)) for x in by_name.values()]
            assert sum(equal) == 1


@pytest.mark.parametrize("device", DEVICES)
def test_what_was_appended_is_decoded(device: str) -> None:
    inputs = make(device, lengths=(16, 16, 16))
    codes = torch.zeros_like(whole(inputs.k_cache, inputs.v_cache))
    scales = torch.zeros_like(whole(inputs.k_block_scales, inputs.v_block_scales).view(torch.uint8))
    generator = torch.Generator().manual_seed(5)
    k, v = (torch.randn((48, 2, 64), generator=generator).to(device).half() for _ in range(2))
    tokens = torch.arange(16, device=device)
    slots = (inputs.kv_indices[:, None] * 16 + tokens[None, :]).flatten()
    ops.append_nvfp4_kv_cache(k, v, slots, codes, scales, k_scale=0.01, v_scale=0.02)
    out = call(inputs, kv_cache=codes, kv_block_scales=scales, k_scale=0.01, v_scale=0.02)
    stored = replace(
        inputs,
        k_cache=codes[:, 0],
        v_cache=codes[:, 1],
        k_block_scales=scales[:, 0].view(torch.float8_e4m3fn),
        v_block_scales=scales[:, 1].view(torch.float8_e4m3fn),
        k_scale=0.01,
        v_scale=0.02,
    )
    assert reason(stored, out) is None
    # And near attention on the values that went in.
    for request in range(3):
        rows = slice(16 * request, 16 * request + 16)
        q = inputs.q[request].float().view(2, 2, 64)
        p = torch.softmax(torch.einsum("hgd,nhd->hgn", q, k[rows].float()) / 8.0, -1)
        exact = torch.einsum("hgn,nhd->hgd", p, v[rows].float()).flatten(0, 1)
        error = (out[request].float() - exact).norm() / exact.norm()
        assert 0.01 < float(error) < 0.25


@pytest.mark.parametrize("device", CPU)
def test_a_warm_up_calls_for_such_a_cache(device: str) -> None:
    calls = list(_paged_decode_calls(problem_of(kv_dtype="nvfp4"), torch.device(device)))
    assert len(calls) == 8  # either table, one pool or two, with LSE and without
    for one in calls[::3]:
        result = one()
        assert result is not None


REFUSALS = {
    "no block scales": ({"kv_block_scales": None}, r"kv_dtype='nvfp4' .*needs kv_block_scales="),
    "another dtype": (
        {"kv_dtype": "float8_e4m3fn"},
        r"kv_block_scales of paged_decode belong to .* of nvfp4, and kv_dtype is 'float8_e4m3fn'",
    ),
    "rows of all values": (
        lambda i: {"kv_cache": whole(i.k_cache, i.v_cache).repeat_interleave(2, -1)},
        r"shape of kv_cache .* must be \[num_pages, 2, page_size, num_kv_heads, 32\] .*two codes",
    ),
    "codes as signed bytes": (
        lambda i: {"kv_cache": whole(i.k_cache, i.v_cache).view(torch.int8)},
        r"dtype of kv_cache .*int8: must be torch\.uint8 for nvfp4",
    ),
    "scales of 32 values": (
        lambda i: {"kv_block_scales": whole(i.k_block_scales, i.v_block_scales)[..., ::2]},
        r"shape of kv_block_scales .*num_kv_heads, 4\] .*one for 16 values",
    ),
    "scales as fp32": (
        lambda i: {"kv_block_scales": whole(i.k_block_scales, i.v_block_scales).float()},
        r"dtype of kv_block_scales .*torch\.float32: must be torch\.float8_e4m3fn",
    ),
    "scales of other pages": (
        lambda i: {"kv_block_scales": whole(i.k_block_scales, i.v_block_scales)[:1]},
        r"shape of kv_block_scales .*must be of the pages, tokens and heads of kv_cache",
    ),
    "scales in the other layout": (
        lambda i: {"kv_block_scales": whole(i.k_block_scales, i.v_block_scales, "HND")},
        r"shape of kv_block_scales .*must be of the pages, tokens and heads of kv_cache",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals_say_what_is_allowed(name: str) -> None:
    change, message = REFUSALS[name]
    inputs = make("cpu")
    with pytest.raises(UsageError, match=message):
        call(inputs, **(change(inputs) if callable(change) else change))


def test_mla_has_no_such_cache() -> None:
    with pytest.raises(UsageError, match=r"kv_dtype='nvfp4' of mla_decode: one of bfloat16"):
        ops.mla_decode(
            torch.zeros(1, 16, 576, dtype=torch.bfloat16),
            torch.zeros(1, 16, 576, dtype=torch.uint8),
            block_table=torch.zeros((1, 1), dtype=torch.int32),
            seq_lens=torch.ones(1, dtype=torch.int32),
            sm_scale=1.0,
            kv_dtype="nvfp4",
        )


APPEND_REFUSALS = {
    "k of another head_dim": ({"k": torch.zeros(2, 2, 72)}, r"shape of k .*multiple of 16"),
    "v of another shape": ({"v": torch.zeros(2, 1, 64)}, r"shape of v"),
    "v of another dtype": ({"v": torch.zeros(2, 2, 64).half()}, r"dtype and device of v"),
    "a slot too few": ({"slot_mapping": torch.zeros(1, dtype=torch.int32)}, "shape of slot_mapp"),
    "slots in fp32": ({"slot_mapping": torch.zeros(2)}, r"dtype of slot_mapping .*int32 or int64"),
    "other heads": ({"k": torch.zeros(2, 1, 64), "v": torch.zeros(2, 1, 64)}, "number of heads"),
    "a scale of 0": ({"k_scale": 0.0}, r"k_scale=0.0 .*above 0 and finite"),
    "a scale per head": ({"v_scale": torch.ones(2)}, r"v_scale .*of one element"),
    "integers": (
        {"k": torch.zeros(2, 2, 64).int(), "v": torch.zeros(2, 2, 64).int()},
        r"dtype of k .*bf16, fp16 or fp32",
    ),
    "needs grad": ({"k": torch.zeros(2, 2, 64, requires_grad=True)}, "requires grad"),
    "a convention of MXFP4": (
        {"convention": "rceil"},
        r"convention in append_nvfp4_kv_cache is 'rceil': must be one of nearest, normal, four_ov",
    ),
    "no convention": ({"convention": None}, r"convention .* is None: must be one of nearest"),
}


@pytest.mark.parametrize("name", APPEND_REFUSALS)
def test_append_refuses(name: str) -> None:
    change, message = APPEND_REFUSALS[name]
    arguments = {
        "k": torch.zeros(2, 2, 64),
        "v": torch.zeros(2, 2, 64),
        "slot_mapping": torch.arange(2),
        "kv_cache": torch.zeros(1, 2, 16, 2, 32, dtype=torch.uint8),
        "kv_block_scales": torch.zeros(1, 2, 16, 2, 4, dtype=torch.uint8),
        **change,
    }
    with pytest.raises(UsageError, match=message):
        ops.append_nvfp4_kv_cache(**arguments)


@pytest.mark.parametrize("device", CPU)
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_append_in_a_compiled_function_writes_the_same(device: str) -> None:
    rows = torch.randn(4, 2, 64, generator=torch.Generator().manual_seed(7))
    slots = torch.arange(4)

    def append(convention: str, codes: torch.Tensor, scales: torch.Tensor) -> None:
        ops.append_nvfp4_kv_cache(
            rows, rows, slots, codes, scales, k_scale=0.1, convention=convention
        )

    torch._dynamo.reset()
    traced = torch.compile(append, backend="eager", fullgraph=True)
    written = []
    for function in (append, traced):
        for convention in ("nearest", "four_over_six_mse"):
            codes, scales = (torch.zeros(1, 2, 16, 2, n, dtype=torch.uint8) for n in (32, 4))
            function(convention, codes, scales)
            written.append(torch.cat([codes, scales], -1))
    assert torch.equal(written[0], written[2])
    assert torch.equal(written[1], written[3])
    assert not torch.equal(written[0], written[1])


def test_the_operator_refuses_a_convention_too() -> None:
    codes, scales = (torch.zeros(1, 2, 16, 2, n, dtype=torch.uint8) for n in (32, 4))
    with pytest.raises(UsageError, match=r"convention in .* is 'round': must be one of nearest"):
        torch.ops.tilescout.append_nvfp4_kv_cache(
            torch.zeros(1, 2, 64),
            torch.zeros(1, 2, 64),
            torch.arange(1),
            [codes],
            [scales],
            convention="round",
        )


@pytest.mark.parametrize("device", CPU)
def test_append_under_a_trace_writes_the_same(device: str) -> None:
    k = torch.randn(2, 2, 64)
    pools = [
        (torch.zeros(1, 2, 16, 2, 32, dtype=torch.uint8), torch.zeros(1, 2, 16, 2, 4).byte())
        for _ in range(2)
    ]
    slots = torch.tensor([3, 7])
    ops.append_nvfp4_kv_cache(k, k, slots, *pools[0], k_scale=0.1)
    torch.ops.tilescout.append_nvfp4_kv_cache(
        k, k, slots, [pools[1][0]], [pools[1][1]], k_scale=0.1
    )
    assert pools[0][0].any()
    assert all(torch.equal(x, y) for x, y in zip(*pools, strict=True))
