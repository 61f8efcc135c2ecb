"""Finds what ``configs`` holds by name: GPUs, workloads and budgets.

Reads the TOML inside the installed package; nothing here looks at the machine. A workload may also
be given as the path of a file. The grammar of workload files is in ``workload_file``.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..errors import UnknownNameError, UsageError
from ..kernels.base import Problem
from ..kernels.device import DeviceSpec
from ..kernels.registry import operation
from .sku_tolerance import MEMORY_TOLERANCE
from .workload_file import Workload, WorkloadProblem, parse_header, parse_workload

__all__ = [
    "MEMORY_TOLERANCE",
    "Budget",
    "Workload",
    "WorkloadProblem",
    "budget",
    "budget_names",
    "first_problem",
    "gpu",
    "gpu_names",
    "match_gpu",
    "workload",
    "workload_names",
]


@dataclass(frozen=True)
class Budget:
    """How much a search may spend on one study."""

    name: str
    description: str
    num_trials: int
    num_finalists: int
    """How many of the best are compared again at the end."""
    time_budget_s: float | None = None
    """Seconds for the whole run; None leaves it to the trials."""


def gpu_names() -> tuple[str, ...]:
    """SKU names, sorted."""
    return tuple(sorted(_gpus()))


def gpu(sku: str) -> DeviceSpec:
    """The SKU of that name; product names as drivers and published tables print them work too.

    Raises:
        UnknownNameError: no SKU has this name.
    """
    found = _gpu_by_spelling().get(_spelling(sku))
    if found is None:
        raise UnknownNameError("GPU", sku, _gpus(), "a new SKU is one file in configs/gpus")
    return found


def match_gpu(
    name: str, *, compute_capability: tuple[int, int], num_sms: int, memory_bytes: int
) -> DeviceSpec | None:
    """The SKU that a device performs as, or None for one that ``configs/gpus`` does not know.

    Compute capability and SM count must be equal and memory within ``MEMORY_TOLERANCE``; among
    several such SKUs the driver's product name decides, then the nearest memory.

    Args:
        name: the product name that the driver prints.
        compute_capability: (major, minor).
        num_sms: the driver's count.
        memory_bytes: the driver's total.
    """
    alike = [
        spec
        for spec in _gpus().values()
        if (spec.compute_capability, spec.num_sms) == (compute_capability, num_sms)
        and abs(spec.memory_bytes - memory_bytes) <= MEMORY_TOLERANCE * spec.memory_bytes
    ]
    named = _gpu_by_spelling().get(_spelling(name))
    return min(
        alike,
        key=lambda spec: (spec is not named, abs(spec.memory_bytes - memory_bytes)),
        default=None,
    )


def workload_names() -> tuple[str, ...]:
    """Names of the workloads that ship with the package, sorted."""
    return tuple(sorted(_workload_texts()))


def workload(name_or_path: str) -> Workload:
    """The workload of that name, or the one in that TOML file.

    Raises:
        UnknownNameError: neither a workload that ships with the package nor a file.
        UsageError: the file cannot be read or breaks the grammar.
    """
    texts = _workload_texts()
    if name_or_path in texts:
        return parse_workload(texts[name_or_path], f"workload {name_or_path}")
    path = Path(name_or_path)
    if path.suffix != ".toml" and not path.is_file():
        raise UnknownNameError("workload", name_or_path, texts, "or give the path of a .toml file")
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        reason = error.strerror or error
        raise UsageError(
            f"workload file {name_or_path!r} cannot be read: {reason}; check the path"
        ) from error
    except UnicodeDecodeError as error:
        raise UsageError(f"workload file {name_or_path!r} is not UTF-8 text: {error}") from error
    return parse_workload(text, str(path))


def first_problem(op: str) -> Problem:
    """A representative problem of the operation: the first of ``quickstart``, else of any workload.

    Raises:
        UnknownNameError: no such operation.
        UsageError: no workload that ships with the package has a problem of it.
    """
    operation(op)
    texts = _workload_texts()
    for name in sorted(texts, key=lambda name: (name != "quickstart", name)):
        if op in parse_header(texts[name], f"workload {name}").ops:
            found = parse_workload(texts[name], f"workload {name}").problems
            return next(entry.problem for entry in found if entry.problem.op == op)
    raise UsageError(f"no workload has a problem of {op!r}: give every field of the problem")


def budget_names() -> tuple[str, ...]:
    """Names of the budgets, sorted."""
    return tuple(sorted(_tables("budgets")))


def budget(name: str) -> Budget:
    """The budget of that name.

    Raises:
        UnknownNameError: no such budget.
    """
    tables = _tables("budgets")
    if name not in tables:
        raise UnknownNameError("budget", name, tables)
    return Budget(**tables[name])


def _spelling(name: str) -> str:
    """``name`` without case, spaces, punctuation and the maker: what two spellings share."""
    return re.sub(r"[^a-z0-9]", "", name.lower()).removeprefix("nvidia")


@cache
def _gpus() -> Mapping[str, DeviceSpec]:
    return MappingProxyType({name: _spec(table) for name, table in _tables("gpus").items()})


def _spec(table: dict[str, Any]) -> DeviceSpec:
    major, minor = table.pop("compute_capability")
    return DeviceSpec(
        compute_capability=(major, minor),
        # Plain mappings: a spec goes to worker processes, and a proxy cannot be pickled.
        peak_tflops=dict(table.pop("peak_tflops")),
        sources=dict(table.pop("sources")),
        aliases=tuple(table.pop("aliases")),
        **table,
    )


@cache
def _gpu_by_spelling() -> Mapping[str, DeviceSpec]:
    return {
        _spelling(name): spec
        for spec in _gpus().values()
        for name in (spec.sku, spec.name, *spec.aliases)
    }


@cache
def _workload_texts() -> Mapping[str, str]:
    texts = _texts("workloads")
    return {parse_header(text, f"{file}.toml").name: text for file, text in texts.items()}


def _tables(folder: str) -> dict[str, dict[str, Any]]:
    """Parsed files of a folder, by file name without the suffix."""
    return {name: tomllib.loads(text) for name, text in _texts(folder).items()}


def _texts(folder: str) -> dict[str, str]:
    files = resources.files(f"tilescout.configs.{folder}").iterdir()
    return {
        file.name.removesuffix(".toml"): file.read_text(encoding="utf-8")
        for file in files
        if file.name.endswith(".toml")
    }
