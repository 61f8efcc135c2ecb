"""What the functions of gated delta net ask of their tensors; shapes are read, never values."""

from __future__ import annotations

import torch

from ..errors import UnsupportedError, UsageError
from ..kernels.gdn_decode.problem import DTYPE_BYTES
from .checks import check_flags, check_index, check_shape, check_tensor, finite_number, wrong
from .on_device import dtype_name

__all__ = [
    "check_options",
    "check_tokens",
    "gate_inputs",
    "num_sequences",
    "query_factor",
    "refuse_arguments",
]


def refuse_arguments(function: str, **arguments: object) -> None:
    """Raises UnsupportedError where one of the arguments is given.

    An argument that is only accepted and ignored would hide that the result differs.
    """
    given = [name for name, value in arguments.items() if value is not None]
    if given:
        raise UnsupportedError(
            f"{function} does not support {', '.join(given)}: leave it out, or use FLA's function"
        )


def check_tokens(function: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Raises UsageError unless q, k and v are of one dtype, device and number of tokens."""
    for name, tensor in (("q", q), ("v", v)):
        check_tensor(function, name, tensor)
    if q.dim() != 4:
        raise wrong(function, "shape of q", tuple(q.shape), "[B, T, H, K]")
    check_shape(function, "k", k, tuple(q.shape))
    if v.dim() != 4 or v.shape[:2] != q.shape[:2] or v.shape[2] % q.shape[2]:
        allowed = f"[{q.shape[0]}, {q.shape[1]}, HV, V] with HV a multiple of H={q.shape[2]}"
        raise wrong(function, "shape of v", tuple(v.shape), allowed)
    if dtype_name(q.dtype) not in DTYPE_BYTES:
        raise wrong(function, "dtype of q", q.dtype, "bf16, fp16 or fp32")
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dtype != q.dtype:
            raise wrong(function, f"dtype of {name}", tensor.dtype, f"that of q, {q.dtype}")
        if tensor.device != q.device:
            raise wrong(function, f"device of {name}", str(tensor.device), f"{q.device}")
        if not _is_token_major(tensor):
            allowed = "contiguous in the last axis and over batch and time: call .contiguous()"
            raise wrong(function, f"stride of {name}", tensor.stride(), allowed)


def _is_token_major(tensor: torch.Tensor) -> bool:
    """Whether token t of sequence b lies ``(b * T + t) * stride(1)`` from the start."""
    batch, num_steps = tensor.shape[:2]
    spans = batch <= 1 or num_steps == 0 or tensor.stride(0) == num_steps * tensor.stride(1)
    return tensor.stride(-1) == 1 and spans


def check_options(
    function: str, *, allow_neg_eigval: bool, use_beta_sigmoid_in_kernel: bool, **flags: bool
) -> None:
    """Raises UsageError unless all are bools that go together.

    Eigenvalues below 0 are refused where beta is not computed in the kernel, which doubles it.
    """
    check_flags(
        function,
        allow_neg_eigval=allow_neg_eigval,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        **flags,
    )
    if allow_neg_eigval and not use_beta_sigmoid_in_kernel:
        raise UsageError(
            f"allow_neg_eigval=True of {function} needs use_beta_sigmoid_in_kernel=True: without "
            "it, pass 2 * beta"
        )


def query_factor(function: str, scale: float | None, head_dim_k: int) -> float:
    """The factor of q; raises UsageError unless it is a finite number."""
    return head_dim_k**-0.5 if scale is None else finite_number(function, "scale", scale)


def num_sequences(function: str, q: torch.Tensor, cu_seqlens: torch.Tensor | None) -> int:
    """Sequences of a dense batch or of a packed one.

    Raises:
        UsageError: ``cu_seqlens`` does not suit q.
    """
    if cu_seqlens is None:
        return q.shape[0]
    check_tensor(function, "cu_seqlens", cu_seqlens)
    if q.shape[0] != 1:
        raise wrong(function, "batch of q", q.shape[0], "1 where cu_seqlens is given")
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 1:
        raise wrong(function, "shape of cu_seqlens", tuple(cu_seqlens.shape), "[N + 1]")
    check_index(function, "cu_seqlens", cu_seqlens, q.device)
    return cu_seqlens.numel() - 1


def gate_inputs(
    function: str,
    v: torch.Tensor,
    *,
    g: torch.Tensor | None,
    beta: torch.Tensor | None,
    a_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    is_fused: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """(gate, beta, A_log, dt_bias) as the kernels read them."""
    tokens = tuple(v.shape[:3])
    if g is None and is_fused:
        raise UsageError(f"use_gate_in_kernel=True of {function} needs g, the raw projection")
    g = v.new_zeros(tokens, dtype=torch.float32) if g is None else g
    beta = v.new_ones(tokens, dtype=torch.float32) if beta is None else beta
    for name, tensor in (("g", g), ("beta", beta)):
        check_shape(function, name, tensor, tokens)
        if dtype_name(tensor.dtype) not in DTYPE_BYTES:
            raise wrong(function, f"dtype of {name}", tensor.dtype, "fp32, bf16 or fp16")
        if tensor.device != v.device:
            raise wrong(function, f"device of {name}", str(tensor.device), str(v.device))
    if not is_fused:
        if dt_bias is not None:
            raise UsageError(
                f"dt_bias of {function} belongs to the gate that the kernel computes: give A_log "
                "too, or leave dt_bias out"
            )
        return g.contiguous(), beta.contiguous(), None, None
    if a_log is None:
        raise UsageError(f"use_gate_in_kernel=True of {function} needs A_log of shape [HV]")
    check_shape(function, "A_log", a_log, (v.shape[2],))
    dt_bias = torch.zeros_like(a_log) if dt_bias is None else dt_bias
    check_shape(function, "dt_bias", dt_bias, (v.shape[2],))
    return g.contiguous(), beta.contiguous(), a_log.float(), dt_bias.float()
