"""The functions of the gated delta net as operators of ``torch.library``; see ``library``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from .library import define_operator
from .prepared import PreparedCalls

__all__ = ["DeltaRuleOperator", "StepOperator"]

_DELTA_RULE = (
    "(Tensor q, Tensor k, Tensor v, *, Tensor? g=None, Tensor? beta=None, float? scale=None, "
    "Tensor? initial_state=None, bool output_final_state=False, "
    "bool use_qk_l2norm_in_kernel=False, bool use_gate_in_kernel=False, Tensor? A_log=None, "
    "Tensor? dt_bias=None, bool use_beta_sigmoid_in_kernel=False, bool allow_neg_eigval=False, "
    "bool state_v_first=False, Tensor? cu_seqlens=None{more}) -> (Tensor, Tensor)"
)
_STEP = (
    "(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor(a!) state, *, "
    "Tensor? slots=None, Tensor? A_log=None, Tensor? dt_bias=None, float? scale=None, "
    "bool use_qk_l2norm=True, str state_layout='KV'"
)


class DeltaRuleOperator:
    """A function with FLA's signature: it returns an output and perhaps the final state."""

    def __init__(self, function: Callable[..., Any], calls: PreparedCalls, more: str = "") -> None:
        """Registers ``tilescout::NAME``; ``more`` are further arguments of its schema."""
        self._function = inspect.unwrap(function)
        schema = function.__name__ + _DELTA_RULE.format(more=f", {more}" if more else "")
        self._operator = define_operator(schema, self._run, self._fake, calls)

    def __call__(self, **arguments: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Calls the operator; arguments and result are those of the function."""
        out, final_state = self._operator(**arguments)
        return out, final_state if arguments["output_final_state"] else None

    def _run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **arguments: Any) -> Any:
        out, final_state = self._function(q, k, v, **arguments)
        return out, out.new_empty(0, dtype=torch.float32) if final_state is None else final_state

    def _fake(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **arguments: Any) -> Any:
        out = torch.empty_like(v, memory_format=torch.contiguous_format)
        if not arguments.get("output_final_state"):
            return out, v.new_empty(0, dtype=torch.float32)
        bounds = arguments.get("cu_seqlens")
        sequences = q.shape[0] if bounds is None else bounds.shape[0] - 1
        dims = (q.shape[3], v.shape[3])
        shape = (sequences, v.shape[2], *(dims[::-1] if arguments.get("state_v_first") else dims))
        return out, v.new_empty(shape, dtype=torch.float32)


class StepOperator:
    """``gdn_decode``: it updates a pool of states, and returns or writes an output."""

    def __init__(self, function: Callable[..., torch.Tensor], calls: PreparedCalls) -> None:
        """Registers ``tilescout::gdn_decode`` and ``tilescout::gdn_decode_out``."""
        self._function = inspect.unwrap(function)
        name = function.__name__
        self._new = define_operator(f"{name}{_STEP}) -> Tensor", self._function, self._fake, calls)
        self._into = define_operator(
            f"{name}_out{_STEP}, Tensor(b!) out) -> ()",
            self._run_into,
            lambda *_, **__: None,
            calls,
        )

    def __call__(self, *tensors: torch.Tensor, **arguments: Any) -> torch.Tensor:
        """Calls the operator that fits; arguments and result are those of the function."""
        out: torch.Tensor | None = arguments.pop("out")
        if out is None:
            new: torch.Tensor = self._new(*tensors, **arguments)
            return new
        self._into(*tensors, **arguments, out=out)
        return out

    def _run_into(self, *tensors: torch.Tensor, **arguments: Any) -> None:
        self._function(*tensors, **arguments)

    @staticmethod
    def _fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> Any:
        return torch.empty_like(v, memory_format=torch.contiguous_format)
