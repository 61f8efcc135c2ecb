"""Merging attention states: attention over several parts of the tokens, put together by their LSEs.

The result is the attention over all tokens. Names and shapes are FlashInfer's; ``lse_base`` is said
by the caller, because kernels differ in it.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import torch

from ..errors import UsageError
from ..kernels.attention_states.launcher import AttentionStates, MergeLauncher
from ..tuner import dispatch
from .checks import check_shape, check_tensor, refuse_grad, wrong
from .launched_call import LaunchedCall, Role
from .launchers import LauncherCache
from .library import define_operator, is_traced
from .on_device import device_spec, on_device
from .overlap import check_written_once, is_in_place_of, shares_memory
from .prepared import PreparedCalls

__all__ = ["merge_state", "merge_states", "merged"]

_launchers = LauncherCache()
_two_calls = PreparedCalls(
    {
        "out_a": Role(("inputs.outs[0]",)),
        "lse_a": Role(("inputs.lses[0]",)),
        "out_b": Role(("inputs.outs[1]",)),
        "lse_b": Role(("inputs.lses[1]",)),
        "out": Role(("outputs[0]",), is_output=True, apart_from=("out_a", "out_b")),
        "lse": Role(("outputs[1]",), is_output=True, apart_from=("lse_a", "lse_b")),
    }
)
_all_calls = PreparedCalls(
    {
        "outs": Role(("inputs.outs[0]",)),
        "lses": Role(("inputs.lses[0]",)),
        "out": Role(("outputs[0]",), is_output=True, apart_from=("outs",)),
        "lse": Role(("outputs[1]",), is_output=True, apart_from=("lses",)),
    }
)
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@_two_calls.serve
def merge_state(
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    *,
    lse_base: Literal["2", "e"] = "2",
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the tokens of a and of b, which have none in common.

    A state with an infinite LSE saw no token: it changes nothing, whatever its values are, NaN
    included. Two of them give 0 and minus infinity.

    Args:
        out_a: ``[tokens, heads, head_dim]``, bf16, fp16 or fp32, last dimension contiguous.
        lse_a: fp32 ``[tokens, heads]``, any strides.
        out_b: Like out_a.
        lse_b: Like lse_a.
        lse_base: Base of the logarithm in the LSEs, given and returned.
        out: Where to write, like out_a; may be out_a or out_b itself. None: allocated.
        lse: Where to write, like lse_a; may be lse_a or lse_b itself. None: allocated.

    Returns:
        ``(out, lse)``.

    Raises:
        UsageError: a tensor has a wrong shape, dtype, device or stride, requires grad under grad
            mode, lies on the CPU, or a result lies across states.
    """
    name = "merge_state"
    if is_traced(out_a, lse_a, out_b, lse_b):
        refuse_grad(name, out_a, lse_a, out_b, lse_b, out, lse)
        return _traced(_MERGE_TWO, (out_a, lse_a, out_b, lse_b), lse_base, out, lse)
    _check_states(name, ("out_a", out_a), ("lse_a", lse_a), "[tokens, heads, head_dim]")
    _check_like(name, "out_b", out_b, out_a.shape, out_a)
    _check_values(name, "out_b", out_b)
    _check_like(name, "lse_b", lse_b, lse_a.shape, lse_a)
    refuse_grad(name, out_a, lse_a, out_b, lse_b)
    states = AttentionStates((out_a, out_b), (lse_a, lse_b), _checked_base(name, lse_base))
    outputs, launched = merged(name, states, out, lse)
    _two_calls.hand_over(*launched)
    return outputs


@_all_calls.serve
def merge_states(
    outs: torch.Tensor,
    lses: torch.Tensor,
    *,
    lse_base: Literal["2", "e"] = "2",
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the tokens of all states, of which no two have a token in common.

    Args:
        outs: ``[tokens, num_states, heads, head_dim]``, bf16, fp16 or fp32, last dimension
            contiguous.
        lses: fp32 ``[tokens, num_states, heads]``, any strides; infinite where a state saw no
            token, as in ``merge_state``.
        lse_base: Base of the logarithm in the LSEs, given and returned.
        out: Where to write, ``[tokens, heads, head_dim]``; None: allocated.
        lse: Where to write, ``[tokens, heads]``; None: allocated.

    Returns:
        ``(out, lse)``; 0 and minus infinity where there is no state.

    Raises:
        UsageError: as for ``merge_state``.
    """
    name = "merge_states"
    if is_traced(outs, lses):
        refuse_grad(name, outs, lses, out, lse)
        return _traced(_MERGE_ALL, (outs, lses), lse_base, out, lse)
    axes = "[tokens, num_states, heads, head_dim]"
    _check_states(name, ("outs", outs), ("lses", lses), axes)
    refuse_grad(name, outs, lses)
    states = AttentionStates((outs,), (lses,), _checked_base(name, lse_base))
    outputs, launched = merged(name, states, out, lse)
    _all_calls.hand_over(*launched)
    return outputs


def merged(
    name: str, states: AttentionStates, out: torch.Tensor | None, lse: torch.Tensor | None
) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[LaunchedCall, ...]]:
    """Enqueues the merge of checked states for the function ``name``.

    Returns:
        ``(out, lse)``, and what was launched: nothing where the output has no element.

    Raises:
        UsageError: an output does not fit, requires grad under grad mode, or lies across states.
    """
    generation = dispatch.generation
    values, exponents = states.outs[0], states.lses[0]
    shape = torch.Size((values.shape[0], *values.shape[-2:]))
    given = {"out": (out, states.outs), "lse": (lse, states.lses)}
    out = values.new_empty(shape) if out is None else out
    lse = exponents.new_empty(shape[:2]) if lse is None else lse
    _check_like(name, "out", out, shape, values)
    _check_like(name, "lse", lse, shape[:2], exponents)
    _check_values(name, "out", out)
    refuse_grad(name, out, lse)
    for what, (tensor, read) in given.items():
        if tensor is not None:
            _check_place(name, what, tensor, read, is_pair=states.is_pair)
    if not out.numel():
        return (out, lse), ()
    tensors = (*states.outs, out)
    key = (
        *(len(states.outs), out.dtype, out.device.index, shape[2]),
        *((tensor.stride(), tensor.data_ptr() % 16) for tensor in tensors),
    )
    device_spec(out.device, name)
    with on_device(out.device):
        owned = _launchers.get(key, out.device, partial(MergeLauncher, states, out))
        with owned.lock:
            owned.launcher.launch(states, (out, lse))
    made = LaunchedCall(states, (out, lse), owned, (), generation)
    return (out, lse), (made,)


def _check_states(
    name: str, named_out: tuple[str, torch.Tensor], named_lse: tuple[str, torch.Tensor], axes: str
) -> None:
    out_name, out = named_out
    lse_name, lse = named_lse
    check_tensor(name, out_name, out)
    if out.dim() != axes.count(",") + 1:
        raise wrong(name, f"shape of {out_name}", tuple(out.shape), axes)
    if out.dtype not in _DTYPES:
        allowed = "torch.bfloat16, torch.float16 or torch.float32"
        raise wrong(name, f"dtype of {out_name}", out.dtype, allowed)
    _check_values(name, out_name, out)
    check_shape(name, lse_name, lse, tuple(out.shape[:-1]))
    if lse.dtype != torch.float32:
        raise wrong(name, f"dtype of {lse_name}", lse.dtype, "torch.float32")
    if lse.device != out.device:
        allowed = f"that of {out_name}, {str(out.device)!r}"
        raise wrong(name, f"device of {lse_name}", str(lse.device), allowed)


def _check_values(name: str, what: str, tensor: torch.Tensor) -> None:
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise wrong(name, f"last stride of {what}", tensor.stride(-1), "1: call .contiguous()")


def _check_place(
    name: str, what: str, tensor: torch.Tensor, read: Sequence[torch.Tensor], *, is_pair: bool
) -> None:
    """A result may take the place of a state, which is read before; not lie across some."""
    check_written_once(name, what, tensor)
    if not any(shares_memory(tensor, state) for state in read):
        return
    states = read if is_pair else read[0].unbind(1)
    for state in states:
        if shares_memory(tensor, state) and not is_in_place_of(tensor, state):
            raise UsageError(
                f"{what} of {name} shares memory with a state without being in its place: other "
                "blocks still read that; pass one of the states itself, or another tensor"
            )


def _check_like(
    name: str, what: str, tensor: torch.Tensor, shape: torch.Size, like: torch.Tensor
) -> None:
    check_shape(name, what, tensor, tuple(shape))
    if tensor.dtype != like.dtype:
        raise wrong(name, f"dtype of {what}", tensor.dtype, str(like.dtype))
    if tensor.device != like.device:
        raise wrong(name, f"device of {what}", str(tensor.device), repr(str(like.device)))


def _checked_base(name: str, lse_base: str) -> Literal["2", "e"]:
    if lse_base == "2":
        return "2"
    if lse_base == "e":
        return "e"
    raise UsageError(f"lse_base={lse_base!r} of {name} must be '2' or 'e', as the LSEs were made")


def _traced(
    operators: tuple[Any, Any],
    states: tuple[torch.Tensor, ...],
    lse_base: str,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator that allocates, or the one that writes where either output is given."""
    new, into = operators
    if out is None and lse is None:
        made: tuple[torch.Tensor, torch.Tensor] = new(*states, lse_base=lse_base)
        return made
    spare_out, spare_lse = _fake_merge(*states)
    out = spare_out if out is None else out
    lse = spare_lse if lse is None else lse
    into(*states, lse_base=lse_base, out=out, lse=lse)
    return out, lse


def _fake_merge(*states: torch.Tensor, lse_base: str = "2") -> tuple[torch.Tensor, torch.Tensor]:
    del lse_base
    values, exponents = states[:2]
    shape = (values.shape[0], *values.shape[-2:])
    return values.new_empty(shape), exponents.new_empty(shape[:2])


def _operators(function: Any, parameters: str, calls: PreparedCalls) -> tuple[Any, Any]:
    """``tilescout::NAME``, which allocates its outputs, and ``tilescout::NAME_out``."""
    name, function = function.__name__, inspect.unwrap(function)

    def run_into(*states: torch.Tensor, **options: Any) -> None:
        function(*states, **options)

    base = f"{parameters}, *, str lse_base='2'"
    outputs = "Tensor(a!) out, Tensor(b!) lse"
    return (
        define_operator(f"{name}({base}) -> (Tensor, Tensor)", function, _fake_merge, calls),
        define_operator(
            f"{name}_out({base}, {outputs}) -> ()", run_into, lambda *_, **__: None, calls
        ),
    )


_MERGE_TWO = _operators(
    merge_state, "Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b", _two_calls
)
_MERGE_ALL = _operators(merge_states, "Tensor outs, Tensor lses", _all_calls)
