"""From quantised operands of FP4 attention to a launch: the problem, the look-up, the launcher."""

from __future__ import annotations

from functools import lru_cache

import torch

from ..errors import UnsupportedError, UsageError
from ..kernels.base import Launcher
from ..kernels.fp4_attention import (
    Fp4AttentionFwdInputs,
    Fp4AttentionFwdOutputs,
    Fp4AttentionFwdProblem,
)
from ..kernels.registry import template
from ..tuner import dispatch
from ..tuner.dispatch import LookupResult, current_snapshot
from .launched_call import LaunchedCall
from .launchers import LauncherCache
from .on_device import device_spec, dtype_name, on_device

__all__ = ["PRODUCTS_ALLOWED", "launch", "resolve_products"]

PRODUCTS_ALLOWED = ("auto", "native", "emulated")
_FP4_TENSOR_CORE_MAJORS = (10, 12)

_launchers = LauncherCache()
_UNIT_SCALES = frozenset(
    ("inputs.v_scale", *(f"inputs.{name}.tensor_scale" for name in ("q", "k", "v")))
)
"""Ones, where a function takes no tensor scales."""


def resolve_products(function: str, products: str, device: torch.device) -> str:
    """``native`` or ``emulated``; ``auto`` is native where there are FP4 tensor cores.

    Raises:
        UsageError: an unknown word, or native products in Triton's interpreter, which gets them
            wrong without saying so.
    """
    if products not in PRODUCTS_ALLOWED:
        allowed = ", ".join(PRODUCTS_ALLOWED)
        raise UsageError(f"products={products!r} of {function}: one of {allowed}")
    spec = device_spec(device, function)
    if device.type == "cpu":
        if products == "native":
            raise UsageError(
                f"products='native' of {function} under TRITON_INTERPRET=1: the interpreter reads "
                "block scales wrongly; use products='emulated', which gives the same codes"
            )
        return "emulated"
    if products != "auto":
        return products
    has_fp4 = spec.compute_capability[0] in _FP4_TENSOR_CORE_MAJORS
    return "native" if has_fp4 else "emulated"


def launch(
    function: str,
    inputs: Fp4AttentionFwdInputs,
    outputs: Fp4AttentionFwdOutputs,
    **choices: str | bool,
) -> LaunchedCall:
    """Looks the config up and enqueues its kernels on the current stream.

    Args:
        function: Whose call it is.
        inputs: Quantised operands.
        outputs: What to write.
        **choices: Fields of the problem that shapes do not tell.

    Raises:
        UsageError: a CUDA graph is being captured and nothing was built yet.
        UnsupportedError: no template serves the problem on this GPU, or not these tensors.
        StoreError: a database cannot be read.
    """
    out, device, generation = outputs.out, inputs.device, dispatch.generation
    batch, num_qo_heads, query_len, head_dim = out.shape
    problem = _problem(
        batch=batch,
        num_qo_heads=num_qo_heads,
        num_kv_heads=inputs.k.codes.shape[1],
        query_len=query_len,
        kv_len=inputs.k.codes.shape[2],
        head_dim=head_dim,
        out_dtype=dtype_name(out.dtype),
        **choices,
    )
    lookups = _lookups(function, problem, inputs, outputs)
    result = lookups[-1]
    key = (
        *(result.config, problem, device.index, outputs.lse is not None),
        *(out.stride(), out.data_ptr() % 16),
    )
    with on_device(device):
        owned = _launchers.get(key, device, lambda: _build(result, problem, inputs))
        with owned.lock:
            owned.launcher.launch(inputs, outputs)
    return LaunchedCall(inputs, outputs, owned, lookups, generation, _UNIT_SCALES)


def _lookups(
    function: str,
    problem: Fp4AttentionFwdProblem,
    inputs: Fp4AttentionFwdInputs,
    outputs: Fp4AttentionFwdOutputs,
) -> tuple[LookupResult, ...]:
    """The last one is that of the best template that serves these tensors."""
    spec = device_spec(inputs.device, function)
    made: list[LookupResult] = []
    refused: dict[str, str] = {}
    while True:
        try:
            result = current_snapshot().lookup(problem, spec, without=frozenset(refused))
        except UnsupportedError as error:
            if not refused:
                raise
            reasons = "; ".join(f"template {name!r}: {why}" for name, why in refused.items())
            raise UnsupportedError(f"{function} with {reasons}") from error
        made.append(result)
        reason = template(problem.op, result.template).supports_tensors(problem, inputs, outputs)
        if reason is None:
            return tuple(made)
        refused[result.template] = reason


@lru_cache(maxsize=4096)
def _problem(**values: int | str | bool) -> Fp4AttentionFwdProblem:
    return Fp4AttentionFwdProblem.from_dict(values)


def _build(
    result: LookupResult, problem: Fp4AttentionFwdProblem, inputs: Fp4AttentionFwdInputs
) -> Launcher:
    return template(problem.op, result.template).build(problem, result.config, inputs)
