"""Gated-delta-net decode: problem, reference, template. Names resolve as in ``paged_decode``."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..base import KernelTemplate, Operation
from .problem import GdnDecodeProblem

if TYPE_CHECKING:
    from .reference import GdnDecodeInputs, GdnDecodeOutputs

__all__ = ["OPERATION", "GdnDecodeInputs", "GdnDecodeOutputs", "GdnDecodeProblem"]

_TEMPLATES = {"triton": ("triton_template", "GdnDecodeTriton")}


def _load_template(name: str) -> KernelTemplate:
    module, class_name = _TEMPLATES[name]
    loaded = getattr(import_module(f".{module}", __package__), class_name)()
    assert isinstance(loaded, KernelTemplate)
    return loaded


def _from_reference(name: str) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(import_module(".reference", __package__), name)(*args, **kwargs)

    return call


OPERATION = Operation(
    name="gdn_decode",
    problem_type=GdnDecodeProblem,
    template_names=tuple(_TEMPLATES),
    load_template=_load_template,
    make_inputs=_from_reference("make_inputs"),
    make_validation_inputs=_from_reference("make_validation_inputs"),
    make_outputs=_from_reference("make_outputs"),
    compare=_from_reference("compare"),
    outputs_equal=_from_reference("outputs_equal"),
)


def __getattr__(name: str) -> Any:
    if name in ("GdnDecodeInputs", "GdnDecodeOutputs"):
        return getattr(import_module(".reference", __package__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
