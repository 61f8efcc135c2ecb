"""The FP4 functions as operators of ``torch.library``; see ``library``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from ..kernels.fp4_attention.problem import KEY_PADDING, Q_BLOCK_ROWS
from .fp4_checks import last_contiguous
from .library import define_operator
from .prepared import PreparedCalls

__all__ = ["AttentionOperator", "ForwardOperator", "QuantizeOperator"]

_ATTENTION = (
    "(Tensor q, Tensor k, Tensor v, *, bool is_causal=False, float? sm_scale=None, "
    "str layout='HND', str mode='auto', str products='auto', str[] smooth, "
    "bool per_block_mean=True, str tensor_scale='amax', str p_scale='ceil', str p_map='exact', "
    "bool return_lse=False) -> (Tensor, Tensor)"
)
_QUANTIZE = "(Tensor q, Tensor k, Tensor v, bool per_block_mean=True) -> ({})"
_FORWARD = (
    "(Tensor q_fp4, Tensor k_fp4, Tensor v_fp4_t, Tensor q_scale, Tensor k_scale, "
    "Tensor v_scale_t, Tensor qk_correction, *, float? sm_scale=None, bool causal=False, "
    "bool per_block_mean=True{})"
)
_E4M3 = torch.float8_e4m3fn


class AttentionOperator:
    """``fp4_attention``: it returns an output and, where it is wanted, the LSE."""

    def __init__(self, function: Callable[..., Any]) -> None:
        """Registers ``tilescout::NAME``."""
        self._function = function
        self._operator = define_operator(function.__name__ + _ATTENTION, self._run, self._fake)

    def __call__(self, **arguments: Any) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Calls the operator; arguments and result are those of the function."""
        result: tuple[torch.Tensor, torch.Tensor] = self._operator(
            **{**arguments, "smooth": sorted(arguments["smooth"])}
        )
        return result if arguments["return_lse"] else result[0]

    def _run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
        result = self._function(q, k, v, **options)
        if options.get("return_lse"):
            return result
        return result, result.new_empty(0, dtype=torch.float32)

    def _fake(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
        del k, v
        is_token_major = options.get("layout") == "NHD"
        rows = last_contiguous(q.transpose(1, 2) if is_token_major else q)
        out = torch.empty_like(rows, memory_format=torch.preserve_format)
        shape = rows.shape[:3] if options.get("return_lse") else (0,)
        lse = q.new_empty(shape, dtype=torch.float32)
        return out.transpose(1, 2) if is_token_major else out, lse


class QuantizeOperator:
    """FlashInfer's quantiser: seven tensors."""

    def __init__(self, function: Callable[..., Any]) -> None:
        """Registers ``tilescout::NAME``."""
        schema = function.__name__ + _QUANTIZE.format(", ".join(["Tensor"] * 7))
        self._operator = define_operator(schema, function, self._fake)

    def __call__(self, *tensors: torch.Tensor, per_block_mean: bool) -> tuple[torch.Tensor, ...]:
        """Calls the operator; arguments and result are those of the function."""
        result: tuple[torch.Tensor, ...] = self._operator(*tensors, per_block_mean)
        return result

    @staticmethod
    def _fake(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, per_block_mean: bool = True
    ) -> tuple[torch.Tensor, ...]:
        (batch, heads, query_len, dim), (kv_heads, kv_len) = q.shape, k.shape[1:3]
        padded = -(-kv_len // KEY_PADDING) * KEY_PADDING
        means = -(-query_len // Q_BLOCK_ROWS) if per_block_mean else 1
        rows = ((heads, query_len, dim), (kv_heads, kv_len, dim), (kv_heads, dim, padded))
        return (
            *(q.new_empty((batch, h, n, m // 2), dtype=torch.uint8) for h, n, m in rows),
            *(q.new_empty((batch, h, n, m // 16), dtype=_E4M3) for h, n, m in rows),
            q.new_empty((batch, heads, means, kv_len), dtype=torch.float32),
        )


class ForwardOperator:
    """FlashInfer's forward: it returns or writes an output and its LSE."""

    def __init__(self, function: Callable[..., Any], calls: PreparedCalls) -> None:
        """Registers ``tilescout::NAME`` and ``tilescout::NAME_out``."""
        self._function = inspect.unwrap(function)
        name = function.__name__
        new = _FORWARD.format(", ScalarType out_dtype")
        self._new = define_operator(
            f"{name}{new} -> (Tensor, Tensor)", self._function, self._fake, calls
        )
        into = _FORWARD.format(", Tensor(a!) out, Tensor(b!) lse")
        self._into = define_operator(
            f"{name}_out{into} -> ()", self._run_into, lambda *_, **__: None, calls
        )

    def __call__(
        self,
        *tensors: torch.Tensor,
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
        out_dtype: torch.dtype,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Calls the operator that fits; arguments and result are those of the function."""
        if out is None and lse is None:
            made: tuple[torch.Tensor, torch.Tensor] = self._new(
                *tensors, **options, out_dtype=out_dtype
            )
            return made
        spare_out, spare_lse = self._fake(*tensors, out_dtype=out_dtype)
        out = spare_out if out is None else out
        lse = spare_lse if lse is None else lse
        self._into(*tensors, **options, out=out, lse=lse)
        return out, lse

    def _run_into(self, *tensors: torch.Tensor, **options: Any) -> None:
        self._function(*tensors, **options)

    @staticmethod
    def _fake(
        q_fp4: torch.Tensor, *_: torch.Tensor, out_dtype: torch.dtype, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, half = q_fp4.shape[:3], q_fp4.shape[3]
        return (
            q_fp4.new_empty((*rows, 2 * half), dtype=out_dtype),
            q_fp4.new_empty(rows, dtype=torch.float32),
        )
