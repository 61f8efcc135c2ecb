"""The configs that ``covering.py`` checks: a covering sample of each template on each family."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any

from covering_problems import FAMILIES, problem_of
from tilescout.errors import UnsupportedError
from tilescout.kernels.base import Config, KernelSpec, Problem
from tilescout.kernels.device import DeviceSpec
from tilescout.kernels.registry import template
from tilescout.search_spaces.covering import covering_sample
from tilescout.search_spaces.registry import joint_space
from tilescout.search_spaces.space import SearchSpace

__all__ = ["Group", "Item", "in_turn", "kernel_key", "load_sample", "sample", "write_sample"]


@dataclass(frozen=True)
class Item:
    """One config of the sample."""

    op: str
    family: str
    config: Config

    @cached_property
    def problem(self) -> Problem:
        """The problem it is compiled for and checked on."""
        return problem_of(self.op, self.family)

    @property
    def key(self) -> str:
        """Equal where a result may be taken over: same problem, config and kernel source."""
        source = _source_hash(self.op, self.config.template)
        return f"{self.problem.key()} {self.config.template} {self.config} {source}"

    @property
    def specs(self) -> tuple[KernelSpec, ...]:
        """The kernels it launches."""
        return template(self.op, self.config.template).kernel_specs(self.problem, self.config)


@dataclass(frozen=True)
class Group:
    """The configs of one template on one family."""

    op: str
    family: str
    template: str
    fingerprint: str
    """Of the space that was sampled."""
    num_covering: int
    """How many of the first configs cover every pair of values that can be."""
    num_pairs: int
    num_impossible: int
    configs: tuple[Config, ...]

    @property
    def items(self) -> list[Item]:
        """Its configs, those that cover pairs first."""
        return [Item(self.op, self.family, config) for config in self.configs]

    @property
    def backend(self) -> str:
        """``triton`` or ``tilelang``."""
        return template(self.op, self.template).backend

    def __str__(self) -> str:
        return (
            f"{self.op:<14}{self.family:<26}{self.template:<17}{len(self.configs):>5} configs, the "
            f"first {self.num_covering} cover {self.num_pairs} pairs; {self.num_impossible} pairs "
            f"cannot be"
        )


Space = tuple[str, str, SearchSpace]
"""Operation, family, space."""


@lru_cache(maxsize=64)
def _source_hash(op: str, name: str) -> str:
    return template(op, name).source_hash()


def kernel_key(spec: KernelSpec) -> Hashable:
    """Equal for specifications of equal kernels, with a hash that tells others apart."""
    assert dataclasses.is_dataclass(spec)
    return type(spec).__name__, *(_plain(getattr(spec, f.name)) for f in dataclasses.fields(spec))


def _plain(value: Any) -> Hashable:
    if isinstance(value, Mapping):
        return tuple(sorted((key, _plain(inner)) for key, inner in value.items()))
    if isinstance(value, frozenset):
        return tuple(sorted(value))
    return tuple(map(_plain, value)) if isinstance(value, tuple) else value


def sample(
    ops: Sequence[str], device: DeviceSpec, wanted: Mapping[str, int], known: Sequence[Item]
) -> list[Group]:
    """Covering samples of all families of the operations.

    Args:
        ops: operations.
        device: the GPU whose spaces are sampled.
        wanted: by backend; spaces are sampled one after the other until there are as many.
        known: what was checked before; it is part of the sample and need not be compiled.
    """
    spaces = [found for op in ops for found in _spaces(op, device)]
    groups: list[Group] = []
    compiled: set[Hashable] = set()
    for backend, count in wanted.items():
        own = [s for s in spaces if template(s[0], s[2].template).backend == backend]
        groups += _groups(_in_order(own), count, known, compiled)
    return groups


def _spaces(op: str, device: DeviceSpec) -> Iterator[Space]:
    for family in FAMILIES[op]:
        try:
            joint = joint_space(problem_of(op, family), device)
        except UnsupportedError as error:
            print(f"{op}, {family}: {error}", file=sys.stderr)
            continue
        for space in joint.spaces:
            if not template(op, space.template).is_external:
                yield op, family, space


def _in_order(spaces: Sequence[Space]) -> list[Space]:
    """One family of each template, that with the largest space, then the next of each."""
    seen: Counter[tuple[str, str]] = Counter()
    placed: list[tuple[int, Space]] = []
    for op, family, space in sorted(spaces, key=lambda found: -found[2].count()):
        placed.append((seen[op, space.template], (op, family, space)))
        seen[op, space.template] += 1
    return [found for _, found in sorted(placed, key=lambda pair: pair[0])]


def _share(sizes: Sequence[int], wanted: int) -> int:
    """Configs of each space that make ``wanted`` together, though some spaces have less."""
    return next((n for n in range(wanted) if sum(min(n, s) for s in sizes) >= wanted), wanted)


def _groups(
    spaces: Sequence[Space], wanted: int, known: Sequence[Item], compiled: set[Hashable]
) -> list[Group]:
    """Samples of as many of the spaces as ``wanted`` takes, of equal sizes where these do."""
    share = _share([space.count() for _, _, space in spaces], wanted)
    groups: list[Group] = []
    for seed, (op, family, space) in enumerate(spaces):
        if sum(len(group.configs) for group in groups) >= wanted:
            break
        start = [
            item.config
            for item in known
            if (item.op, item.family, item.config.template) == (op, family, space.template)
            and space.check(item.config) is None
        ]
        group = _group(op, family, space, share, seed, start, compiled)
        print(group, file=sys.stderr, flush=True)
        groups.append(group)
    return groups


def _group(  # noqa: PLR0917  (a space, how much of it, and what is there already)
    op: str,
    family: str,
    space: SearchSpace,
    share: int,
    seed: int,
    start: Sequence[Config],
    compiled: set[Hashable],
) -> Group:
    problem, found = problem_of(op, family), template(op, space.template)

    @cache
    def kernels(config: Config) -> frozenset[Hashable]:
        specs = found.kernel_specs(problem, config)
        return frozenset(map(kernel_key, specs)) - compiled

    chosen = covering_sample(space, share, seed=seed, start=start, kernels=kernels)
    new = [config for config in chosen.configs if config not in set(start)]
    compiled |= frozenset().union(*map(kernels, new))
    return Group(
        *(op, family, space.template, space.fingerprint()),
        *(chosen.num_covering, chosen.num_pairs, len(chosen.impossible), chosen.configs),
    )


def in_turn(groups: Sequence[Group], done: frozenset[str]) -> list[Item]:
    """Items that are not done, groups at an even pace, configs that cover pairs first.

    Wherever a run is cut, every group has come equally far.
    """
    placed: list[tuple[float, Item]] = []
    for group in groups:
        items = [item for item in group.items if item.key not in done]
        placed += [((place + 0.5) / len(items), item) for place, item in enumerate(items)]
    return [item for _, item in sorted(placed, key=lambda pair: pair[0])]


def load_sample(path: Path, device: DeviceSpec) -> list[Group]:
    """The sample that was written there, if it is still one of today's spaces."""
    rows = json.loads(path.read_text(encoding="utf-8"))
    groups = [
        Group(**{**row, "configs": tuple(Config.of(row["template"], c) for c in row["configs"])})
        for row in rows
    ]
    for group in groups:
        spaces = joint_space(problem_of(group.op, group.family), device, [group.template])
        space = spaces.of(group.template)
        if space.fingerprint() != group.fingerprint or any(map(space.check, group.configs)):
            raise SystemExit(
                f"{path} samples another space of {group.op}/{group.template} than today's; "
                f"remove it, and a new sample is made"
            )
    return groups


def write_sample(path: Path, groups: Sequence[Group]) -> None:
    """Writes a sample, for ``load_sample``: making one takes a minute."""
    rows = [
        {
            **{f.name: getattr(g, f.name) for f in dataclasses.fields(g)},
            "configs": [c.as_dict() for c in g.configs],
        }
        for g in groups
    ]
    path.write_text(json.dumps(rows) + "\n", encoding="utf-8")
