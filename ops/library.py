"""Registers public functions with ``torch.library``, so that ``torch.compile`` traces through.

A call on plain tensors outside a trace never comes here: the dispatcher costs microseconds. Under
a trace the function calls its operator, whose implementation is the function itself on real
tensors. An operator called outside a trace passes the dispatcher where the call is not prepared.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..kernels.paged_decode.inputs import Rope
from .operator_shortcut import shorten
from .prepared import PreparedCalls

__all__ = ["NAMESPACE", "TracedFunction", "define_operator", "is_traced"]

NAMESPACE = "tilescout"

_torch_library: Any = torch.library  # torch leaves these calls untyped
_library = _torch_library.Library(NAMESPACE, "FRAGMENT")
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_TENSOR_SUFFIX = "_tensor"


def is_traced(*tensors: object) -> bool:
    """Whether a trace runs, or one of the tensors has no memory (a fake or functional one)."""
    if torch.compiler.is_compiling():
        return True
    return any(isinstance(x, torch.Tensor) and type(x) not in _PLAIN for x in tensors)


def define_operator(
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    calls: PreparedCalls | None = None,
) -> Any:
    """The operator of a schema: ``run`` on real tensors, ``fake`` for shapes.

    Args:
        schema: As ``torch.library.Library.define`` takes it.
        run: Runs on CUDA and, in the interpreter, on the CPU.
        fake: Gives the outputs without their values.
        calls: Of the public function that ``run`` spells anew, if its calls are prepared.
    """
    name = schema.partition("(")[0]
    # Inductor must not choose strides: kernels and winners are for those of the caller.
    _library.define(schema, tags=(torch.Tag.needs_exact_strides,))
    operator = getattr(getattr(torch.ops, NAMESPACE), name).default
    prepared = None
    if calls is not None:
        prepared = calls.operator(run, [known.name for known in operator._schema.arguments])
        run = prepared.run
    for key in ("CUDA", "CPU"):
        _library.impl(name, run, key)
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
    if prepared is not None:
        shorten(operator, prepared)
    return operator


class TracedFunction:
    """A function as an operator that allocates what it returns, and one that writes into outputs.

    The operators are ``tilescout::NAME`` and ``tilescout::NAME_out``. What a schema cannot say is
    spelt out: a tensor or a sequence of tensors is a list, a number or a tensor is two arguments
    (``NAME`` and ``NAME_tensor``), a ``Rope`` two numbers.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        parameters: str,
        allocate: Callable[[Mapping[str, Any]], tuple[torch.Tensor, torch.Tensor]],
        *,
        lists: Sequence[str],
        scales: Sequence[str],
        name: str | None = None,
        calls: PreparedCalls | None = None,
    ) -> None:
        """Registers both.

        Args:
            function: Takes its arguments by name, and ``out``, ``lse`` and ``return_lse``.
            parameters: Schema of its arguments but these three.
            allocate: Outputs for arguments as the schema has them: ``(out, lse)``.
            lists: Arguments that are a tensor or a sequence of tensors, or None.
            scales: Arguments that are a number or a tensor.
            name: Of the operator; None: that of the function.
            calls: As ``define_operator`` takes it.
        """
        self._function = inspect.unwrap(function)  # what is prepared is the operator's own call
        self._allocate = allocate
        self._lists, self._scales = tuple(lists), tuple(scales)
        self._respelt = frozenset(
            (*self._lists, *(name + _TENSOR_SUFFIX for name in self._scales), "rope")
        )
        name = name or function.__name__
        new = f"{name}({parameters}, bool return_lse=False) -> (Tensor, Tensor)"
        into = f"{name}_out({parameters}, Tensor(a!) out, Tensor(b!)? lse=None) -> ()"
        self._new = define_operator(new, self._run_new, self._fake_new, calls)
        self._into = define_operator(into, self._run_into, lambda *args, **kwargs: None, calls)

    def __call__(self, **arguments: Any) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Calls the operator that fits; arguments and result are those of the function."""
        out, lse = arguments.pop("out"), arguments.pop("lse")
        return_lse = arguments.pop("return_lse")
        spelt = self._spell(arguments)
        if out is None and lse is None:
            new: tuple[torch.Tensor, torch.Tensor] = self._new(**spelt, return_lse=return_lse)
            return new if return_lse else new[0]
        wants_lse = return_lse or lse is not None
        spare_out, spare_lse = self._allocate(spelt)
        out = spare_out if out is None else out
        lse = spare_lse if lse is None and wants_lse else lse
        self._into(**spelt, out=out, lse=lse)
        result: torch.Tensor = out
        return result if lse is None else (result, lse)

    def _spell(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        spelt = dict(arguments)
        for name in self._lists:
            value = spelt[name]
            if value is not None:
                spelt[name] = [value] if isinstance(value, torch.Tensor) else list(value)
        for name in self._scales:
            if isinstance(spelt[name], torch.Tensor):
                spelt[name + _TENSOR_SUFFIX] = spelt[name]
                spelt[name] = 1.0
        if spelt.get("rope") is not None:
            spelt["rope"] = [spelt["rope"].theta, spelt["rope"].scale]
        return spelt

    def _unspell(self, spelt: dict[str, Any]) -> dict[str, Any]:
        """Keyword arguments of the operator as those of the function; changes the dictionary.

        The dispatcher leaves defaults out, so that mostly there is nothing to do.
        """
        if self._respelt.isdisjoint(spelt):
            return spelt
        for name in self._lists:
            given = spelt.get(name)
            if given is not None:
                spelt[name] = _one_or_all(given)
        for name in self._scales:
            tensor = spelt.pop(name + _TENSOR_SUFFIX, None)
            if tensor is not None:
                spelt[name] = tensor
        if spelt.get("rope") is not None:
            spelt["rope"] = Rope(*spelt["rope"])
        return spelt

    def _run_new(self, q: Any, kv_cache: Any, *table: Any, **spelt: Any) -> Any:
        arguments = self._unspell(spelt)
        result = self._function(_one_or_all(q), _one_or_all(kv_cache), *table, **arguments)
        if spelt.get("return_lse"):
            return result
        return result, result.new_empty(0, dtype=torch.float32)

    def _fake_new(self, q: Any, kv_cache: Any, *table: Any, **spelt: Any) -> Any:
        del table
        out, lse = self._allocate({"q": q, "kv_cache": kv_cache, **spelt})
        return (out, lse) if spelt.get("return_lse") else (out, lse.new_empty(0))

    def _run_into(self, q: Any, kv_cache: Any, *table: Any, **spelt: Any) -> None:
        arguments = self._unspell(spelt)
        self._function(_one_or_all(q), _one_or_all(kv_cache), *table, **arguments)


def _one_or_all(values: Sequence[torch.Tensor]) -> torch.Tensor | Sequence[torch.Tensor]:
    if type(values) not in (list, tuple):
        raise TypeError(f"{type(values).__name__} in the place of a list")  # for the dispatcher
    return values[0] if len(values) == 1 else values
