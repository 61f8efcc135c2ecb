"""How a report writes dates, versions and problems: one spelling for tables, plots and files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, Field, fields
from datetime import UTC, datetime
from functools import lru_cache

from ...kernels.base import Config, Problem
from ..records import Toolchain

__all__ = [
    "SAME_CONFIG",
    "changed_parameters",
    "common_fields",
    "config_texts",
    "default_words",
    "iso_time",
    "parameter_changes",
    "problem_text",
    "slug",
    "versions_text",
]

SAME_CONFIG = "same config"
"""Where two winners do not differ."""


def iso_time(moment: datetime) -> str:
    """``2026-11-30T02:20:24Z``; a time without a zone is taken as UTC."""
    aware = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
    return aware.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


@lru_cache(maxsize=1024)
def versions_text(toolchain: Toolchain) -> str:
    """``triton 3.7.1, torch 2.13.0``: the parts that have a version."""
    parts = [f"{part} {version}" for part, version in toolchain.as_dict().items() if version]
    return ", ".join(parts) or "no versions recorded"


def common_fields(problems: Iterable[Problem]) -> dict[str, str]:
    """The fields, with their value, in which all these problems of one operation agree.

    Empty for fewer than two distinct problems: then nothing would be left to tell them by.
    """
    distinct = [problem.as_dict() for problem in dict.fromkeys(problems)]
    if len(distinct) < 2:
        return {}
    return {
        name: str(value)
        for name, value in distinct[0].items()
        if all(values[name] == value for values in distinct)
    }


def default_words(problem: Problem) -> dict[str, str]:
    """``equal`` or ``as dtype`` by the name of each field that need not be told."""
    told = {field.name: str(field.default) for field in fields(problem) if _has_default(field)}
    followers = {name: f"as {leader}" for name, leader in problem.following_fields.items()}
    return {**told, **followers}


def _has_default(field: Field[object]) -> bool:
    return field.default is not MISSING


def problem_text(problem: Problem, omitted: Iterable[str] = ()) -> str:
    """``batch=16 kv_len=8192``: the fields, less those said elsewhere and those at their default.

    Where that leaves nothing, those at their default are told.
    """
    values = problem.as_dict()
    told = {name: value for name, value in values.items() if name not in set(omitted)}
    telling = {name: value for name, value in told.items() if not _is_default(problem, name)}
    return " ".join(f"{name}={value}" for name, value in (telling or told).items())


def _is_default(problem: Problem, name: str) -> bool:
    value = getattr(problem, name)
    leader = problem.following_fields.get(name)
    if leader is not None:
        return bool(value == getattr(problem, leader))
    return any(f.name == name and _has_default(f) and f.default == value for f in fields(problem))


@lru_cache(maxsize=1 << 16)
def config_texts(config: Config) -> tuple[str, str]:
    """Its id and its values in words: searches of many problems try the same configs."""
    return config.config_id, str(config)


def parameter_changes(base: Config, other: Config) -> dict[str, str]:
    """``64 -> 128`` or ``none -> 4`` by the name of each parameter that differs."""
    before = {"template": base.template, **base.as_dict()}
    after = {"template": other.template, **other.as_dict()}
    return {
        name: f"{before.get(name, 'none')} -> {after.get(name, 'none')}"
        for name in dict.fromkeys([*before, *after])
        if before.get(name) != after.get(name)
    }


def changed_parameters(base: Config, other: Config) -> str:
    """``block_n 64 -> 128, num_splits none -> 4``, or ``same config``."""
    changes = parameter_changes(base, other)
    return ", ".join(f"{name} {change}" for name, change in changes.items()) or SAME_CONFIG


def slug(parts: Sequence[str]) -> str:
    """The parts as one name that is safe in a file name and an HTML id."""
    return "-".join(re.sub(r"[^a-z0-9_]+", "_", part.lower()).strip("_") for part in parts)
