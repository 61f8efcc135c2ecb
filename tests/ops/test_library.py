"""``torch.compile(fullgraph=True)`` traces through the functions; their operators pass opcheck."""

from __future__ import annotations

import math
import os

import pytest
import torch
from decode_calls import assert_right, problem_of, table_arguments
from tilescout import ops
from tilescout.errors import UsageError
from tilescout.kernels.paged_decode import reference as ref
from torch._subclasses.fake_tensor import FakeTensorMode

interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"
)
BACKENDS = ["eager", "aot_eager"]
# What torch does itself when it first replays: it captures nothing, to keep a pool of memory alive
# (CUDAGraphTreeManager), and records the warning, which cannot be recorded where it is an error.
captures_nothing_first = pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
MLA = {"num_qo_heads": 16, "num_kv_heads": 1, "head_dim": 576, "head_dim_v": 512, "page_size": 16}


def inputs_of(*, is_dense: bool = False, device: str = "cpu", **changes):
    return ref.paged_inputs(
        problem_of(**changes), [50, 7, 64], device=device, seed=1, is_dense=is_dense
    )


def compiled(function, backend: str):
    torch._dynamo.reset()
    return torch.compile(function, backend=backend, fullgraph=True)


class AttentionBlock(torch.nn.Module):
    """Norm, projection, decode attention over a cache, projection, residual."""

    SIZE = 128

    def __init__(self, inputs) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads = inputs.q.shape[1:]
        self.norm = torch.nn.RMSNorm(self.SIZE)
        self.query = torch.nn.Linear(self.SIZE, self.heads.numel(), bias=False)
        self.output = torch.nn.Linear(self.heads.numel(), self.SIZE, bias=False)
        self.cache = (inputs.k_cache, inputs.v_cache)
        self.table = table_arguments(inputs)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        q = self.query(self.norm(hidden)).view(-1, *self.heads)
        return hidden + self.output(ops.paged_decode(q, self.cache, **self.table).flatten(1))


class OnADevice:
    device: str

    @pytest.mark.parametrize("backend", BACKENDS)
    @pytest.mark.parametrize("is_dense", [False, True], ids=["csr", "dense"])
    def test_a_block_around_paged_decode_is_one_graph(self, backend: str, is_dense: bool) -> None:
        inputs = inputs_of(is_dense=is_dense, device=self.device)

        def block(q, k, v, table):
            out, lse = ops.paged_decode(q * 2.0, (k, v), **table, return_lse=True, sm_scale=0.0625)
            return out + 0.0, lse

        table = table_arguments(inputs)
        out, lse = compiled(block, backend)(inputs.q, inputs.k_cache, inputs.v_cache, table)
        assert_right(inputs, out, lse)

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_outputs_of_the_caller_are_written(self, backend: str) -> None:
        inputs = inputs_of(device=self.device)
        out = torch.full_like(inputs.q, math.nan)
        table = table_arguments(inputs)

        def block(q, k, v, out):
            ops.paged_decode(q, (k, v), **table, out=out)
            return out * 1.0

        copy = compiled(block, backend)(inputs.q, inputs.k_cache, inputs.v_cache, out)
        assert_right(inputs, out, None)
        assert torch.equal(copy, out)

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_scales_on_the_device_and_rope_go_through(self, backend: str) -> None:
        inputs = inputs_of(device=self.device, has_rope=True)
        one = torch.ones(1, device=self.device)
        table = table_arguments(inputs)

        def block(q, k, v, one):
            return ops.paged_decode(
                q, (k, v), **table, k_scale=one, v_scale=one, rope=ops.Rope(theta=10000.0)
            )

        out = compiled(block, backend)(inputs.q, inputs.k_cache, inputs.v_cache, one)
        assert_right(inputs, out, None)

    def test_mla_with_the_pair_of_queries(self) -> None:
        inputs = inputs_of(device=self.device, **MLA)
        rows = inputs.k_cache.squeeze(2)
        table = table_arguments(inputs)

        def block(q, rows):
            return ops.mla_decode(q, rows, **table, sm_scale=inputs.sm_scale)

        assert_right(inputs, compiled(block, "aot_eager")(inputs.q, rows), None)

    def test_a_shared_prefix_is_one_graph(self) -> None:
        inputs = inputs_of(device=self.device)
        cache = (inputs.k_cache, inputs.v_cache)
        suffix = ops.PageTable.csr(inputs.kv_indptr, inputs.kv_indices, inputs.kv_last_page_len)
        prefix = ops.PageTable.csr(
            inputs.kv_indptr[:2].clone(), inputs.kv_indices, inputs.kv_last_page_len[:1].clone()
        )

        def block(q, k, v):
            out, lse = ops.shared_prefix_decode(q * 1.0, (k, v), prefix, suffix, return_lse=True)
            return out * 1.0, lse

        expected = ops.shared_prefix_decode(inputs.q, cache, prefix, suffix, return_lse=True)
        found = compiled(block, "aot_eager")(inputs.q, *cache)
        for ours, theirs in zip(found, expected, strict=True):
            assert torch.equal(ours, theirs)
        into = torch.full_like(inputs.q, math.nan)
        compiled(lambda q: ops.shared_prefix_decode(q, cache, prefix, suffix, out=into), "eager")(
            inputs.q
        )
        assert torch.equal(into, expected[0])

    def test_an_attention_block_is_one_graph(self) -> None:
        inputs = inputs_of(device=self.device)
        block = AttentionBlock(inputs).to(device=self.device, dtype=inputs.q.dtype)
        hidden = torch.randn(inputs.batch, block.SIZE, dtype=inputs.q.dtype, device=self.device)
        with torch.no_grad():
            found, expected = compiled(block, "aot_eager")(hidden), block(hidden)
        torch.testing.assert_close(found, expected)

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_states_are_merged_in_one_graph(self, backend: str) -> None:
        generator = torch.Generator().manual_seed(0)
        outs = torch.randn(6, 2, 4, 64, generator=generator).to(self.device)
        lses = torch.randn(6, 2, 4, generator=generator).to(self.device)
        expected = ops.merge_states(outs, lses)
        pair = [outs[:, 0], lses[:, 0], outs[:, 1], lses[:, 1]]

        def block(outs, lses):
            out, lse = ops.merge_states(outs * 1.0, lses)
            return out * 1.0, lse

        def block_of_two(out, *pair):
            ops.merge_state(*pair, out=out)
            return out * 1.0

        for ours, theirs in zip(compiled(block, backend)(outs, lses), expected, strict=True):
            assert torch.equal(ours, theirs)
        into = torch.full_like(expected[0], math.nan)
        copy = compiled(block_of_two, backend)(into, *pair)
        torch.testing.assert_close(into, expected[0])
        assert torch.equal(copy, into)
        for operator, arguments in (
            (torch.ops.tilescout.merge_state.default, tuple(pair)),
            (torch.ops.tilescout.merge_states.default, (outs, lses)),
        ):
            torch.library.opcheck(
                operator, arguments, test_utils=("test_schema", "test_faketensor")
            )

    def test_opcheck_finds_nothing(self) -> None:
        inputs = inputs_of(device=self.device)
        arguments = {"return_lse": True, "sm_scale": 0.125}
        cache = [inputs.k_cache, inputs.v_cache]
        table = (inputs.kv_indptr, inputs.kv_indices, inputs.kv_last_page_len)
        torch.library.opcheck(
            torch.ops.tilescout.paged_decode.default,
            ([inputs.q], cache, *table),
            arguments,
            test_utils=("test_schema", "test_faketensor"),
        )
        torch.library.opcheck(
            torch.ops.tilescout.paged_decode_out.default,
            ([inputs.q], cache, *table),
            {"out": torch.empty_like(inputs.q)},
            test_utils=("test_schema", "test_faketensor"),
        )


@pytest.mark.interpreter
@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")
@interpreted
class TestInterpreted(OnADevice):
    device = "cpu"


@pytest.mark.gpu
class TestOnGpu(OnADevice):
    device = "cuda"

    @captures_nothing_first
    @pytest.mark.parametrize("backend", ["inductor"])
    def test_inductor_with_cuda_graphs(self, backend: str) -> None:
        inputs = inputs_of(device=self.device)
        table = table_arguments(inputs)

        def block(q, k, v):
            return ops.paged_decode(q * 1.0, (k, v), **table) * 1.0

        torch._dynamo.reset()
        run = torch.compile(block, fullgraph=True, mode="reduce-overhead")
        for _ in range(4):
            out = run(inputs.q, inputs.k_cache, inputs.v_cache).clone()
        assert_right(inputs, out, None)

    @captures_nothing_first
    def test_an_attention_block_replays_as_a_cuda_graph(self) -> None:
        inputs = inputs_of(device=self.device)
        block = AttentionBlock(inputs).to(device=self.device, dtype=inputs.q.dtype)
        torch._dynamo.reset()
        counters = torch._dynamo.utils.counters["inductor"]
        counters.clear()
        run = torch.compile(block, fullgraph=True, mode="reduce-overhead")
        with torch.no_grad():
            for seed in range(6):
                generator = torch.Generator(device=self.device).manual_seed(seed)
                hidden = torch.randn(
                    (inputs.batch, AttentionBlock.SIZE),
                    dtype=inputs.q.dtype,
                    device=self.device,
                    generator=generator,
                )
                torch.compiler.cudagraph_mark_step_begin()
                found, expected = run(hidden).clone(), block(hidden)
                torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
        assert counters["cudagraph_skips"] == 0


def test_fake_tensors_give_the_shapes_without_a_launch() -> None:
    with FakeTensorMode():
        q = torch.empty(6, 4, 64, dtype=torch.bfloat16, device="cuda")
        pool = torch.empty(9, 2, 16, 2, 64, dtype=torch.bfloat16, device="cuda")
        table = [torch.empty(n, dtype=torch.int32, device="cuda") for n in (4, 9, 3)]
        out, lse = ops.paged_decode(q, pool, *table, return_lse=True)
        assert (out.shape, out.dtype, out.device.type) == ((6, 4, 64), torch.bfloat16, "cuda")
        assert (lse.shape, lse.dtype) == ((6, 4), torch.float32)
        latent = torch.empty(9, 16, 576, dtype=torch.bfloat16, device="cuda")
        q = torch.empty(3, 16, 576, dtype=torch.bfloat16, device="cuda")
        assert ops.mla_decode(q, latent, *table, sm_scale=0.1).shape == (3, 16, 512)


def test_what_requires_grad_is_refused_in_a_trace_too() -> None:
    with FakeTensorMode():
        q = torch.empty(3, 4, 64, dtype=torch.bfloat16, requires_grad=True)
        pool = torch.empty(9, 2, 16, 2, 64, dtype=torch.bfloat16)
        table = [torch.empty(n, dtype=torch.int32) for n in (4, 9, 3)]
        with pytest.raises(UsageError, match="requires grad, and there is no backward"):
            ops.paged_decode(q, pool, *table)
