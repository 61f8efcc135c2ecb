"""Makes the interpreter of Triton compute ``tl.dot_scaled`` and fp8 products as hardware does.

On top of ``interpreter_shim``. Seen in Triton 3.6 to 3.9: block scales of type e4m3 are read as
e8m0 (3.8, 3.9), or there is no method at all and formats must be constexprs (3.6, 3.7); fp8
operands of ``tl.dot`` go through fp16 products. ``test_fp4_interpreter_shim`` shows the trap and
the cure.
"""

from __future__ import annotations

from typing import Any

import interpreter_shim
import numpy as np
import torch
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

original_dot_scaled = getattr(interpreter.InterpreterBuilder, "create_dot_scaled", None)
original_semantic = TritonSemantic.dot_scaled

_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_E2M1 = np.concatenate([_E2M1, -_E2M1])
_FLOAT8 = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}


def _decoded(handle: Any) -> np.ndarray:
    """fp32 values of a handle of any dtype."""
    dtype = handle.dtype.scalar
    if dtype in _FLOAT8:
        raw = torch.from_numpy(np.ascontiguousarray(handle.data.view(np.uint8)))
        return raw.view(_FLOAT8[dtype]).float().numpy()
    return interpreter_shim._as_float32(handle)


def _scales(handle: Any) -> np.ndarray:
    if handle.dtype.scalar == tl.float8e4nv:
        return _decoded(handle)
    raw = handle.data.view(np.uint8).astype(np.int32)
    powers = np.exp2((raw - 127).astype(np.float64)).astype(np.float32)
    return np.where(raw == 255, np.float32("nan"), powers)


def _operand(handle: Any, scale: Any, element_type: Any, is_rhs: bool) -> np.ndarray:
    """fp32 ``[M, K]``, or ``[K, N]`` on the right; packed along K."""
    if element_type == interpreter._ir.ScaleDotElemTypeTY.E2M1:
        packed = np.moveaxis(handle.data.view(np.uint8), 0, -1) if is_rhs else handle.data
        packed = packed.view(np.uint8)
        values = _E2M1[np.stack([packed & 15, packed >> 4], -1)].reshape(packed.shape[0], -1)
    else:
        values = _decoded(handle)
        values = values.T if is_rhs else values
    if scale is not None:
        factors = _scales(scale)
        values = values * np.repeat(factors, values.shape[1] // factors.shape[1], 1)
    return values.T if is_rhs else values


def _create_dot_scaled(
    builder: Any, a: Any, sa: Any, ta: Any, b: Any, sb: Any, tb: Any, *rest: Any
) -> Any:
    _, a_k_pack, b_k_pack, acc = rest
    assert a_k_pack
    assert b_k_pack
    product = np.matmul(_operand(a, sa, ta, False), _operand(b, sb, tb, True))
    return interpreter.TensorHandle(product + acc.data, tl.float32)


def _dot_scaled(
    self: Any, lhs: Any, ls: Any, lf: Any, rhs: Any, rs: Any, rf: Any, *rest: Any
) -> Any:
    """Triton 3.6 and 3.7 want format names as constexprs, later ones as text."""
    try:
        formats = [tl.constexpr(f) if isinstance(f, str) else f for f in (lf, rf)]
        return original_semantic(self, lhs, ls, formats[0], rhs, rs, formats[1], *rest)
    except AttributeError:
        return original_semantic(self, lhs, ls, lf, rhs, rs, rf, *rest)


def _dot(builder: Any, a: Any, b: Any, acc: Any, precision: Any, max_imprecise: Any) -> Any:
    if not {a.dtype.scalar, b.dtype.scalar} & set(_FLOAT8):
        return interpreter_shim._dot(builder, a, b, acc, precision, max_imprecise)
    product = np.matmul(_decoded(a), _decoded(b)).astype(acc.data.dtype)
    return interpreter.TensorHandle(product + acc.data, acc.dtype.scalar)


def install() -> None:
    """Puts all replacements in place, those of ``interpreter_shim`` too."""
    interpreter_shim.install()
    interpreter.InterpreterBuilder.create_dot = _dot
    interpreter.InterpreterBuilder.create_dot_scaled = _create_dot_scaled
    TritonSemantic.dot_scaled = _dot_scaled


def uninstall() -> None:
    """Puts Triton's own functions back."""
    interpreter_shim.uninstall()
    TritonSemantic.dot_scaled = original_semantic
    if original_dot_scaled is None:
        del interpreter.InterpreterBuilder.create_dot_scaled
    else:
        interpreter.InterpreterBuilder.create_dot_scaled = original_dot_scaled
