"""Which SKUs a run is for, and whether each is measured or predicted."""

from __future__ import annotations

import typing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ..errors import DeviceError, UsageError
from ..kernels.device import DeviceSpec
from . import catalog, environment
from .records import Provenance

__all__ = ["DEFAULT_SKUS", "Mode", "Target", "resolve_targets"]

Mode = Literal["auto", "measure", "predict"]

DEFAULT_SKUS = ("h200", "b200")
"""What is predicted where no SKU is named: one of each data-centre generation in wide use."""

_AT_HAND = "auto"
"""In the place of SKU names: the GPU at hand."""


@dataclass(frozen=True)
class Target:
    """A device and how its times come about."""

    device: DeviceSpec
    provenance: Provenance


def resolve_targets(gpus: Sequence[str] | None, mode: str) -> tuple[Target, ...]:
    """The targets of a run, in the order named and without repeats.

    Args:
        gpus: SKU names; None or ``auto`` for the GPU at hand, or ``DEFAULT_SKUS`` where there is
            none or ``mode`` is ``predict``.
        mode: ``measure`` and ``predict`` do that; ``auto`` measures the GPU at hand and predicts
            all others.

    Raises:
        UnknownNameError: no such SKU.
        UsageError: no such mode, no SKU at all, or one to be measured that is not at hand.
        DeviceError: ``measure`` without a GPU.
    """
    if mode not in typing.get_args(Mode):
        allowed = ", ".join(typing.get_args(Mode))
        raise UsageError(f"mode={mode!r} must be one of {allowed}")
    names = None if gpus is None or tuple(gpus) == (_AT_HAND,) else tuple(gpus)
    if names is not None and not names:
        raise UsageError(
            f"gpus names no SKU: give some of {', '.join(catalog.gpu_names())}, or leave it out"
        )
    named = {spec.sku: spec for spec in map(catalog.gpu, names or ())}
    at_hand = None if mode == "predict" else environment.current_device()
    if mode == "measure":
        return (Target(_must_be_at_hand(at_hand, named), Provenance.MEASURED),)
    if at_hand is not None and (not named or at_hand.sku in named):
        named[at_hand.sku] = at_hand  # the driver's own figures, in the place where it was named
    if not named:
        named = {sku: catalog.gpu(sku) for sku in DEFAULT_SKUS}
    return tuple(
        Target(spec, Provenance.MEASURED if spec is at_hand else Provenance.PREDICTED)
        for spec in named.values()
    )


def _must_be_at_hand(at_hand: DeviceSpec | None, named: dict[str, DeviceSpec]) -> DeviceSpec:
    if at_hand is None:
        reason = environment.describe()["reason"]
        raise DeviceError(
            f"mode 'measure' needs an NVIDIA GPU and there is none to use: {reason}; run it on a "
            "machine with one, or take mode 'predict' to rank configs without a GPU"
        )
    others = [sku for sku in named if sku != at_hand.sku]
    if others:
        raise UsageError(
            f"gpus={','.join(others)} cannot be measured: the GPU at hand is {at_hand.sku}; leave "
            "them out, or take mode 'auto', which predicts for other SKUs"
        )
    return at_hand
