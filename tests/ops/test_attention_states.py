"""Merging attention states: the algebra that makes it right, and what is refused."""

from __future__ import annotations

import math
import os
from importlib import import_module

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tilescout import ops
from tilescout.errors import UsageError
from tilescout.kernels.attention_states.launcher import merge_spec
from tilescout.kernels.attention_states.reference import merge_reference
from tilescout.ops.launchers import LauncherCache

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(
    not IS_INTERPRETED, reason="set TRITON_INTERPRET=1 (make test does)"
)

ROUNDOFF = {torch.float32: 2.0**-23, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
"""Relative: the result is rounded once to its dtype; fp32's own sums take another 2^-24."""
TOLERANCE = 2e-6
"""Absolute beside it: sums in fp32 of values of a few units cancel."""
LSE_TOLERANCE = 1e-5
"""Absolute at LSEs of up to 40: fp32 has 24 bits."""

State = tuple[torch.Tensor, torch.Tensor]


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, base: str = "2") -> State:
    """Attention of q [tokens, heads, d] over k, v [n, heads, d] in fp64, returned as fp32."""
    logits = torch.einsum("thd,nhd->thn", q.double(), k.double())
    lse = torch.logsumexp(logits, -1)
    out = torch.einsum("thn,nhd->thd", (logits - lse[..., None]).exp().nan_to_num(0.0), v.double())
    return out.float(), (lse * (math.log2(math.e) if base == "2" else 1.0)).float()


def random_state(seed: int, tokens=3, heads=2, dim=16, dtype=torch.float32, device="cpu") -> State:
    generator = torch.Generator().manual_seed(seed)
    out = torch.randn(tokens, heads, dim, generator=generator).to(dtype)
    return out.to(device), (8 * torch.randn(tokens, heads, generator=generator)).to(device)


def empty_like(state: State, value: float = math.nan, lse: float = -math.inf) -> State:
    return torch.full_like(state[0], value), torch.full_like(state[1], lse)


def assert_close(got: State, expected: State) -> None:
    (out, lse), (want, want_lse) = got, expected
    torch.testing.assert_close(
        out.double(), want.double(), rtol=ROUNDOFF[out.dtype], atol=TOLERANCE
    )
    torch.testing.assert_close(lse.double(), want_lse.double(), rtol=0, atol=LSE_TOLERANCE)


class OnADevice:
    """What holds wherever the kernel runs."""

    device: str

    @pytest.fixture(autouse=True)
    def _no_launchers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        module = import_module("tilescout.ops.attention_states")
        monkeypatch.setattr(module, "_launchers", LauncherCache())

    def state(self, seed: int, **shape) -> State:
        return random_state(seed, device=self.device, **shape)

    @pytest.mark.parametrize("base", ["2", "e"])
    @pytest.mark.parametrize("cut", [1, 20, 39])
    def test_equals_attention_over_the_union(self, cut: int, base: str) -> None:
        generator = torch.Generator().manual_seed(cut)
        q, k, v = (torch.randn(n, 2, 24, generator=generator) for n in (3, 40, 40))
        parts = [attention(q, k[s], v[s], base) for s in (slice(cut), slice(cut, None))]
        (a, x), (b, y) = ((o.to(self.device), e.to(self.device)) for o, e in parts)
        got = ops.merge_state(a, x, b, y, lse_base=base)
        assert_close(tuple(t.cpu() for t in got), attention(q, k, v, base))

    @pytest.mark.parametrize("num_states", [1, 2, 5])
    def test_many_states_equal_attention_over_the_union(self, num_states: int) -> None:
        generator = torch.Generator().manual_seed(num_states)
        q, k, v = (torch.randn(n, 2, 24, generator=generator) for n in (3, 40, 40))
        parts = [
            attention(q, *kv) for kv in zip(k.chunk(num_states), v.chunk(num_states), strict=True)
        ]
        outs = torch.stack([out for out, _ in parts], 1).to(self.device)
        lses = torch.stack([lse for _, lse in parts], 1).to(self.device)
        got = ops.merge_states(outs, lses)
        assert_close(tuple(t.cpu() for t in got), attention(q, k, v))

    @pytest.mark.parametrize("dtype", ROUNDOFF, ids=str)
    @pytest.mark.parametrize("dim", [8, 96, 128, 512])
    def test_every_dtype_and_head_dim(self, dtype: torch.dtype, dim: int) -> None:
        (a, x), (b, y) = (self.state(s, dim=dim, dtype=dtype) for s in (1, 2))
        assert_close(ops.merge_state(a, x, b, y), merge_reference([a, b], [x, y]))

    @pytest.mark.parametrize("value", [0.0, math.nan, math.inf])
    @pytest.mark.parametrize("lse", [-math.inf, math.inf], ids=["minus", "plus"])
    def test_an_empty_state_is_neutral(self, value: float, lse: float) -> None:
        state = self.state(3)
        empty = empty_like(state, value, lse)
        for pair in ((state, empty), (empty, state)):
            out, merged = ops.merge_state(*pair[0], *pair[1])
            assert torch.equal(out, state[0])
            torch.testing.assert_close(merged, state[1], rtol=0, atol=LSE_TOLERANCE)

    def test_only_empty_states_give_zero_and_minus_infinity(self) -> None:
        empty = empty_like(self.state(4))
        results = [ops.merge_state(*empty, *empty)]
        results.append(ops.merge_states(*(torch.stack([x, x, x], 1) for x in empty)))
        results.append(ops.merge_states(*(torch.stack([x], 1)[:, :0] for x in empty)))
        for out, lse in results:
            assert torch.equal(out, torch.zeros_like(out))
            assert torch.isneginf(lse).all()

    def test_nan_of_an_empty_row_stays_in_no_other_row(self) -> None:
        (a, x), (b, y) = self.state(5), self.state(6)
        a[1], x[1] = math.nan, -math.inf
        b[2, 0], y[2, 0] = math.nan, -math.inf
        out, lse = ops.merge_state(a, x, b, y)
        assert torch.isfinite(out).all()
        assert torch.isfinite(lse).all()
        assert_close((out, lse), merge_reference([a, b], [x, y]))

    def test_order_and_grouping_do_not_matter(self) -> None:
        a, b, c = (self.state(s) for s in (7, 8, 9))
        expected = merge_reference(*zip(a, b, c, strict=True))
        left = ops.merge_state(*ops.merge_state(*a, *b), *c)
        right = ops.merge_state(*a, *ops.merge_state(*c, *b))
        at_once = ops.merge_states(*(torch.stack(x, 1) for x in zip(c, a, b, strict=True)))
        for got in (left, right, at_once):
            assert_close(got, expected)

    def test_lses_far_from_zero(self) -> None:
        (a, x), (b, y) = self.state(10), self.state(11)
        for shift in (-3e4, 3e4):
            got = ops.merge_state(a, x + shift, b, y + shift)
            torch.testing.assert_close(
                got[0], merge_reference([a, b], [x, y])[0].float(), atol=2e-2, rtol=0
            )
            assert torch.isfinite(got[1]).all()

    def test_the_bases_differ_and_each_is_right(self) -> None:
        (a, x), (b, y) = self.state(12), self.state(13)
        for base in ("2", "e"):
            got = ops.merge_state(a, x, b, y, lse_base=base)
            assert_close(got, merge_reference([a, b], [x, y], base))
        wrong = merge_reference([a, b], [x, y], "2")
        with pytest.raises(AssertionError):
            assert_close(got, wrong)

    def test_writes_in_place_and_into_given_tensors(self) -> None:
        (a, x), (b, y) = self.state(14), self.state(15)
        expected = ops.merge_state(a, x, b, y)
        first, second = a.clone(), x.clone()
        got = ops.merge_state(first, second, b, y, out=first, lse=second)
        assert got[0] is first
        assert got[1] is second
        assert all(torch.equal(p, q) for p, q in zip(got, expected, strict=True))
        other = b.clone(), y.clone()
        got = ops.merge_state(a, x, *other, out=other[0], lse=other[1])
        assert all(torch.equal(p, q) for p, q in zip(got, expected, strict=True))

    def test_inputs_are_not_modified_and_strides_are_free(self) -> None:
        wide = self.state(16, heads=6)
        (a, x), (b, y) = (wide[0][:, ::2], wide[1][:, ::2]), self.state(17, heads=3)
        y = y.t().contiguous().t()
        before = [t.clone() for t in (a, x, b, y)]
        out = torch.full((3, 2, 3, 16), math.nan, device=self.device)[:, 1]
        got = ops.merge_state(a, x, b, y, out=out)
        assert_close(got, merge_reference([a, b], [x, y]))
        assert all(torch.equal(p, q) for p, q in zip((a, x, b, y), before, strict=True))
        many = torch.stack([a, b]).transpose(0, 1), torch.stack([x, y]).transpose(0, 1)
        assert_close(ops.merge_states(*many), merge_reference([a, b], [x, y]))

    def test_no_tokens(self) -> None:
        a, x = self.state(18, tokens=0)
        out, lse = ops.merge_state(a, x, a, x)
        assert (out.shape, lse.shape) == ((0, 2, 16), (0, 2))


@pytest.mark.interpreter
@interpreted
class TestInterpreted(OnADevice):
    device = "cpu"

    @pytest.fixture(autouse=True)
    def _shim(self) -> None:
        import interpreter_shim

        interpreter_shim.install()

    @settings(max_examples=40, deadline=None)
    @given(
        st.lists(
            st.lists(
                st.one_of(st.just(-math.inf), st.floats(-40, 40, width=32)), min_size=4, max_size=4
            ),
            min_size=1,
            max_size=4,
        )
    )
    def test_any_states_equal_the_reference(self, exponents: list[list[float]]) -> None:
        lses = torch.tensor(exponents).reshape(-1, 2, 2).transpose(0, 1)
        outs = torch.randn(*lses.shape, 8, generator=torch.Generator().manual_seed(1))
        outs = outs.masked_fill(lses.isinf()[..., None], math.nan)
        expected = merge_reference(outs.unbind(1), lses.unbind(1))
        assert_close(ops.merge_states(outs, lses), expected)


@pytest.mark.gpu
class TestOnGpu(OnADevice):
    device = "cuda"

    def test_a_captured_graph_merges_what_is_there_at_replay(self) -> None:
        (a, x), (b, y) = self.state(20), self.state(21)
        out, lse = ops.merge_state(a, x, b, y)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            ops.merge_state(a, x, b, y, out=out, lse=lse)
        a.mul_(2.0)
        y.sub_(3.0)
        out.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert_close((out, lse), merge_reference([a, b], [x, y]))

    def test_more_than_2_to_the_31_elements(self) -> None:
        tokens, heads, dim = 2**17 + 3, 8, 256
        outs = torch.zeros(tokens, 9, heads, dim, dtype=torch.float16, device="cuda")
        lses = torch.full(outs.shape[:3], -math.inf, device="cuda")
        outs[-1] = 2.0
        lses[-1] = 1.0
        out, lse = ops.merge_states(outs, lses)
        assert torch.equal(out[-1], torch.full_like(out[-1], 2.0))
        assert not out[:-1].any()
        torch.testing.assert_close(lse[-1], torch.full_like(lse[-1], 1.0 + math.log2(9)))


@pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter compiles nothing")
@pytest.mark.parametrize("arch", [90, 100, 120])
@pytest.mark.parametrize("is_pair", [True, False], ids=["pair", "many"])
def test_kernels_compile(arch: int, is_pair: bool) -> None:
    spec = merge_spec(is_pair=is_pair, dtype=torch.bfloat16, head_dim=96, aligned=("out",))
    assert spec.compile(arch).cubin


WRONG = {
    "values of two dimensions": (
        lambda a, x: (a[0], x, a, x),
        r"shape of out_a in merge_state is \(2, 16\): must be \[tokens, heads, head_dim\]",
    ),
    "values in fp64": (
        lambda a, x: (a.double(), x, a, x),
        r"dtype of out_a .*float64: must be torch\.bfloat16, torch\.float16 or torch\.float32",
    ),
    "values of another dtype": (
        lambda a, x: (a, x, a.half(), x),
        r"dtype of out_b .*float16: must be torch\.float32",
    ),
    "lse of one head less": (
        lambda a, x: (a, x[:, :1], a, x),
        r"shape of lse_a in merge_state is \(3, 1\): must be \[3, 2\]",
    ),
    "lse in half": (
        lambda a, x: (a, x.half(), a, x),
        r"dtype of lse_a .*float16: must be torch\.float32",
    ),
    "another lse in half": (
        lambda a, x: (a, x, a, x.half()),
        r"dtype of lse_b .*float16: must be torch\.float32",
    ),
    "another number of tokens": (
        lambda a, x: (a, x, a[:2], x),
        r"shape of out_b in merge_state is \(2, 2, 16\): must be \[3, 2, 16\]",
    ),
    "strided values": (
        lambda a, x: (a, x, a.repeat_interleave(2, -1)[..., ::2], x),
        r"last stride of out_b in merge_state is 2: must be 1",
    ),
    "another device": (
        lambda a, x: (a, x.to("meta"), a, x),
        r"device of lse_a .*'meta': must be that of out_a, 'cpu'",
    ),
    "requires grad": (
        lambda a, x: (a, x, a.clone().requires_grad_(), x),
        r"an argument of merge_state requires grad",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_tensors_are_named(case: str) -> None:
    change, message = WRONG[case]
    with pytest.raises(UsageError, match=message):
        ops.merge_state(*change(*random_state(1)))


def test_wrong_options_are_named() -> None:
    a, x = random_state(1)
    with pytest.raises(UsageError, match=r"lse_base=2 of merge_state must be '2' or 'e'"):
        ops.merge_state(a, x, a, x, lse_base=2)
    with pytest.raises(UsageError, match=r"shape of out in merge_state is \(2, 2, 16\)"):
        ops.merge_state(a, x, a, x, out=a[:2])
    with pytest.raises(UsageError, match=r"dtype of lse .*float16"):
        ops.merge_state(a, x, a, x, lse=x.half())
    with pytest.raises(UsageError, match=r"shape of outs in merge_states is \(3, 2, 16\)"):
        ops.merge_states(a, x)


def test_results_lie_in_the_place_of_a_state_or_apart() -> None:
    a, x = random_state(1)
    with pytest.raises(UsageError, match=r"type of out_a in merge_state is 'NoneType'"):
        ops.merge_state(None, x, a, x)
    with pytest.raises(UsageError, match=r"out of merge_state has strides \(0, 16, 1\): its elem"):
        ops.merge_state(a, x, a, x, out=a[:1].clone().expand_as(a))
    with pytest.raises(UsageError, match="an argument of merge_state requires grad"):
        ops.merge_state(a, x, a, x, out=torch.empty_like(a).requires_grad_())
    rows = torch.cat([a, a[:1]])
    message = "out of merge_state shares memory with a state without being in its place"
    with pytest.raises(UsageError, match=message):
        ops.merge_state(rows[:-1], x, a, x, out=rows[1:])
    columns = torch.cat([x, x[:, :1]], dim=1)
    with pytest.raises(UsageError, match="lse of merge_state shares memory with a state"):
        ops.merge_state(a, columns[:, :-1], a, x, lse=columns[:, 1:])


@pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter runs CPU tensors")
def test_cpu_tensors_are_refused_without_the_interpreter() -> None:
    a, x = random_state(1)
    with pytest.raises(UsageError, match=r"merge_state got tensors on 'cpu'"):
        ops.merge_state(a, x, a, x)
