"""A search space whose valid configs are listed one by one, as a recording leaves them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ..kernels.base import Config, ParameterValue, canonical_json
from .parameters import Parameter
from .space import SearchSpace

__all__ = ["ListedSpace", "listed_space"]


@dataclass(frozen=True)
class ListedSpace(SearchSpace):
    """Exactly ``configs``; what made others invalid is not known.

    A parameter that some configs lack hangs under nothing: a config has it or not.
    """

    configs: tuple[Config, ...] = field(default=(), kw_only=True)

    @cached_property
    def _members(self) -> frozenset[Config]:
        return frozenset(self.configs)

    def check(self, config: Config) -> str | None:
        """None if the config is listed."""
        return None if config in self._members else f"config {config} is not in the list"

    def active_parameters(self, values: Mapping[str, ParameterValue]) -> tuple[Parameter, ...]:
        """The parameters that have a value."""
        return tuple(p for p in self.parameters if p.name in values)

    def product_size(self) -> int:
        """Number of configs: nothing is refused."""
        return len(self.configs)

    def _product(self) -> Iterator[Config]:
        return iter(self.configs)

    @cached_property
    def _valid(self) -> tuple[Config, ...] | None:
        return self.configs

    def _completions(self, values: dict[str, ParameterValue]) -> Iterator[Config]:
        yield Config.of(self.template, values)

    def fingerprint(self) -> str:
        """Sixteen hex digits over the listed configs; order does not count."""
        parts = sorted(config.config_id for config in self.configs)
        return hashlib.sha256(canonical_json(parts).encode()).hexdigest()[:16]


def listed_space(
    template: str,
    configs: Sequence[Config],
    values: Mapping[str, Sequence[ParameterValue]] | None = None,
) -> ListedSpace:
    """The space of exactly these configs; the first is the default.

    A parameter is ordered if it is a number with more than two values, and nominal otherwise.

    Args:
        template: template of every config.
        configs: at least one, without repeats.
        values: values of each parameter in their order; None for what occurs, sorted.
    """
    names = dict.fromkeys(name for config in configs for name, _ in config.values)
    given = values or {}
    parameters = tuple(
        _parameter(name, given[name] if name in given else _occurring(name, configs))
        for name in names
    )
    return ListedSpace(template, parameters, (), configs[0], configs=tuple(configs))


def _occurring(name: str, configs: Iterable[Config]) -> list[ParameterValue]:
    found = {value for config in configs if (value := config.get(name)) is not None}
    return sorted(found, key=lambda value: (isinstance(value, str), value))


def _parameter(name: str, values: Sequence[ParameterValue]) -> Parameter:
    is_number = all(isinstance(v, int) and not isinstance(v, bool) for v in values)
    return Parameter(name, tuple(values), is_number and len(values) > 2)
