"""From saved operands of FP4 attention to the backward's launch: problem, look-up, launcher."""

from __future__ import annotations

from functools import lru_cache

from ..errors import UnsupportedError
from ..kernels.base import Launcher
from ..kernels.fp4_attention_bwd import (
    Fp4AttentionBwdInputs,
    Fp4AttentionBwdOutputs,
    Fp4AttentionBwdProblem,
)
from ..kernels.registry import template
from ..tuner.dispatch import LookupResult, current_snapshot
from .launchers import LauncherCache
from .on_device import device_spec, dtype_name, on_device

__all__ = ["launch_backward"]

_launchers = LauncherCache()


def launch_backward(
    function: str,
    inputs: Fp4AttentionBwdInputs,
    outputs: Fp4AttentionBwdOutputs,
    *,
    products: str,
    is_causal: bool,
) -> None:
    """Looks the config up and enqueues its kernels on the current stream.

    Args:
        function: Whose call it is.
        inputs: What was saved, and the gradient of the output.
        outputs: What to write.
        products: ``native`` or ``emulated``.
        is_causal: As in the forward.

    Raises:
        UsageError: a CUDA graph is being captured and nothing was built yet.
        UnsupportedError: no template serves the problem on this GPU, or not these tensors.
        StoreError: a database cannot be read.
    """
    device = inputs.device
    batch, num_qo_heads, query_len, head_dim = inputs.out.shape
    problem = _problem(
        batch=batch,
        num_qo_heads=num_qo_heads,
        num_kv_heads=inputs.k.codes.shape[1],
        query_len=query_len,
        kv_len=inputs.k.codes.shape[2],
        head_dim=head_dim,
        products=products,
        is_causal=is_causal,
        dtype=dtype_name(inputs.out.dtype),
    )
    result = current_snapshot().lookup(problem, device_spec(device, function))
    reason = template(problem.op, result.template).supports_tensors(problem, inputs, outputs)
    if reason is not None:
        raise UnsupportedError(f"{function} with template {result.template!r}: {reason}")
    rows = (inputs.out, inputs.grad_out, outputs.dq, outputs.dk, outputs.dv)
    # Strides and alignment say which binary is launched: none may be compiled in a capture.
    layout = tuple((x.stride(), x.data_ptr() % 16) for x in rows)
    with on_device(device):
        owned = _launchers.get(
            (result.config, problem, device.index, layout),
            device,
            lambda: _build(result, problem, inputs),
        )
        with owned.lock:
            owned.launcher.launch(inputs, outputs)


@lru_cache(maxsize=4096)
def _problem(**values: int | str | bool) -> Fp4AttentionBwdProblem:
    return Fp4AttentionBwdProblem.from_dict(values)


def _build(
    result: LookupResult, problem: Fp4AttentionBwdProblem, inputs: Fp4AttentionBwdInputs
) -> Launcher:
    return template(problem.op, result.template).build(problem, result.config, inputs)
