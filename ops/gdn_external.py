"""Other people's kernels behind the functions of gated delta net: when they may serve a call.

A look-up may give a library's template. It serves where it takes the problem and the tensors; else
the look-up is made again without libraries. A template of ours that does not take the tensors is
left out likewise. Calls that autograd records go to a library's own
function where ``use_external`` allows it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from ..errors import UnsupportedError, UsageError
from ..kernels.base import Problem
from ..kernels.device import DeviceSpec
from ..kernels.external import external_policy
from ..kernels.gdn_chunk_fwd import GdnChunkInputs, GdnChunkProblem
from ..kernels.gdn_chunk_fwd.external_bounds import bounds_of, chunk_numbers, on_device
from ..kernels.gdn_chunk_fwd.external_template import GdnChunkExternal
from ..kernels.registry import operation, template
from ..tuner.dispatch import LookupResult
from .own_memory import own_memory

__all__ = ["differentiable_chunk", "is_for_library", "is_served", "keep_bounds", "refusing"]

_CHUNKS = (64,)
"""Tokens of a chunk of the libraries that want chunks numbered."""
_read_by_graphs: dict[int, torch.Tensor] = {}


@cache
def libraries(op: str) -> frozenset[str]:
    """The external templates of an operation."""
    names = operation(op).template_names
    return frozenset(name for name in names if template(op, name).is_external)


def is_served(
    result: LookupResult, problem: Problem, spec: DeviceSpec, inputs: Any, outputs: Any
) -> bool:
    """Whether the template that was found takes the problem, as ours always do, and the tensors."""
    chosen = template(result.op, result.template)
    # A library's was found for the usual kind of the problem, or for a neighbour of it.
    if chosen.is_external and chosen.supports(problem, spec) is not None:
        return False
    return chosen.supports_tensors(problem, inputs, outputs) is None


def refusing(problem: Problem, inputs: Any, outputs: Any) -> frozenset[str]:
    """The libraries, and the templates of ours that do not take the tensors."""
    left_out = libraries(problem.op)
    names = (name for name in operation(problem.op).template_names if name not in left_out)
    return left_out | {
        name
        for name in names
        if template(problem.op, name).supports_tensors(problem, inputs, outputs) is not None
    }


def keep_bounds(inputs: GdnChunkInputs) -> None:
    """Makes what libraries read of the bounds of a call's sequences, which later calls share.

    Made at the launch it would lie in whatever pool the caller's thread allocates from. What a
    captured graph reads is kept for good.
    """
    bounds, device = bounds_of(inputs), inputs.q.device
    if not bounds.end:
        return
    with own_memory(device):
        read = [on_device(bounds.values, dtype, device) for dtype in (torch.int32, torch.int64)]
        read += [chunk_numbers(bounds.values, chunk, device) for chunk in _CHUNKS]
        if bounds.with_tokens is not None:
            read.append(on_device(bounds.with_tokens, torch.int64, device))
    if _is_capturing(device):
        _read_by_graphs.update((id(tensor), tensor) for tensor in read)


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def is_for_library(function: str, *tensors: object) -> bool:
    """Whether autograd would record the call, which a library then has to serve.

    Raises:
        UsageError: it would, and libraries may not serve such calls.
    """
    if not torch.is_grad_enabled() or not any(
        isinstance(x, torch.Tensor) and x.requires_grad for x in tensors
    ):
        return False
    if external_policy() != "always":
        raise UsageError(
            f"an argument of {function} requires grad, and there is no backward of our own: call "
            "it under torch.no_grad(), detach the argument, or let an installed FlashQLA or FLA "
            "serve such calls with tilescout.use_external('always')"
        )
    return True


def differentiable_chunk(
    function: str,
    problem: GdnChunkProblem,
    inputs: GdnChunkInputs,
    spec: DeviceSpec,
    *,
    wants_state: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(output, final states) by the first library that has a backward and takes the problem.

    Raises:
        UnsupportedError: none does; the message has each one's reason.
        RuntimeError: the library raised something.
    """
    reasons = []
    for name in operation(problem.op).template_names:
        found = template(problem.op, name)
        if not isinstance(found, GdnChunkExternal) or not found.has_backward:
            continue
        reason = found.supports(problem, spec)
        if reason is None:
            return found.differentiable(problem, inputs, wants_state=wants_state)
        reasons.append(f"{name}: {reason}")
    raise UnsupportedError(
        f"an argument of {function} requires grad, and no library with a backward serves "
        f"{problem} on {spec.sku}: {'; '.join(reasons)}"
    )
