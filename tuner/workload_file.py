"""The grammar of a workload file: TOML in which lists multiply out into labelled problems.

    name = "my_model"
    description = "what it is for"
    source = "where the shapes come from"

    [defaults]                         # optional: taken by every entry that does not say otherwise
    op = "paged_decode"
    batch = [1, 16]                    # a list: one problem for each value
    weights.batch = [3, 1]             # optional: one weight for each value of that list

    [[problems]]
    label = "my_model b{batch}"        # names of problem fields in braces; labels must differ
    weight = 1.0                       # optional: multiplies the weights of the lists
    num_kv_heads = 8                   # every other key is a field of the operation's problem

An entry stands for the product of its lists. ``tuner.catalog`` finds the files by name.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import product
from math import prod
from typing import Any

from ..errors import UnknownNameError, UsageError
from ..kernels.base import Problem
from ..kernels.registry import operation

__all__ = ["Workload", "WorkloadHeader", "WorkloadProblem", "parse_header", "parse_workload"]

_HEADER_TYPES = {"name": str, "description": str, "source": str, "defaults": dict, "problems": list}
_RESERVED = ("op", "label", "weight", "weights")


@dataclass(frozen=True)
class WorkloadProblem:
    """One problem of a workload, by the name that tables show."""

    label: str
    problem: Problem
    weight: float
    """How much of the model's time it stands for, relative to its neighbours."""


@dataclass(frozen=True)
class Workload:
    """Named problems of a real model."""

    name: str
    description: str
    problems: tuple[WorkloadProblem, ...]
    source: str = ""
    """Where the shapes come from."""


@dataclass(frozen=True)
class WorkloadHeader:
    """What a file says of itself before any operation is loaded."""

    name: str
    ops: tuple[str, ...]
    """Operations of its entries, sorted."""


@dataclass(frozen=True)
class _Entry:
    """One ``[[problems]]`` table, defaults merged in; ``where`` opens each message about it."""

    where: str
    op: str
    label: str
    weight: float
    weights: Mapping[str, Any]
    values: Mapping[str, Any]


def parse_header(text: str, where: str) -> WorkloadHeader:
    """The name and the operations of a workload, without loading any of them.

    Args:
        text: the TOML.
        where: the file, for messages.

    Raises:
        UsageError: the file does not follow the grammar.
    """
    document = _document(text, where)
    ops = {entry.op for entry in _entries(document, where)}
    return WorkloadHeader(document["name"], tuple(sorted(ops)))


def parse_workload(text: str, where: str) -> Workload:
    """The workload that the TOML describes, every list multiplied out.

    Args:
        text: the TOML.
        where: the file, for messages.

    Raises:
        UsageError: a field is wrong or missing; the message has file, entry, field and value.
        UnknownNameError: an operation or a field that does not exist.
    """
    document = _document(text, where)
    problems: list[WorkloadProblem] = []
    first_use: dict[str, str] = {}
    for entry in _entries(document, where):
        for found in _expand(entry):
            if found.label in first_use:
                raise UsageError(
                    f"{entry.where}: label {found.label!r} is already used by "
                    f"{first_use[found.label]}: labels must differ; name the varying fields in "
                    "braces, e.g. label = 'b{batch}'"
                )
            first_use[found.label] = entry.where
            problems.append(found)
    return Workload(
        name=document["name"],
        description=document.get("description", ""),
        problems=tuple(problems),
        source=document.get("source", ""),
    )


def _document(text: str, where: str) -> dict[str, Any]:
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{where} is not valid TOML: {error}") from None
    for key, value in document.items():
        if key not in _HEADER_TYPES:
            raise UnknownNameError(f"key of workload file {where}", key, _HEADER_TYPES)
        if not isinstance(value, _HEADER_TYPES[key]):
            raise UsageError(f"{where}: {key}={value!r} must be {_type_name(_HEADER_TYPES[key])}")
    if not document.get("name"):
        raise UsageError(f'{where}: name is missing: add a line like name = "my_model"')
    if not document.get("problems"):
        raise UsageError(f"{where}: no problems: add at least one [[problems]] table")
    return document


def _type_name(kind: type) -> str:
    return "text" if kind is str else "a table" if kind is dict else "a list of tables"


def _entries(document: Mapping[str, Any], where: str) -> list[_Entry]:
    defaults = document.get("defaults", {})
    entries = []
    for number, table in enumerate(document["problems"], start=1):
        place = f"{where}, problem entry {number}"
        if not isinstance(table, dict):
            raise UsageError(f"{place}: {table!r} must be a [[problems]] table")
        merged = {**defaults, **table}
        for key in ("op", "label"):
            if key not in merged:
                raise UsageError(f"{place}: {key} is missing")
            if not isinstance(merged[key], str) or not merged[key].strip():
                raise UsageError(f"{place}: {key}={merged[key]!r} must be text that is not empty")
        weight = merged.get("weight", 1.0)
        weights = merged.get("weights", {})
        if not isinstance(weights, dict):
            raise UsageError(f"{place}: weights={weights!r} must be a table of lists, one a field")
        entries.append(
            _Entry(
                where=place,
                op=merged["op"],
                label=merged["label"],
                weight=_positive(weight, f"{place}: weight"),
                weights=weights,
                values={k: v for k, v in merged.items() if k not in _RESERVED},
            )
        )
    return entries


def _positive(value: object, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e12:
        raise UsageError(f"{what}={value!r} must be a positive number")
    return float(value)


def _expand(entry: _Entry) -> list[WorkloadProblem]:
    problem_type = operation(entry.op).problem_type
    known = [field.name for field in fields(problem_type)]
    for name in (*entry.values, *entry.weights):
        if name not in known:
            raise UnknownNameError(f"field of {entry.op} in {entry.where}", name, known)
    axes = {name: _axis(entry, name, value) for name, value in entry.values.items()}
    weights = {name: _axis_weights(entry, name, len(axis)) for name, axis in axes.items()}
    if stray := [name for name in entry.weights if name not in axes]:
        raise UsageError(f"{entry.where}: weights.{stray[0]} has no list {stray[0]} to weigh")
    found = []
    for picks in product(*(range(len(axis)) for axis in axes.values())):
        chosen = dict(zip(axes, picks, strict=True))
        values = {name: axes[name][index] for name, index in chosen.items()}
        weight = entry.weight * prod(weights[name][index] for name, index in chosen.items())
        found.append(
            WorkloadProblem(_label(entry, values), _problem(entry, problem_type, values), weight)
        )
    return found


def _axis(entry: _Entry, name: str, value: object) -> Sequence[object]:
    axis = value if isinstance(value, list) else [value]
    if not axis:
        raise UsageError(f"{entry.where}: {name}=[] must hold at least one value")
    return axis


def _axis_weights(entry: _Entry, name: str, length: int) -> Sequence[float]:
    weights = entry.weights.get(name)
    if weights is None:
        return [1.0] * length
    if not isinstance(weights, list) or len(weights) != length:
        raise UsageError(
            f"{entry.where}: weights.{name}={weights!r} must be a list of {length} numbers, one "
            f"for each value of {name}"
        )
    return [_positive(weight, f"{entry.where}: weights.{name}") for weight in weights]


def _label(entry: _Entry, values: Mapping[str, object]) -> str:
    try:
        return entry.label.format(**values)
    except (KeyError, IndexError, ValueError, AttributeError):
        raise UsageError(
            f"{entry.where}: label={entry.label!r} may only name {', '.join(values)} in braces"
        ) from None


def _problem(entry: _Entry, problem_type: type[Problem], values: Mapping[str, object]) -> Problem:
    try:
        return problem_type.from_dict(values)
    except UsageError as error:
        raise UsageError(f"{entry.where}: {error}") from error
