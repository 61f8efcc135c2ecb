"""What calls of paged decode reach: their bucket of lengths, either mix, with LSE or without."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from ...errors import UnsupportedError
from ...kernels.base import KernelSpec, Problem
from ...kernels.device import DeviceSpec
from ...kernels.paged_decode import PagedDecodeProblem
from ...kernels.paged_decode.triton_mla_specs import MlaConfig, MlaTraits
from ...kernels.paged_decode.triton_mla_specs import kernel_specs as mla_specs
from ...kernels.paged_decode.triton_nvfp4_specs import Nvfp4Config
from ...kernels.paged_decode.triton_nvfp4_specs import kernel_specs as nvfp4_specs
from ...kernels.paged_decode.triton_specs import (
    PagedDecodeTritonConfig,
    TensorTraits,
    kernel_specs,
)
from ..explain import LookupResult
from ..snapshot import Snapshot
from ..tiers import Tier

__all__ = ["MIXES_IF_UNKNOWN", "kv_bucket", "preferred", "problems", "specs"]

MIXES_IF_UNKNOWN = ("mixed", "equal")
"""Mixes whose winners serve lengths that are not known, the preferred one first."""

_WORTH = {Tier.EXACT: 0, Tier.NEAREST: 0, Tier.SIBLING: 1, Tier.PREDICTED: 2, Tier.DEFAULT: 3}
"""Tiers by where the winner was measured; among equals the preferred mix serves."""


def kv_bucket(num_tokens: int, batch: int) -> int:
    """Mean tokens a request, rounded up to a power of two: a growing cache rarely changes it."""
    mean = max(1, -(-num_tokens // batch))
    return 1 << (mean - 1).bit_length()


def preferred(
    candidates: list[PagedDecodeProblem],
    device: DeviceSpec,
    snapshot: Snapshot,
    without: frozenset[str] = frozenset(),
) -> PagedDecodeProblem:
    """The problem that has the winner of most worth, the first one where equal.

    The others are only looked at: what serves is what counts as a miss.
    """
    if len(candidates) == 1:
        return candidates[0]

    def worth(problem: PagedDecodeProblem) -> int:
        result = snapshot.peek(problem, device, without=without)
        return len(_WORTH) if result is None else _WORTH[result.tier]

    return min(candidates, key=worth)


def problems(problem: Problem, device: DeviceSpec, snapshot: Snapshot) -> tuple[Problem, ...]:
    """The bucket of the problem's lengths, with the mix that a call which names none gets."""
    assert isinstance(problem, PagedDecodeProblem)
    bucket = replace(problem, kv_len=kv_bucket(problem.kv_len * problem.batch, problem.batch))
    candidates = [replace(bucket, lengths=mix) for mix in MIXES_IF_UNKNOWN]
    try:
        return (bucket, preferred(candidates, device, snapshot))
    except UnsupportedError:
        return ()


def specs(result: LookupResult) -> tuple[KernelSpec, ...] | None:
    """Triton kernels with and without LSE, for either page table and kind of scales.

    Aligned tensors whose K and V have equal strides; for MLA, rows of the cache side by side.
    """
    problem = result.problem
    assert isinstance(problem, PagedDecodeProblem)
    is_scaled = problem.kv_dtype != problem.dtype
    kinds = list(product((False, True), (False, True), (False, True) if is_scaled else (False,)))
    if result.template in ("triton", "triton_nvfp4"):
        traits = [
            TensorTraits(stores_lse=lse, has_dense_table=dense, has_device_scales=scales)
            for lse, dense, scales in kinds
        ]
        batch = problem.batch
        if result.template == "triton":
            config = PagedDecodeTritonConfig.of(result.config)
            specs_of = [kernel_specs(problem, config, x, batch=batch) for x in traits]
        else:
            nvfp4 = Nvfp4Config.of(result.config)
            specs_of = [nvfp4_specs(problem, nvfp4, x, batch=batch) for x in traits]
        found = [spec for specs in specs_of for spec in specs]
    elif result.template == "triton_mla":
        mla = MlaConfig.of(result.config)
        found = [
            spec
            for lse, dense, scales in kinds
            for spec in mla_specs(
                problem,
                mla,
                MlaTraits(
                    kv_stride_token=problem.head_dim,
                    stores_lse=lse,
                    has_dense_table=dense,
                    has_device_scales=scales,
                ),
                batch=problem.batch,
            )
        ]
    else:
        return None
    return tuple(found)
