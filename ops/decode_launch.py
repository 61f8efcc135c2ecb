"""From checked inputs of paged decode to a launch: the problem, the look-up, the launcher.

Shared by every public function that ends in paged decode. The problem is read off shapes; how the
lengths are spread is on the device, so the look-up prefers winners for mixed lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import torch

from ..errors import UnsupportedError, UsageError
from ..kernels.base import Launcher
from ..kernels.paged_decode import PagedDecodeInputs, PagedDecodeOutputs, PagedDecodeProblem
from ..kernels.paged_decode.lengths import LENGTH_MIXES
from ..kernels.paged_decode.problem import NVFP4
from ..kernels.registry import supported_templates, template
from ..tuner import capture, dispatch
from ..tuner.dispatch import LookupResult, Policy, Snapshot, current_snapshot
from ..tuner.dispatch_policy import current_policy
from ..tuner.reach.paged_decode import MIXES_IF_UNKNOWN, kv_bucket, preferred
from .debug_checks import check_page_table, checks_values
from .launched_call import LaunchedCall
from .launchers import LauncherCache
from .on_device import device_spec, dtype_name, on_device

__all__ = ["MIXES_IF_UNKNOWN", "launch", "mixes_to_try", "resolve"]

_launchers = LauncherCache()
_MADE_BY_OPTIONS = frozenset(("inputs.k_scale", "inputs.v_scale"))
"""A scale that is a number becomes a tensor where the other one is a tensor."""


def mixes_to_try(function: str, lengths: str | None) -> tuple[str, ...]:
    """The mixes that a call's ``lengths`` stands for.

    Raises:
        UsageError: no such mix.
    """
    if lengths is None:
        return MIXES_IF_UNKNOWN
    if lengths not in LENGTH_MIXES:
        allowed = ", ".join(LENGTH_MIXES)
        raise UsageError(f"lengths={lengths!r} of {function}: one of {allowed}, or None if unknown")
    return (lengths,)


def resolve(
    function: str,
    inputs: PagedDecodeInputs,
    mixes: Sequence[str],
    outputs: PagedDecodeOutputs | None = None,
) -> LookupResult:
    """The look-up for these inputs: its config is the one that runs.

    A template whose winner would serve the problem but not these tensors is left out.

    Raises:
        UsageError: the tensors are on the CPU and Triton's interpreter is off.
        UnsupportedError: no template serves the problem, or the tensors, on this GPU.
        NoWinnerError: the policy is ``strict`` and nothing was measured for the problem.
        StoreError: a database cannot be read.
    """
    sizes, device = _sizes(inputs), inputs.q.device
    question = (current_snapshot(), function, device, tuple(mixes))
    policy = current_policy()
    found = _resolved(*question, frozenset(), policy, **sizes)
    chosen = template(found.op, found.template)
    if chosen.supports_tensors(found.problem, inputs, outputs) is None:
        return found
    spec = device_spec(device, function)
    reasons = {
        candidate.name: candidate.supports_tensors(found.problem, inputs, outputs)
        for candidate in supported_templates(found.problem, spec)
    }
    if None not in reasons.values():
        listing = "; ".join(f"{found.op}/{name}: {reason}" for name, reason in reasons.items())
        raise UnsupportedError(f"no template of {found.op} serves the tensors: {listing}")
    refusing = frozenset(name for name, reason in reasons.items() if reason is not None)
    return _resolved(*question, refusing, policy, **sizes)


def launch(
    function: str,
    inputs: PagedDecodeInputs,
    outputs: PagedDecodeOutputs,
    mixes: Sequence[str],
) -> LaunchedCall:
    """Looks the config up and enqueues its kernels on the current stream of q's device.

    Raises:
        UsageError: as for ``resolve``, or a CUDA graph is being captured and nothing was built yet,
            or a page table is out of range in debug mode.
        UnsupportedError: no template serves the problem on this GPU.
        StoreError: a database cannot be read.
    """
    q, generation = inputs.q, dispatch.generation
    with on_device(q.device):
        if checks_values(q.device):
            check_page_table(function, inputs)
        result = resolve(function, inputs, mixes, outputs)
        if capture.recorder is not None:
            capture.recorder.count(result)
        key = (result.config, result.problem, q.device.index, *_specialisation(inputs, outputs))
        owned = _launchers.get(key, q.device, lambda: _build(result, inputs))
        with owned.lock:
            owned.launcher.launch(inputs, outputs)
    return LaunchedCall(inputs, outputs, owned, (result,), generation, _MADE_BY_OPTIONS)


def _sizes(inputs: PagedDecodeInputs) -> dict[str, int | str | bool]:
    """The fields of the problem, ``lengths`` apart."""
    q, k = inputs.q, inputs.k_cache
    batch, page_size = inputs.batch, inputs.page_size
    return {
        "batch": batch,
        "kv_len": kv_bucket(inputs.kv_indices.numel() * page_size, batch),
        "num_qo_heads": q.shape[1],
        "num_kv_heads": k.shape[2],
        "head_dim": q.shape[2],
        "page_size": page_size,
        "dtype": dtype_name(q.dtype),
        "kv_dtype": NVFP4 if inputs.has_block_scales else dtype_name(k.dtype),
        "query_len": inputs.query_len,
        "head_dim_v": inputs.head_dim_v,
        "kv_layout": _layout_of(k),
        "window_left": inputs.window_left,
        "is_causal": inputs.is_causal,
        "has_soft_cap": inputs.soft_cap > 0.0,
        "has_sinks": inputs.sinks is not None,
        "has_alibi": inputs.alibi_slopes is not None,
        "has_rope": inputs.rope is not None,
    }


def _layout_of(pool: torch.Tensor) -> str:
    """The order in memory of a view ``[pages, tokens, heads, dim]``; NHD where both are one."""
    return "HND" if pool.stride(2) > pool.stride(1) and pool.shape[2] > 1 else "NHD"


@lru_cache(maxsize=4096)
def _resolved(  # noqa: PLR0917  (a question is these six)
    snapshot: Snapshot,
    function: str,
    device: torch.device,
    mixes: tuple[str, ...],
    without: frozenset[str],
    policy: Policy,
    **sizes: int | str | bool,
) -> LookupResult:
    """The look-up of the mix that has the winner of most worth, the first one where equal."""
    spec = device_spec(device, function)
    problems = [PagedDecodeProblem.from_dict({**sizes, "lengths": mix}) for mix in mixes]
    chosen = preferred(problems, spec, snapshot, without)
    return snapshot.answer(chosen, spec, policy=policy, without=without)


def _specialisation(inputs: PagedDecodeInputs, outputs: PagedDecodeOutputs) -> tuple[object, ...]:
    """What a launcher's kernels and scratch depend on beside the problem and the config.

    A launcher that has run for one key has everything loaded, which capture relies on.
    """
    block_scales = (inputs.k_block_scales, inputs.v_block_scales)
    tensors = (
        *(inputs.q, inputs.k_cache, inputs.v_cache, outputs.out),
        *(scales for scales in block_scales if scales is not None),
    )
    table = inputs.kv_indices
    return (
        *(tensor.stride() for tensor in tensors),
        tuple(tensor.data_ptr() % 16 == 0 for tensor in tensors),
        # The row stride of a dense table; the scratch is that of the whole bucket.
        table.stride(0) if table.dim() == 2 else None,
        outputs.lse is not None,
        outputs.lse_base,
        inputs.soft_cap,
        inputs.rope,
        *(isinstance(scale, torch.Tensor) for scale in (inputs.k_scale, inputs.v_scale)),
    )


def _build(result: LookupResult, inputs: PagedDecodeInputs) -> Launcher:
    """A launcher whose scratch serves the fullest page table of the bucket."""
    problem = result.problem
    assert isinstance(problem, PagedDecodeProblem)
    shape: tuple[int, ...]
    if inputs.seq_lens is None:
        shape = (-(-problem.batch * problem.kv_len // problem.page_size),)
    else:
        shape = (problem.batch, -(-problem.kv_len // problem.page_size))
    # Only its shape is read; of pages of one token, its entries would take hundreds of megabytes.
    fullest = inputs.kv_indices.new_empty(()).expand(shape)
    chosen = template(problem.op, result.template)
    return chosen.build(problem, result.config, replace(inputs, kv_indices=fullest))
