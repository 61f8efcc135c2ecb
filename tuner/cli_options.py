"""Options and arguments that several commands share, and how their text is read."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import typer

from ..errors import UsageError
from .rendering import Format

if TYPE_CHECKING:
    from ..kernels.base import Problem

__all__ = [
    "AllowOtherToolchain",
    "Assignments",
    "FormatOption",
    "Gpu",
    "GpuFilter",
    "OpArgument",
    "OpFilter",
    "OverlaidDatabase",
    "PolicyOption",
    "parse_assignments",
    "parse_names",
    "parse_problem",
    "require_database_name",
]


_Databases = TypeVar("_Databases", str | None, list[str] | None)


def require_database_name(db: _Databases) -> _Databases:
    """The value of ``--db``, given back.

    Raises:
        UsageError: it is empty, as it is where a shell variable is not set.
    """
    for name in [db] if isinstance(db, str) else db or ():
        if not name.strip():
            raise UsageError(f"--db {name!r} names no database: give a path, or leave --db out")
    return db


OpArgument = Annotated[
    str, typer.Argument(metavar="OP", help="Operation, e.g. paged_decode.", show_default=False)
]
Assignments = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE...", help="Fields of the problem.", show_default=False),
]
Gpu = Annotated[
    str | None,
    typer.Option("--gpu", metavar="NAME", help="SKU, e.g. h200. Default: the GPU at hand."),
]
GpuFilter = Annotated[
    str | None, typer.Option("--gpu", metavar="A,B", help="Only these SKUs. Default: all.")
]
OpFilter = Annotated[
    str | None, typer.Option("--op", metavar="OP", help="Only this operation. Default: all.")
]
OverlaidDatabase = Annotated[
    str | None,
    typer.Option(
        "--db",
        metavar="PATH",
        callback=require_database_name,
        help="Database to lay over the shipped one and the user's.",
    ),
]
FormatOption = Annotated[
    Format, typer.Option("--format", help="How data is printed on standard output.")
]
PolicyOption = Annotated[
    Literal["nearest", "strict"],
    typer.Option(
        "--policy",
        help="nearest walks the tiers; strict takes only what was measured for this very problem.",
    ),
]
AllowOtherToolchain = Annotated[
    bool,
    typer.Option(
        "--allow-other-toolchain", help="Let strict take a winner found with other versions."
    ),
]


def parse_assignments(items: Sequence[str]) -> dict[str, str]:
    """``KEY=VALUE`` texts as a mapping.

    Raises:
        UsageError: a text without ``=`` or a key given twice.
    """
    values: dict[str, str] = {}
    for item in items:
        key, sign, value = item.partition("=")
        if not sign or not key:
            raise UsageError(f"{item!r} is not KEY=VALUE, e.g. batch=16")
        if key in values:
            raise UsageError(f"{key} is given twice: {values[key]!r} and {value!r}")
        values[key] = value
    return values


def parse_problem(op: str, items: Sequence[str], *, complete: bool = False) -> Problem:
    """The problem of ``op`` with these fields.

    Args:
        op: Name of the operation.
        items: ``KEY=VALUE`` texts.
        complete: Take missing fields from the op's first workload problem.

    Raises:
        UsageError: an unknown op or field, a bad value, or a missing field.
    """
    from ..kernels.registry import operation
    from .catalog import first_problem

    values: dict[str, object] = dict(parse_assignments(items))
    problem_type = operation(op).problem_type
    first: Problem | None = None
    if complete and any(field.name not in values for field in fields(problem_type)):
        # An operation without a workload still has the defaults of its fields.
        with suppress(UsageError):
            first = first_problem(op)
    return problem_type.from_dict(values) if first is None else first.changed(values)


def parse_names(text: str | None) -> list[str] | None:
    """``A,B`` as names, each once; None where the option was not given.

    Raises:
        UsageError: an empty name.
    """
    if text is None:
        return None
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise UsageError(f"--gpu {text!r} has an empty name: write it as h200,b200")
    return list(dict.fromkeys(names))
