"""What paged decode computes, through the public function, against the fp32 reference."""

from __future__ import annotations

import inspect
import math
import os
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch
from decode_calls import (
    assert_right,
    assert_serves,
    call,
    pool_of,
    problem_of,
    table_arguments,
    table_of,
)
from gpu_modes import waiting_forbidden
from tilescout import ops
from tilescout.kernels.base import Config
from tilescout.kernels.paged_decode import PagedDecodeInputs, PagedDecodeProblem
from tilescout.kernels.paged_decode import reference as ref
from tilescout.ops.launchers import LauncherCache
from tilescout.search_spaces.registry import joint_space
from tilescout.tuner import catalog, dispatch, environment
from winner_databases import MadeUpWinner, write_winners

interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="set TRITON_INTERPRET=1 (make test does)"
)

RAGGED = [50, 0, 64]

ONE_BY_ONE = {
    **{f"group {g}": {"num_qo_heads": 2 * g} for g in (1, 3, 5, 7, 12)},
    **{f"page size {p}": {"page_size": p} for p in (1, 7, 48, 528, 1024)},
    **{f"head_dim {d}": {"head_dim": d} for d in (96, 128, 192, 256)},
    **{f"{n} query tokens": {"query_len": n} for n in (2, 5, 8)},
    "query tokens that see each other": {"query_len": 3, "is_causal": False},
    "bfloat16": {"dtype": "bfloat16"},
    "HND": {"kv_layout": "HND"},
    "e4m3": {"kv_dtype": "float8_e4m3fn"},
    "e5m2": {"kv_dtype": "float8_e5m2"},
    "window of one token": {"window_left": 0},
    "window within a page": {"window_left": 5},
    "window over pages": {"window_left": 33},
    "soft cap": {"has_soft_cap": True},
    "sinks": {"has_sinks": True},
    "alibi": {"has_alibi": True},
    "rope": {"has_rope": True},
}
"""Each value reaches a path of its own: padded heads, pages within and over a tile, padded dims,
masks, conversions, terms of the logits."""

TOGETHER = {
    "gpt-oss": {"num_qo_heads": 16, "window_left": 20, "has_sinks": True, "dtype": "bfloat16"},
    "gemma 2": {"head_dim": 256, "has_soft_cap": True, "window_left": 40, "dtype": "bfloat16"},
    "speculation over a window": {"query_len": 4, "window_left": 10, "has_sinks": True},
    "speculation, fp8, HND": {
        "query_len": 2,
        "kv_dtype": "float8_e4m3fn",
        "kv_layout": "HND",
        "has_soft_cap": True,
    },
    "alibi over a window": {"has_alibi": True, "window_left": 30, "query_len": 2},
    "rope over a window": {"has_rope": True, "window_left": 30, "query_len": 2, "has_sinks": True},
    "hybrid pages": {"page_size": 528, "query_len": 3, "has_sinks": True, "num_qo_heads": 14},
    "all tokens see a window": {"query_len": 3, "is_causal": False, "window_left": 12},
}


def lengths_for(problem: PagedDecodeProblem) -> list[int]:
    """Ragged lengths around one page, with an empty request in the middle."""
    return [50, 0, 530] if problem.page_size > 500 else RAGGED


def inputs_of(problem: PagedDecodeProblem, lengths=None, device="cpu", **options):
    lengths = lengths_for(problem) if lengths is None else lengths
    return ref.paged_inputs(
        problem,
        lengths,
        device=device,
        seed=1,
        num_unused_pages=2,
        **{"poison": True, **options},
    )


@pytest.fixture(autouse=True)
def _fresh_snapshots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dispatch, "shipped_database_path", lambda: tmp_path / "shipped.db")
    monkeypatch.setenv("TILESCOUT_DB", str(tmp_path / "user.db"))
    dispatch.refresh()
    yield
    dispatch.refresh()


def spoil_scratch() -> int:
    """Fills the scratch memory of every launcher with NaN; how many values that were."""
    cache = import_module("tilescout.ops.decode_launch")._launchers
    spoilt = 0
    for owned in (*cache._eager.values(), *cache._captured.values()):
        for scratch in (owned.launcher.partial_out, owned.launcher.partial_lse):
            scratch.fill_(math.nan)
            spoilt += scratch.numel()
    return spoilt


class OnADevice:
    """What holds wherever the kernel runs; ``device`` says where."""

    device: str

    def sku(self):
        raise NotImplementedError

    @pytest.fixture(autouse=True)
    def _no_launchers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        module = import_module("tilescout.ops.decode_launch")
        monkeypatch.setattr(module, "_launchers", LauncherCache())

    def make(self, lengths=None, *, is_dense=False, poison=True, **changes) -> PagedDecodeInputs:
        return inputs_of(
            problem_of(**changes), lengths, self.device, is_dense=is_dense, poison=poison
        )

    @pytest.mark.parametrize("case", [*ONE_BY_ONE, *TOGETHER])
    @pytest.mark.parametrize("is_dense", [False, True], ids=["csr", "dense"])
    def test_matches_the_reference(self, case: str, is_dense: bool) -> None:
        if is_dense and case in ONE_BY_ONE:
            pytest.skip("the table is dense where several meet")
        inputs = self.make(is_dense=is_dense, **(ONE_BY_ONE | TOGETHER)[case])
        assert_serves(inputs)

    def test_a_dense_table_may_be_wider_than_its_requests(self) -> None:
        inputs = self.make(is_dense=True)
        rows = inputs.kv_indices.shape
        wide = torch.full((rows[0], 2 * rows[1] + 3), -(2**30), dtype=torch.int32)
        wide[:, : rows[1]] = inputs.kv_indices.cpu()
        inputs = replace(inputs, kv_indices=wide.to(self.device)[:, : rows[1] + 3])
        assert inputs.kv_indices.stride(0) > inputs.kv_indices.shape[1]
        assert_serves(inputs)

    def test_layouts_and_forms_are_equal_bit_for_bit(self) -> None:
        inputs = self.make()
        expected, _ = assert_serves(inputs)
        k, v = inputs.k_cache, inputs.v_cache
        spaced = torch.full((*v.shape[:3], 80), math.nan, dtype=v.dtype, device=v.device)
        spaced[..., :64] = v
        forms = {
            "one tensor": (pool_of(inputs), "NHD"),
            "one tensor, HND": (pool_of(inputs, "HND"), "HND"),
            "pair of copies": ((k.contiguous(), v.contiguous()), "NHD"),
            "list, HND": ([x.transpose(1, 2).contiguous() for x in (k, v)], "HND"),
            "K and V strided apart": ((k.contiguous(), spaced[..., :64]), "NHD"),
            "K before V": (torch.stack([k, v]).unbind(0), "NHD"),
        }
        for name, (kv_cache, layout) in forms.items():
            out = call(inputs, kv_cache=kv_cache, kv_layout=layout)
            assert torch.equal(out, expected), name

    @pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", "float8_e5m2"])
    def test_bytes_are_what_kv_dtype_says(self, kv_dtype: str) -> None:
        inputs = self.make(kv_dtype=kv_dtype)
        expected, _ = assert_serves(inputs)
        for layout in ("NHD", "HND"):
            pool = pool_of(inputs, layout).view(torch.uint8)
            out = call(inputs, kv_cache=pool, kv_layout=layout, kv_dtype=kv_dtype)
            assert torch.equal(out, expected)
        other = {"float8_e4m3fn": "float8_e5m2", "float8_e5m2": "float8_e4m3fn"}[kv_dtype]
        wrong = call(inputs, kv_cache=pool_of(inputs).view(torch.uint8), kv_dtype=other)
        assert not torch.equal(wrong.nan_to_num(), expected)

    def test_q_may_be_a_slice_of_packed_heads(self) -> None:
        inputs = self.make(query_len=2)
        expected, _ = assert_serves(inputs)
        packed = torch.full((6, 8, 64), math.nan, dtype=torch.float16, device=self.device)
        packed[:, 2:6] = inputs.q
        strided = replace(inputs, q=packed[:, 2:6])
        assert torch.equal(assert_serves(strided)[0], expected)

    def test_out_may_be_a_slice_of_more(self) -> None:
        inputs = self.make()
        expected, _ = assert_serves(inputs)
        wide = torch.full((3, 3, 4, 64), 7.0, dtype=torch.float16, device=self.device)
        call(inputs, out=wide[:, 1])
        assert torch.equal(wide[:, 1], expected)
        assert bool((wide[:, ::2] == 7.0).all())

    @pytest.mark.parametrize("empty", [[0], [1], [2], [0, 1], [1, 2], [0, 2], [0, 1, 2]], ids=str)
    @pytest.mark.parametrize("is_dense", [False, True], ids=["csr", "dense"])
    def test_empty_requests_anywhere(self, empty: list[int], is_dense: bool) -> None:
        lengths = [0 if i in empty else 33 + i for i in range(3)]
        out, lse = assert_serves(self.make(lengths, is_dense=is_dense))
        for request in range(3):
            assert bool(torch.isneginf(lse[request]).all()) == (request in empty)
            assert bool(out[request].any()) == (request not in empty)

    @pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 32, 33])
    def test_lengths_around_pages_and_tiles(self, length: int) -> None:
        assert_serves(self.make([length, length + 16, length]))

    def test_a_table_need_not_start_at_zero_and_may_end_in_garbage(self) -> None:
        inputs = self.make()
        expected, _ = assert_serves(inputs)
        garbage = inputs.kv_indices.new_full((3,), 2**30)
        shifted = replace(
            inputs,
            kv_indptr=inputs.kv_indptr + 3,
            kv_indices=torch.cat([garbage, inputs.kv_indices, -garbage]),
        )
        out, _ = assert_serves(shifted)
        torch.testing.assert_close(out, expected, rtol=2e-3, atol=1e-4)

    def test_requests_may_share_pages(self) -> None:
        inputs = self.make([40, 40, 40], poison=False)
        first = inputs.kv_indices[:3].repeat(3).contiguous()
        assert_serves(replace(inputs, kv_indices=first))

    def test_fewer_tokens_than_query_tokens_see_what_there_is(self) -> None:
        out, lse = assert_serves(self.make([2, 0, 30], query_len=4))
        assert torch.isneginf(lse[:2]).all()
        assert torch.isfinite(lse[2:4]).all()
        assert not out[:2].any()

    @pytest.mark.parametrize("soft_cap", [0.5, 30.0])
    def test_the_cap_comes_after_the_scale(self, soft_cap: float) -> None:
        inputs = replace(self.make(has_soft_cap=True), soft_cap=soft_cap, sm_scale=1.0)
        assert_serves(inputs)

    def test_scales_multiply_the_logits_and_the_values(self) -> None:
        inputs = self.make()
        plain, plain_lse = assert_serves(replace(inputs, sm_scale=0.25, v_scale=0.5))
        scaled = {"sm_scale": 0.5, "q_scale": 2.0, "k_scale": 0.25, "v_scale": 0.5}
        out, lse = call(inputs, return_lse=True, **scaled)
        assert torch.equal(out, plain)
        assert torch.equal(lse, plain_lse)
        for scales in (("k_scale", "v_scale"), ("k_scale",), ("v_scale",)):
            on_device = {s: torch.tensor([scaled[s]], device=self.device) for s in scales}
            out, lse = call(inputs, return_lse=True, **{**scaled, **on_device})
            torch.testing.assert_close(out, plain, rtol=1e-3, atol=1e-4)
            torch.testing.assert_close(lse, plain_lse, rtol=1e-5, atol=1e-5)

    def test_a_scale_on_the_device_is_read_at_launch(self) -> None:
        inputs = self.make(kv_dtype="float8_e4m3fn")
        k_scale, v_scale = (torch.full((1,), x, device=self.device) for x in (0.75, 1.25))
        inputs = replace(inputs, k_scale=k_scale, v_scale=v_scale)
        first, _ = assert_serves(inputs)
        v_scale.fill_(2.5)
        k_scale.fill_(0.5)
        second, _ = assert_serves(inputs)
        assert not torch.equal(first, second)

    def test_logits_far_below_zero_keep_their_value(self) -> None:
        # A finite sentinel in place of minus infinity would swallow logits near -30,000.
        inputs = self.make([50, 3, 64], poison=False)
        inputs.q.fill_(64.0)
        inputs.k_cache.fill_(-64.0)
        out, lse = assert_serves(inputs)
        assert out.any()
        expected = -(64.0**3) / 8.0 * math.log2(math.e) + math.log2(50)
        torch.testing.assert_close(lse[0], torch.full_like(lse[0], expected), rtol=1e-6, atol=0.0)

    def test_a_sink_of_minus_infinity_is_none(self) -> None:
        inputs = self.make()
        expected, expected_lse = assert_serves(inputs)
        none = torch.full((4,), -math.inf, device=self.device)
        out, lse = assert_serves(replace(inputs, sinks=none))
        torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)

    def test_an_empty_request_with_sinks_has_their_lse(self) -> None:
        inputs = self.make(has_sinks=True)
        out, lse = assert_serves(inputs)
        assert not out[1].any()
        torch.testing.assert_close(lse[1], inputs.sinks * math.log2(math.e), rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("base", ["2", "e"])
    @pytest.mark.parametrize("has_sinks", [False, True], ids=["plain", "sinks"])
    def test_the_lse_has_the_base_that_is_asked_for(self, base: str, has_sinks: bool) -> None:
        inputs = self.make(has_sinks=has_sinks)
        out, lse = assert_serves(inputs, lse_base=base)
        with pytest.raises(AssertionError):
            assert_right(inputs, out, lse, "e" if base == "2" else "2")

    def test_inputs_are_not_modified(self) -> None:
        inputs = self.make(has_sinks=True, window_left=20)
        tensors = [inputs.q, inputs.k_cache, inputs.v_cache, inputs.sinks]
        tensors += table_arguments(inputs).values()
        before = [t.clone().view(torch.uint8) for t in tensors]
        assert_serves(inputs)
        for tensor, copy in zip(tensors, before, strict=True):
            assert torch.equal(tensor.contiguous().view(torch.uint8), copy)

    @pytest.mark.parametrize("is_dense", [False, True], ids=["csr", "dense"])
    def test_scratch_may_hold_anything(self, is_dense: bool) -> None:
        inputs = self.make(is_dense=is_dense)
        expected, expected_lse = assert_serves(inputs)
        assert spoil_scratch() > 0
        out, lse = assert_serves(inputs)
        assert torch.equal(out, expected)
        assert torch.equal(lse, expected_lse)

    def test_the_order_of_pages_does_not_matter(self) -> None:
        inputs = self.make(page_size=7)
        expected, _ = assert_serves(inputs)
        order = torch.randperm(inputs.k_cache.shape[0], generator=torch.Generator().manual_seed(9))
        order = order.to(self.device)
        moved = replace(
            inputs,
            k_cache=inputs.k_cache[order],
            v_cache=inputs.v_cache[order],
            kv_indices=order.argsort()[inputs.kv_indices.long()].to(torch.int32),
        )
        assert torch.equal(call(moved), expected)

    def test_page_size_does_not_matter(self) -> None:
        inputs = self.make([48, 0, 32], page_size=16, poison=False)
        pages = (inputs.kv_indices[:, None] * 16 + torch.arange(16, device=self.device)).flatten()
        single = replace(
            inputs,
            k_cache=inputs.k_cache.flatten(0, 1)[:, None],
            v_cache=inputs.v_cache.flatten(0, 1)[:, None],
            kv_indices=pages.to(torch.int32),
            kv_indptr=inputs.kv_indptr * 16,
            kv_last_page_len=torch.ones_like(inputs.kv_last_page_len),
        )
        expected, _ = assert_serves(inputs)
        out, _ = assert_serves(single)
        torch.testing.assert_close(out, expected, rtol=2e-3, atol=1e-4)

    @pytest.mark.parametrize("is_dense", [False, True], ids=["csr", "dense"])
    def test_a_request_alone_equals_itself_in_a_batch_under_a_fixed_split_size(
        self, is_dense: bool
    ) -> None:
        inputs = self.make([40, 5, 300], is_dense=is_dense)  # three splits of 128
        alone = replace(inputs, q=inputs.q[2:])
        if is_dense:
            alone = replace(alone, kv_indices=inputs.kv_indices[2:], seq_lens=inputs.seq_lens[2:])
        else:
            first, end = inputs.kv_indptr[2:].tolist()
            alone = replace(
                alone,
                kv_indptr=torch.tensor([0, end - first], dtype=torch.int32, device=self.device),
                kv_indices=inputs.kv_indices[first:end],
                kv_last_page_len=inputs.kv_last_page_len[2:],
            )
        problems = [
            ops.resolve_paged_decode(i.q, (i.k_cache, i.v_cache), table_of(i)).problem
            for i in (inputs, alone)
        ]
        space = joint_space(problems[0], self.sku())
        values = {**space.default.as_dict(), "split_rule": "size", "split_tokens": 128}
        values = {k: v for k, v in values.items() if k not in ("num_splits", "ctas_per_sm")}
        chosen = Config.of("triton", values)
        winners = [MadeUpWinner(problem, self.sku(), chosen) for problem in problems]
        write_winners(Path(os.environ["TILESCOUT_DB"]), winners)
        dispatch.refresh()
        for i in (inputs, alone):
            found = ops.resolve_paged_decode(i.q, (i.k_cache, i.v_cache), table_of(i))
            assert (found.tier, found.config) == ("exact", chosen)
        together, together_lse = assert_serves(inputs)
        single, single_lse = assert_serves(alone)
        assert torch.equal(together[2:], single)
        assert torch.equal(together_lse[2:], single_lse)


@pytest.mark.interpreter
@interpreted
@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
# A logit far above its cap: e^2x is infinite, and tanh is 1.
@pytest.mark.filterwarnings("ignore:overflow encountered in exp2:RuntimeWarning")
class TestInterpreted(OnADevice):
    device = "cpu"

    def sku(self):
        return catalog.gpu(catalog.gpu_names()[0])

    @pytest.fixture(autouse=True)
    def _shim(self) -> None:
        import interpreter_shim

        interpreter_shim.install()


@pytest.mark.gpu
class TestOnGpu(OnADevice):
    device = "cuda"

    def sku(self):
        return environment.current_device()

    def test_a_pool_of_more_than_2_to_the_31_elements(self) -> None:
        num_pages, page_size = 2**16 + 3, 16
        pool = torch.zeros(
            num_pages, 2, page_size, 16, 128, dtype=torch.float16, device=self.device
        )
        assert pool.numel() > 2**32
        problem = problem_of(num_qo_heads=16, num_kv_heads=16, head_dim=128)
        inputs = ref.paged_inputs(problem, [100, 0, 47], device=self.device, seed=1)
        used = inputs.k_cache.shape[0]
        pool[-used:, 0], pool[-used:, 1] = inputs.k_cache, inputs.v_cache
        indices = inputs.kv_indices + (num_pages - used)
        assert_serves(replace(inputs, k_cache=pool[:, 0], v_cache=pool[:, 1], kv_indices=indices))

    @pytest.mark.parametrize("is_dense", [False, True], ids=["csr", "dense"])
    def test_no_call_waits_for_the_device(self, is_dense: bool) -> None:
        inputs = self.make(is_dense=is_dense, has_sinks=True, window_left=20)
        scale = torch.ones(1, device=self.device)
        call(inputs, k_scale=scale)
        with waiting_forbidden():
            out, lse = call(inputs, k_scale=scale, return_lse=True)
        assert_right(inputs, out, lse)

    @pytest.mark.parametrize("is_dense", [False, True], ids=["csr", "dense"])
    def test_a_captured_graph_serves_other_lengths_and_scales(self, is_dense: bool) -> None:
        inputs = self.make([64, 64, 64], is_dense=is_dense, poison=False, has_sinks=True)
        scale = torch.ones(1, device=self.device)
        inputs = replace(inputs, k_scale=scale, v_scale=scale.clone())
        out, lse = call(inputs, return_lse=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call(inputs, out=out, lse=lse)
        for lengths in ([1, 64, 0], [0, 0, 0], [17, 33, 64]):
            if is_dense:
                inputs.seq_lens.copy_(torch.tensor(lengths))
            else:
                pages = [-(-n // 16) for n in lengths]
                ends = torch.tensor([0, *pages]).cumsum(0)
                inputs.kv_indptr.copy_(ends)
                last = [n - 16 * (p - 1) if p else 0 for n, p in zip(lengths, pages, strict=True)]
                inputs.kv_last_page_len.copy_(torch.tensor(last))
            scale.mul_(0.9)
            out.fill_(math.nan)
            assert spoil_scratch() > 0
            graph.replay()
            torch.cuda.synchronize()
            assert_right(inputs, out, lse)


def test_every_semantic_of_the_problem_is_served_here() -> None:
    """A flag that the problem grows must come with a case."""
    plain = problem_of().as_dict()
    seen = {
        name
        for changes in (*ONE_BY_ONE.values(), *TOGETHER.values())
        for name, value in problem_of(**changes).as_dict().items()
        if value != plain[name]
    }
    # Sizes of the batch, the mix of lengths and MLA have tests of their own.
    apart = {"batch", "kv_len", "num_kv_heads", "lengths"}
    assert set(plain) - seen == apart
    parameters = inspect.signature(ops.paged_decode).parameters
    assert parameters.keys() >= {"window_left", "soft_cap", "sinks", "rope"}
