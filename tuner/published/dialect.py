"""How published tables write the problems of one operation, read from ``configs/published``.

A problem that a table cannot express exactly, or ours cannot, is refused with the reason: a time
for nearly the same problem is no baseline.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Any

from ...errors import UsageError
from ...kernels.base import Problem
from ...kernels.registry import operation, operation_names

__all__ = ["Dialect", "Named", "dialect", "dialects"]

_SHAPE_COLUMN = "shape"


@dataclass(frozen=True)
class Named:
    """Another library's function as we name it, and what its name says of the problem."""

    library: str
    variant: str = ""
    fields: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Dialect:
    """The spelling of one operation's problems."""

    op: str
    names: Mapping[str, str | Sequence[str]]
    """Name in a table -> field of the problem, or several fields of one value."""
    words: Mapping[str, Mapping[str, object]]
    """Words that stand alone -> the fields that they say."""
    values: Mapping[str, Mapping[str, object]]
    """By field: a table's value -> ours."""
    refused: Mapping[str, Mapping[str, str]]
    """By field: a table's value -> why no problem of ours has it."""
    constants: Mapping[str, object]
    libraries: Mapping[str, Mapping[str, Any]]
    lengths: Mapping[str, Any]
    """How lists of sequence lengths become fields; empty where there are none."""

    def named(self, text: str) -> Named:
        """The library that a table calls ``text``: ``library:variant``, or as the file says."""
        library, _, variant = text.partition(":")
        known = self.libraries.get(text, {})
        return Named(library, known.get("variant", variant), known.get("fields", {}))

    def problem(self, columns: Mapping[str, str], named: Named) -> Problem:
        """The problem of a row.

        Args:
            columns: the columns that describe the shape, by name: one called ``shape`` holds
                ``name=value`` pairs and words, any other is a name with its value.
            named: the row's library.

        Raises:
            UsageError: something in the row that no problem of ours has, with the reason.
        """
        said: dict[str, str] = {}
        found: dict[str, object] = dict(self.constants)
        for name, text in columns.items():
            if name == _SHAPE_COLUMN:
                found |= self._read_words(text, said)
            elif text:
                said[name] = text
        for name, text in said.items():
            found |= self._read_value(name, text)
        problem = operation(self.op).problem_type.from_dict({**found, **named.fields})
        if self.lengths and self.lengths["name"] in said:
            self._check_lengths(problem, said[self.lengths["name"]])
        return problem

    def _read_words(self, text: str, said: dict[str, str]) -> dict[str, object]:
        """The fields of the words in ``text``; its pairs go into ``said``."""
        found: dict[str, object] = {}
        for word in sorted(self.words, key=len, reverse=True):
            shorter = re.sub(rf"(?<!\S){re.escape(word)}(?!\S)", " ", text)
            if shorter != text:
                found |= self.words[word]
                text = shorter
        for piece in re.split(r"\s+(?=\w+=)", text.strip()):
            name, sign, value = piece.partition("=")
            if not sign or not name.isidentifier():
                raise UsageError(f"{piece!r} says nothing of a {self.op} problem")
            said[name] = value.strip()
        return found

    def _read_value(self, name: str, text: str) -> dict[str, object]:
        if self.lengths and name == self.lengths["name"]:
            return self._read_lengths(text)
        if name not in self.names:
            raise UsageError(f"{name}={text!r} says nothing of a {self.op} problem")
        target = self.names[name]
        fields = [target] if isinstance(target, str) else list(target)
        for one in fields:
            reason = self.refused.get(one, {}).get(text)
            if reason is not None:
                raise UsageError(f"{name}={text!r}: {reason}")
        return {one: self.values.get(one, {}).get(text, text) for one in fields}

    def _read_lengths(self, text: str) -> dict[str, object]:
        """The fields that sequence lengths such as ``16384+16384`` or ``8192x4`` say."""
        numbers = _lengths(text)
        if not numbers:
            raise UsageError(f"{self.lengths['name']}={text!r}: the lengths are not given")
        said = {"count": len(numbers), "total": sum(numbers), "longest": max(numbers)}
        return {name: said[what] for name, what in self.lengths["fields"].items()}

    def _check_lengths(self, problem: Problem, text: str) -> None:
        """Refuses a problem that fits the sums but spreads or orders the tokens differently."""
        ours = list(getattr(problem, self.lengths["exact"]))
        if ours != _lengths(text):
            raise UsageError(
                f"{self.lengths['name']}={text!r}: our problem of {len(ours)} such sequences has "
                f"the lengths {'+'.join(map(str, ours))}"
            )


def _lengths(text: str) -> list[int]:
    """The numbers in ``8192+4096``, ``8192x4`` or ``1x32768``; nothing for other text."""
    spelled = [_repeated(part) for part in text.split("+")]
    return [number for part in spelled for number in part] if all(spelled) else []


def _repeated(text: str) -> list[int]:
    """``8192`` as itself, ``8192x4`` and ``4x8192`` as four of them; nothing for other text."""
    if not re.fullmatch(r"\d+(x\d+)?", text):
        return []
    numbers = sorted(map(int, text.split("x")))
    return numbers if len(numbers) == 1 else [numbers[1]] * numbers[0]


def dialect(op: str) -> Dialect:
    """How tables write problems of the operation.

    Raises:
        UsageError: the operation is none of ours, or no file says how its problems are written.
    """
    if op not in operation_names():
        raise UsageError(f"op={op!r} is no operation here: one of {', '.join(operation_names())}")
    found = dialects().get(op)
    if found is None:
        raise UsageError(f"no file in configs/published says how problems of {op!r} are written")
    return found


@cache
def dialects() -> Mapping[str, Dialect]:
    """All dialects by operation."""
    files = resources.files("tilescout.configs.published").iterdir()
    texts = [file.read_text(encoding="utf-8") for file in files if file.name.endswith(".toml")]
    return MappingProxyType({found.op: found for found in map(_parsed, texts)})


def _parsed(text: str) -> Dialect:
    table = tomllib.loads(text)
    parts = ("words", "values", "refused", "constants", "libraries", "lengths")
    return Dialect(table["op"], table["names"], *(table.get(part, {}) for part in parts))
