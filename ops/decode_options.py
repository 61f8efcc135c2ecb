"""What a paged-decode call says beside its tensors of tokens: one typed value, checked."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal, TypedDict

import torch

from ..errors import UsageError
from ..kernels.paged_decode.inputs import Rope
from .checks import check_flags, check_shape, finite_number, refuse_grad, wrong

__all__ = ["DecodeOptions", "LseBase", "Scale", "semantics_of"]

LseBase = Literal["2", "e"]
Scale = float | torch.Tensor
"""A number, or fp32 of one element on the device."""
_NO_WINDOW_FROM = 1 << 30
"""A window of as many tokens is none: no sequence is longer, and positions are 32 bits."""


class DecodeOptions(TypedDict, total=False):
    """The semantics that ``paged_decode`` takes by keyword; its docstring says what they mean."""

    sm_scale: float | None
    q_scale: float
    k_scale: Scale
    v_scale: Scale
    is_causal: bool
    window_left: int
    soft_cap: float | None
    sinks: torch.Tensor | None
    alibi_slopes: torch.Tensor | None
    rope: Rope | None


@dataclass(frozen=True)
class _Checker:
    """Checks values of one call."""

    function: str
    q: torch.Tensor

    def number(self, name: str, value: Any) -> float:
        """A finite number. A tensor is refused: reading it would wait for the device."""
        return finite_number(self.function, name, value)

    def scale(self, name: str, value: Any) -> Scale:
        """A finite number, or fp32 of one element where q lies."""
        if not isinstance(value, torch.Tensor):
            return self.number(name, value)
        if value.numel() != 1 or value.dtype != torch.float32:
            what = (value.dtype, tuple(value.shape))
            raise wrong(self.function, name, what, "a number, or torch.float32 of one element")
        refuse_grad(self.function, value)
        self._is_here(name, value)
        return value

    def per_head(self, name: str, values: torch.Tensor | None) -> torch.Tensor | None:
        """fp32, one value a query head, contiguous."""
        if values is None:
            return None
        check_shape(self.function, name, values, (self.q.shape[1],))
        if values.dtype != torch.float32:
            allowed = "torch.float32: call .float() once, when the model is loaded"
            raise wrong(self.function, f"dtype of {name}", values.dtype, allowed)
        if not values.is_contiguous():
            raise wrong(
                self.function, f"stride of {name}", values.stride(), "(1,): call .contiguous()"
            )
        refuse_grad(self.function, values)
        self._is_here(name, values)
        return values

    def flag(self, name: str, value: Any) -> bool:
        """A truth value: a word or None would count as one, too."""
        check_flags(self.function, **{name: value})
        return bool(value)

    def window(self, value: Any) -> int:
        """Tokens before the query's own, -1 for all."""
        is_number = isinstance(value, Integral) and not isinstance(value, bool)
        if not is_number or not -1 <= value < 2**31:
            raise UsageError(
                f"window_left={value!r} of {self.function} must be -1 (no window) or the number of "
                "tokens that are seen before the query's own"
            )
        return int(value) if value < _NO_WINDOW_FROM else -1

    def _is_here(self, name: str, tensor: torch.Tensor) -> None:
        if tensor.device != self.q.device:
            allowed = f"that of q, {str(self.q.device)!r}"
            raise wrong(self.function, f"device of {name}", str(tensor.device), allowed)


def semantics_of(
    function: str, q: torch.Tensor, query_len: int, options: DecodeOptions
) -> dict[str, Any]:
    """The options as fields of ``PagedDecodeInputs``.

    Raises:
        UsageError: there is no such option, a value is out of range, or two exclude each other.
    """
    unknown = options.keys() - DecodeOptions.__annotations__.keys()
    if unknown:
        listing = ", ".join(DecodeOptions.__annotations__)
        raise UsageError(f"{function} has no option {min(unknown)!r}: it takes {listing}")
    check = _Checker(function, q)
    head_dim = q.shape[2]
    given = options.get("sm_scale")
    sm_scale = head_dim**-0.5 if given is None else check.number("sm_scale", given)
    cap = options.get("soft_cap")
    soft_cap = 0.0 if cap is None else check.number("soft_cap", cap)
    if soft_cap < 0.0:
        raise UsageError(
            f"soft_cap={soft_cap!r} of {function} must be above 0, or None (or 0) for none"
        )
    alibi_slopes = check.per_head("alibi_slopes", options.get("alibi_slopes"))
    if soft_cap and alibi_slopes is not None:
        raise UsageError(
            f"soft_cap and alibi_slopes of {function} exclude each other: kernels disagree on "
            "which comes first, and no model has both"
        )
    is_causal = check.flag("is_causal", options.get("is_causal", True))
    rope = options.get("rope")
    if rope is not None:
        _check_rope(check, rope, head_dim)
    return {
        "sm_scale": sm_scale * check.number("q_scale", options.get("q_scale", 1.0)),
        **_scales(check, options.get("k_scale", 1.0), options.get("v_scale", 1.0)),
        # One query token is the last token: nothing comes after it, and one winner serves both.
        "is_causal": query_len == 1 or is_causal,
        "window_left": check.window(options.get("window_left", -1)),
        "soft_cap": soft_cap,
        "sinks": check.per_head("sinks", options.get("sinks")),
        "alibi_slopes": alibi_slopes,
        "rope": rope,
    }


def _scales(check: _Checker, k_scale: Scale, v_scale: Scale) -> dict[str, Scale]:
    """Both as numbers, or both as tensors; filling one takes a launch but never waits."""
    scales = {
        "k_scale": check.scale("k_scale", k_scale),
        "v_scale": check.scale("v_scale", v_scale),
    }
    if any(isinstance(value, torch.Tensor) for value in scales.values()):
        for name, value in scales.items():
            if not isinstance(value, torch.Tensor):
                scales[name] = check.q.new_full((1,), value, dtype=torch.float32)
    return scales


def _check_rope(check: _Checker, rope: Rope, head_dim: int) -> None:
    function = check.function
    if not isinstance(rope, Rope):
        raise UsageError(f"rope={rope!r} of {function} must be a Rope(theta=..., scale=...)")
    for name, value in (("theta", rope.theta), ("scale", rope.scale)):
        if check.number(f"rope {name}", value) <= 0.0:
            raise UsageError(f"rope {name}={value!r} of {function} must be above 0 and finite")
    if head_dim % 2:
        raise UsageError(f"rope of {function} needs an even head_dim, not {head_dim}")
