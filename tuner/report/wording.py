"""How a report writes dates, versions and problems: one spelling for tables, plots and files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

from ...kernels.base import Config, Problem
from ..records import Toolchain

__all__ = [
    "changed_parameters",
    "common_fields",
    "iso_time",
    "problem_text",
    "slug",
    "versions_text",
]


def iso_time(moment: datetime) -> str:
    """``2026-11-30T02:20:24Z``; a time without a zone is taken as UTC."""
    aware = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
    return aware.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def versions_text(toolchain: Toolchain) -> str:
    """``triton 3.7.1, torch 2.13.0``: the parts that have a version."""
    parts = [f"{part} {version}" for part, version in toolchain.as_dict().items() if version]
    return ", ".join(parts) or "no versions recorded"


def common_fields(problems: Iterable[Problem]) -> dict[str, str]:
    """The fields, with their value, in which all these problems of one operation agree.

    Empty for fewer than two distinct problems: then nothing would be left to tell them by.
    """
    distinct = list(dict.fromkeys(problems))
    if len(distinct) < 2:
        return {}
    first = distinct[0].as_dict()
    return {
        name: str(value)
        for name, value in first.items()
        if all(p.as_dict()[name] == value for p in distinct)
    }


def problem_text(problem: Problem, omitted: Iterable[str] = ()) -> str:
    """``batch=16 kv_len=8192``: the fields of the problem, less those said elsewhere."""
    left_out = set(omitted)
    shown = [f"{n}={v}" for n, v in problem.as_dict().items() if n not in left_out]
    return " ".join(shown)


def changed_parameters(base: Config, other: Config) -> str:
    """``block_n 64 -> 128, num_splits none -> 4``, or ``same config``."""
    before = {"template": base.template, **base.as_dict()}
    after = {"template": other.template, **other.as_dict()}
    names = list(dict.fromkeys([*before, *after]))
    changes = [
        f"{name} {before.get(name, 'none')} -> {after.get(name, 'none')}"
        for name in names
        if before.get(name) != after.get(name)
    ]
    return ", ".join(changes) or "same config"


def slug(parts: Sequence[str]) -> str:
    """The parts as one name that is safe in a file name and an HTML id."""
    return "-".join(re.sub(r"[^a-z0-9_]+", "_", part.lower()).strip("_") for part in parts)
