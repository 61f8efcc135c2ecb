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

from covering_problems import FAMILIES, grid_problems, problem_of
from tilescout.errors import UnsupportedError
from tilescout.kernels.base import Config, KernelSpec, KernelTemplate, Problem
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
        found: Problem = problem_of(self.op, self.family)
        return found

    @property
    def key(self) -> str:
        """Equal where a result may be taken over: same problem, config and kernel source."""
        source = _source_hash(self.op, self.config.template)
        return f"{self.problem.key()} {self.config.template} {self.config} {source}"

    @property
    def specs(self) -> dict[Hashable, KernelSpec]:
        """The kernels that it launches on the grid, each once, by their keys."""
        found = template(self.op, self.config.template)
        specs = (
            spec
            for problem in grid_problems(self.problem).values()
            for spec in found.kernel_specs(problem, self.config)
        )
        return {kernel_key(spec): spec for spec in specs}


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
    """Pairs that can be; 0 where the configs are the default and the seeds, whatever they cover."""
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
        start = f"{self.op:<14}{self.family:<26}{self.template:<17}{len(self.configs):>5} configs"
        if not self.num_pairs:
            return f"{start}: the default and the seeds"
        return (
            f"{start}, the first {self.num_covering} cover {self.num_pairs} pairs; "
            f"{self.num_impossible} pairs cannot be"
        )


@dataclass(frozen=True)
class _Source:
    """A space to sample."""

    op: str
    family: str
    space: SearchSpace

    @property
    def template(self) -> KernelTemplate:
        """The template whose space it is."""
        return template(self.op, self.space.template)

    @property
    def kernels_each(self) -> int:
        """Kernels of one config."""
        return len(self.kernels(self.space.default))

    def kernels(self, config: Config) -> frozenset[Hashable]:
        """The kernels that a config has to be compiled for."""
        return frozenset(Item(self.op, self.family, config).specs)

    def of(self, items: Sequence[Item]) -> list[Config]:
        """Configs of the items that are of this space."""
        names = self.op, self.family, self.space.template
        own = (i.config for i in items if (i.op, i.family, i.config.template) == names)
        return [config for config in own if self.space.check(config) is None]


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
        wanted: by backend; spaces are sampled one after the other until there are as many, and of
            each space left the default and the seeds are taken.
        known: what was checked before; it is part of the sample and need not be compiled.
    """
    sources = [source for op in ops for source in _sources(op, device)]
    groups: list[Group] = []
    compiled: set[Hashable] = set()
    for backend, count in wanted.items():
        own = _in_order([s for s in sources if s.template.backend == backend])
        groups += _groups(own, count, known, compiled)
    return groups


def _sources(op: str, device: DeviceSpec) -> Iterator[_Source]:
    for family in FAMILIES[op]:
        try:
            joint = joint_space(problem_of(op, family), device)
        except UnsupportedError as error:
            print(f"{op}, {family}: {error}", file=sys.stderr)
            continue
        for space in joint.spaces:
            if not template(op, space.template).is_external:
                yield _Source(op, family, space)


def _in_order(sources: Sequence[_Source]) -> list[_Source]:
    """One family of each template, that with the largest space, then the next of each."""
    seen: Counter[tuple[str, str]] = Counter()
    placed: list[tuple[int, _Source]] = []
    for source in sorted(sources, key=lambda found: -found.space.count()):
        name = source.op, source.space.template
        placed.append((seen[name], source))
        seen[name] += 1
    return [source for _, source in sorted(placed, key=lambda pair: pair[0])]


def _groups(
    sources: Sequence[_Source], wanted: int, known: Sequence[Item], compiled: set[Hashable]
) -> list[Group]:
    """What covers the pairs of as many sources as ``wanted`` takes, filled up to that.

    Filled up are those whose configs have most kernels: new configs are made of kernels there are.
    Of the other sources there are the default and the seeds.
    """
    groups: dict[_Source, Group] = {}
    rest: list[Group] = []
    for seed, source in enumerate(sources):
        if sum(len(group.configs) for group in groups.values()) < wanted:
            groups[source] = _covering(source, seed, source.of(known), compiled)
        else:
            rest.append(_known_good(source, compiled))
    most = max((source.kernels_each for source in groups), default=0)
    rich = [source for source in groups if source.kernels_each == most]
    missing = wanted - sum(len(group.configs) for group in groups.values())
    for place, source in enumerate(rich):
        share = -(-missing // (len(rich) - place))
        if share > 0:
            groups[source] = _filled(source, groups[source], share, place, compiled)
            missing -= share
    found = [*groups.values(), *rest]
    print(*found, sep="\n", file=sys.stderr, flush=True)
    return found


def _known_good(source: _Source, compiled: set[Hashable]) -> Group:
    """The default and the seeds of a space that is not sampled."""
    configs = tuple(dict.fromkeys([source.space.default, *source.space.valid_seeds()]))
    compiled |= frozenset().union(*map(source.kernels, configs))
    names = source.op, source.family, source.space.template
    return Group(*names, source.space.fingerprint(), 0, 0, 0, configs)


def _covering(
    source: _Source, seed: int, start: Sequence[Config], compiled: set[Hashable]
) -> Group:
    """As many configs as cover all pairs, those that were checked before among them."""
    kernels = cache(lambda config: source.kernels(config) - compiled)
    chosen = covering_sample(source.space, 0, seed=seed, start=start, kernels=kernels)
    new = [config for config in chosen.configs if config not in set(start)]
    found = frozenset().union(*map(kernels, new))
    compiled |= found
    return Group(
        *(source.op, source.family, source.space.template, source.space.fingerprint()),
        *(chosen.num_covering, chosen.num_pairs, len(chosen.impossible), chosen.configs),
    )


def _filled(
    source: _Source, group: Group, num_more: int, seed: int, compiled: set[Hashable]
) -> Group:
    """The group with so many configs more, of kernels that are compiled as far as possible."""
    kernels = cache(lambda config: source.kernels(config) - compiled)
    total = len(group.configs) + num_more
    chosen = covering_sample(source.space, total, seed=seed, start=group.configs, kernels=kernels)
    found = frozenset().union(*map(kernels, chosen.configs[len(group.configs) :]))
    compiled |= found
    return dataclasses.replace(group, configs=chosen.configs)


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
