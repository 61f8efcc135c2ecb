"""Calls of the public functions on a GPU, small and made from a seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from decode_calls import problem_of, semantics_arguments, table_arguments
from tilescout import ops
from tilescout.kernels.paged_decode import reference as ref

LENGTHS = [50, 7, 64]

Arguments = dict[str, Any]


def decode_arguments(seed: int, **changes: Any) -> Arguments:
    is_dense = changes.pop("is_dense", False)
    inputs = ref.paged_inputs(
        problem_of(**changes), LENGTHS, device="cuda", seed=seed, is_dense=is_dense
    )
    return {
        **{"q": inputs.q, "kv_cache": (inputs.k_cache, inputs.v_cache)},
        **table_arguments(inputs),
        **semantics_arguments(inputs),
        "return_lse": True,
    }


def mla_arguments(seed: int) -> Arguments:
    sizes = {"num_qo_heads": 16, "num_kv_heads": 1, "head_dim": 576, "head_dim_v": 512}
    inputs = ref.paged_inputs(problem_of(**sizes), LENGTHS, device="cuda", seed=seed)
    rows = {"q": inputs.q, "kv_cache": inputs.k_cache.squeeze(2), "sm_scale": inputs.sm_scale}
    return {**rows, **table_arguments(inputs), "return_lse": True}


def step_arguments(seed: int, **options: Any) -> Arguments:
    generator = torch.Generator(device="cuda").manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", generator=generator)

    return {
        **{"q": randn(3, 1, 2, 64), "k": randn(3, 1, 2, 64), "v": randn(3, 1, 4, 64)},
        **{"g": -randn(3, 1, 4).abs(), "beta": randn(3, 1, 4).sigmoid()},
        "state": randn(3, 4, 64, 64),
        **options,
    }


def rule_arguments(seed: int, **options: Any) -> Arguments:
    generator = torch.Generator(device="cuda").manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", generator=generator, dtype=torch.bfloat16)

    return {
        **{"q": randn(1, 300, 2, 64), "k": randn(1, 300, 2, 64), "v": randn(1, 300, 4, 64)},
        **{"g": -randn(1, 300, 4).abs().float(), "beta": randn(1, 300, 4).sigmoid()},
        **{"use_qk_l2norm_in_kernel": True, "output_final_state": True},
        **options,
    }


def prefix_arguments(seed: int) -> Arguments:
    inputs = ref.paged_inputs(problem_of(), LENGTHS, device="cuda", seed=seed)
    indptr, indices, last = inputs.kv_indptr, inputs.kv_indices, inputs.kv_last_page_len
    assert indptr is not None
    assert last is not None
    return {
        **{"q": inputs.q, "kv_cache": (inputs.k_cache, inputs.v_cache), "return_lse": True},
        "prefix": ops.PageTable.csr(indptr[:2], indices, last[:1]),  # that of the first request
        "suffix": ops.PageTable.csr(indptr, indices, last),
    }


def merge_arguments(seed: int) -> Arguments:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    shapes = {"out_a": (7, 4, 64), "lse_a": (7, 4), "out_b": (7, 4, 64), "lse_b": (7, 4)}
    return {
        name: torch.randn(shape, device="cuda", generator=generator)
        for name, shape in shapes.items()
    }


CASES: dict[str, tuple[Callable[..., Any], Callable[[int], Arguments]]] = {
    "paged_decode": (ops.paged_decode, decode_arguments),
    "a dense table": (ops.paged_decode, lambda seed: decode_arguments(seed, is_dense=True)),
    "fp8, a cap": (
        ops.paged_decode,
        lambda seed: decode_arguments(seed, kv_dtype="float8_e4m3fn", has_soft_cap=True),
    ),
    "three query tokens": (ops.paged_decode, lambda seed: decode_arguments(seed, query_len=3)),
    "MLA": (ops.mla_decode, mla_arguments),
    "a shared prefix": (ops.shared_prefix_decode, prefix_arguments),
    "a merge": (ops.merge_state, merge_arguments),
    "gdn_decode": (ops.gdn.gdn_decode, step_arguments),
    "the recurrence": (ops.gdn.fused_recurrent_gated_delta_rule, rule_arguments),
    "chunks": (ops.gdn.chunk_gated_delta_rule, rule_arguments),
}


def results(function: Callable[..., Any], arguments: Arguments) -> list[torch.Tensor]:
    """What the call returns and what it writes into."""
    found = function(**arguments)
    tensors = [x for x in (found if isinstance(found, tuple) else (found,)) if x is not None]
    return [*tensors, *([arguments["state"]] if "state" in arguments else [])]
