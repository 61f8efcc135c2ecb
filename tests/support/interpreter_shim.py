"""Makes Triton's interpreter compute bfloat16 and float8 as the hardware does.

Seen in Triton 3.6 to 3.9: a conversion from fp32 to bf16 or e5m2 truncates, one to e4m3 drops the
mantissa carry and does not saturate, and ``tl.dot`` on bf16 operands multiplies raw bit patterns.
``install`` replaces these three; ``test_interpreter_shim`` shows each trap and its cure, so that
the shim goes when Triton has mended them. To be installed before a kernel is launched.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

original_convert = interpreter._convert_float
original_dot = interpreter.InterpreterBuilder.create_dot

_FLOAT8 = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}


def _bfloat16_to_float32(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _as_float32(handle: Any) -> np.ndarray:
    if handle.dtype.scalar == tl.bfloat16:
        return _bfloat16_to_float32(handle.data)
    return handle.data.astype(np.float32)


def _convert(data: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
    if source != tl.float32 or target not in (tl.bfloat16, *_FLOAT8):
        return original_convert(data, source, target, rounding)
    values = np.ascontiguousarray(data)
    values = values if values.dtype == np.float32 else values.view(np.float32)
    tensor = torch.from_numpy(values.copy())
    if target == tl.bfloat16:
        converted = tensor.bfloat16().view(torch.int16).numpy().view(np.uint16)
    else:
        largest = torch.finfo(_FLOAT8[target]).max
        saturated = torch.where(tensor.isnan(), tensor, tensor.clamp(-largest, largest))
        converted = saturated.to(_FLOAT8[target]).view(torch.uint8).numpy()
    return converted.reshape(np.shape(data))


def _dot(builder: Any, a: Any, b: Any, acc: Any, precision: Any, max_imprecise: Any) -> Any:
    if tl.bfloat16 not in (a.dtype.scalar, b.dtype.scalar):
        return original_dot(builder, a, b, acc, precision, max_imprecise)
    product = np.matmul(_as_float32(a), _as_float32(b)).astype(acc.data.dtype)
    return interpreter.TensorHandle(product + acc.data, acc.dtype.scalar)


def install() -> None:
    """Puts the three replacements in place; calling it again does nothing."""
    interpreter._convert_float = _convert
    interpreter.InterpreterBuilder.create_dot = _dot


def uninstall() -> None:
    """Puts Triton's own functions back."""
    interpreter._convert_float = original_convert
    interpreter.InterpreterBuilder.create_dot = original_dot
