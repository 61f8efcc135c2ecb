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
MLA = {"num_qo_heads": 16, "num_kv_heads": 1, "head_dim": 576, "head_dim_v": 512, "page_size": 16}


def inputs_of(*, is_dense: bool = False, device: str = "cpu", **changes):
    return ref.paged_inputs(
        problem_of(**changes), [50, 7, 64], device=device, seed=1, is_dense=is_dense
    )


def compiled(function, backend: str):
    torch._dynamo.reset()
    return torch.compile(function, backend=backend, fullgraph=True)


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
