"""The set of valid configs of one template for one problem and device, and unions of such sets."""

from __future__ import annotations

import hashlib
import itertools
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ..errors import UnknownNameError, UsageError
from ..kernels.base import Config, ParameterValue, canonical_json
from .constraints import Constraint
from .parameters import Parameter, filled
from .remembered import UNDECIDED, Remembered

__all__ = ["MAX_ENUMERATED", "JointSpace", "SearchSpace"]

MAX_ENUMERATED = 200_000
"""Valid configs that a space holds as a list; above, it is sampled."""
_MAX_PRODUCT = 1_000_000
"""Configs before constraints that are looked through for the valid ones; a few seconds."""
_NUM_WEIGHTED = 20_000
"""Configs that stand for a product that is too large to look through."""
_MAX_REJECTIONS = 2_000
_WALK_STEPS = 30
_MAX_COMPLETIONS = 64
"""Ways to fill what a config of another problem lacks that are looked at."""


class _Column(NamedTuple):
    """One parameter of a plain product."""

    name: str
    pairs: tuple[tuple[str, ParameterValue], ...]
    """The name with each of its values."""
    missing: frozenset[str]
    """The parameters after it."""


@dataclass(frozen=True)
class SearchSpace:
    """Valid configs of one template: the product of its parameters less what constraints refuse.

    A parameter must come after the parameter it hangs under.
    """

    template: str
    parameters: tuple[Parameter, ...]
    constraints: tuple[Constraint, ...]
    default: Config
    """What runs untuned; always valid, always evaluated first."""
    seeds: tuple[Config, ...] = ()
    """Hand-picked configs worth trying early; those that are invalid here are dropped."""

    def __post_init__(self) -> None:
        reason = self.check(self.default)
        assert reason is None, f"default of {self.template}: {reason}"
        part_of = {p.name: p.part for p in self.parameters}
        for p in self.parameters:
            above = part_of[p.active_when.parent] if p.active_when else ""
            assert above in ("", p.part), f"{p.name} of part {p.part!r} hangs under part {above!r}"

    def active_parameters(self, values: Mapping[str, ParameterValue]) -> tuple[Parameter, ...]:
        """The parameters that exist under these values of their parents."""
        active: list[Parameter] = []
        names: set[str] = set()
        for parameter in self.parameters:
            condition = parameter.active_when
            if condition is None or (
                condition.parent in names and values.get(condition.parent) in condition.values
            ):
                active.append(parameter)
                names.add(parameter.name)
        return tuple(active)

    def check(self, config: Config) -> str | None:
        """None if the config is in the space, else the reason why not."""
        if config.template != self.template:
            return f"template is {config.template!r}, this is the space of {self.template!r}"
        values = config.as_dict()
        active = {p.name: p for p in self.active_parameters(values)}
        for name in values:
            if name not in active:
                known = any(p.name == name for p in self.parameters)
                return f"parameter {name!r} {'is not active here' if known else 'is unknown'}"
        for name, parameter in active.items():
            if name not in values:
                return f"parameter {name!r} has no value"
            if values[name] not in parameter.values:
                allowed = ", ".join(map(str, parameter.values))
                return f"{name}={values[name]!r} is not one of {allowed}"
        for constraint in self.constraints:
            reason = constraint.check(config)
            if reason is not None:
                return f"{constraint.name}: {reason}"
        return None

    def config(self, values: Mapping[str, ParameterValue]) -> Config:
        """The config with these values.

        Raises:
            UnknownNameError: a name that is no parameter.
            UsageError: the config is not in the space; the message has the reason.
        """
        for name in values:
            if all(p.name != name for p in self.parameters):
                raise UnknownNameError(
                    f"parameter of {self.template}", name, [p.name for p in self.parameters]
                )
        config = Config.of(self.template, values)
        reason = self.check(config)
        if reason is not None:
            raise UsageError(f"config {config} of {self.template} is not valid: {reason}")
        return config

    def _product(self) -> Iterator[Config]:
        """The conditional product of all parameters, constraints not applied."""
        for names, options in self._boxes():
            for values in itertools.product(*options):
                yield Config(self.template, tuple(zip(names, values, strict=True)))

    def _boxes(self) -> Iterator[tuple[list[str], list[tuple[ParameterValue, ...]]]]:
        """The product as plain products: parameters, sorted by name, and the values of each."""
        parents = {p.active_when.parent for p in self.parameters if p.active_when}
        choices = [p for p in self.parameters if p.name in parents]
        for chosen in self._choices(choices, {}):
            active = sorted(self.active_parameters(chosen), key=lambda p: p.name)
            options = [(chosen[p.name],) if p.name in chosen else p.values for p in active]
            yield [p.name for p in active], options

    def _choices(
        self, parents: list[Parameter], chosen: dict[str, ParameterValue]
    ) -> Iterator[dict[str, ParameterValue]]:
        """Every combination of values of the parameters that others hang under."""
        if not parents:
            yield chosen
            return
        parameter, *rest = parents
        if not parameter.is_active(chosen):
            yield from self._choices(rest, chosen)
            return
        for value in parameter.values:
            yield from self._choices(rest, {**chosen, parameter.name: value})

    def product_size(self) -> int:
        """Number of configs before constraints."""
        return sum(math.prod(map(len, options)) for _, options in self._boxes())

    def _enumerate(self) -> Iterator[Config]:
        """The valid configs, made one after the other, in the order of the product.

        What constraints have said of other configs with the same few values ends a branch early,
        or lets all of it pass without another question.
        """
        constraints = [Remembered.of(constraint) for constraint in self.constraints]
        for names, options in self._boxes():
            columns = [
                _Column(
                    name, tuple((name, value) for value in values), frozenset(names[place + 1 :])
                )
                for place, (name, values) in enumerate(zip(names, options, strict=True))
            ]
            yield from self._below(columns, (), {}, constraints)

    def _below(
        self,
        columns: list[_Column],
        begun: tuple[tuple[str, ParameterValue], ...],
        values: dict[str, ParameterValue],
        undecided: list[Remembered],
    ) -> Iterator[Config]:
        """The valid configs of a plain product that begin so; ``values`` are those of ``begun``."""
        place = len(begun)
        if not undecided:
            for rest in itertools.product(*(column.pairs for column in columns[place:])):
                yield Config(self.template, begun + rest)
            return
        if place == len(columns):
            config = Config(self.template, begun)
            if all(constraint.check(values, lambda: config) is None for constraint in undecided):
                yield config
            return
        column = columns[place]
        for pair in column.pairs:
            values[column.name] = pair[1]
            still = []
            for constraint in undecided:
                answer = constraint.known(values, column.missing)
                if answer is UNDECIDED:
                    still.append(constraint)
                elif answer is not None:
                    break
            else:
                yield from self._below(columns, (*begun, pair), values, still)
        del values[column.name]

    @cached_property
    def _valid(self) -> tuple[Config, ...] | None:
        """All valid configs, or None where there are too many to hold or to look through."""
        if self.product_size() > _MAX_PRODUCT:
            return None
        found = tuple(itertools.islice(self._enumerate(), MAX_ENUMERATED + 1))
        return found if len(found) <= MAX_ENUMERATED else None

    @property
    def is_enumerated(self) -> bool:
        """Whether the valid configs are held as a list; otherwise they are only sampled."""
        return self._valid is not None

    def __iter__(self) -> Iterator[Config]:
        """Every valid config, in a fixed order; made on the way where the space is too large."""
        return self._enumerate() if self._valid is None else iter(self._valid)

    def count(self) -> int:
        """Number of valid configs; where they are not enumerated, the product as an upper bound."""
        return self.product_size() if self._valid is None else len(self._valid)

    def refusals(self) -> dict[str, int]:
        """How many configs of the product each constraint is the first to refuse.

        Of a product that is too large to look through, what a fixed sample says.
        """
        counts = {constraint.name: 0.0 for constraint in self.constraints}
        for config, weight in self._weighted_product():
            for constraint in self.constraints:
                if constraint.check(config) is not None:
                    counts[constraint.name] += weight
                    break
        return {name: round(count) for name, count in counts.items()}

    def _weighted_product(self) -> Iterator[tuple[Config, float]]:
        """The product, or a sample of it, with how many configs each stands for."""
        if self.product_size() <= _MAX_PRODUCT:
            yield from ((config, 1.0) for config in self._product())
            return
        rng = random.Random(0)
        boxes = list(self._boxes())
        num_draws = -(-_NUM_WEIGHTED // len(boxes))
        for names, options in boxes:
            weight = math.prod(map(len, options)) / num_draws
            for _ in range(num_draws):
                values = tuple(rng.choice(values) for values in options)
                yield Config(self.template, tuple(zip(names, values, strict=True))), weight

    def sample(self, rng: random.Random) -> Config:
        """A valid config: uniformly at random where they are enumerated, else by rejection.

        Where constraints refuse nearly everything, the end of a random walk from the default.
        """
        if self._valid is not None:
            return rng.choice(self._valid)
        for _ in range(_MAX_REJECTIONS):
            config = self._draw(rng)
            if all(constraint.check(config) is None for constraint in self.constraints):
                return config
        config = self.default
        for _ in range(_WALK_STEPS):
            config = rng.choice(self.neighbours(config) or (config,))
        return config

    def _draw(self, rng: random.Random) -> Config:
        """A config of the product: a value for each parameter that is active in turn."""
        values = filled(self.parameters, lambda parameter: rng.choice(parameter.values))
        return Config.of(self.template, values)

    def valid_seeds(self) -> tuple[Config, ...]:
        """The default, then the seeds that are valid here, without repeats."""
        return tuple(
            dict.fromkeys([self.default, *(s for s in self.seeds if self.check(s) is None)])
        )

    def neighbours(self, config: Config) -> tuple[Config, ...]:
        """Valid configs that differ from ``config`` by one step in one parameter.

        A step that activates a parameter tries each of its values; one that deactivates a
        parameter drops it.
        """
        found: dict[Config, None] = {}
        values = config.as_dict()
        for parameter in self.active_parameters(values):
            for value in parameter.neighbours(values[parameter.name]):
                for candidate in self._completions({**values, parameter.name: value}):
                    if candidate != config and self.check(candidate) is None:
                        found[candidate] = None
        return tuple(found)

    def _completions(self, values: dict[str, ParameterValue]) -> Iterator[Config]:
        """Configs that keep these values where active and fill newly active parameters."""

        def extend(index: int, chosen: dict[str, ParameterValue]) -> Iterator[Config]:
            if index == len(self.parameters):
                yield Config.of(self.template, chosen)
                return
            parameter = self.parameters[index]
            if not parameter.is_active(chosen):
                yield from extend(index + 1, chosen)
                return
            options = (values[parameter.name],) if parameter.name in values else parameter.values
            for value in options:
                yield from extend(index + 1, {**chosen, parameter.name: value})

        yield from extend(0, {})

    def adapted(self, config: Config) -> Config | None:
        """A config of another problem's space of this template, made to fit; None where none does.

        A parameter that exists only here has the default's value, or the first one that is valid
        with the rest; one that does not exist here is dropped.
        """
        if config.template != self.template:
            return None
        values = {**self.default.as_dict(), **config.as_dict()}
        candidates = itertools.islice(self._completions(values), _MAX_COMPLETIONS)
        return next((c for c in candidates if self.check(c) is None), None)

    def fingerprint(self) -> str:
        """Sixteen hex digits over parameters, values and constraint names; order does not count."""
        parts = {
            "template": self.template,
            "parameters": sorted(
                [
                    p.name,
                    sorted(map(str, p.values)),
                    p.is_ordered,
                    [p.active_when.parent, sorted(map(str, p.active_when.values))]
                    if p.active_when
                    else None,
                    *([p.part] if p.part else []),
                ]
                for p in self.parameters
            ),
            "constraints": sorted(c.name for c in self.constraints),
        }
        return hashlib.sha256(canonical_json(parts).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class JointSpace:
    """The spaces of all templates that can serve a problem: the template is the first parameter."""

    spaces: tuple[SearchSpace, ...]

    def __post_init__(self) -> None:
        assert self.spaces, "a joint space needs a template"

    def __iter__(self) -> Iterator[Config]:
        for space in self.spaces:
            yield from space

    @property
    def is_enumerated(self) -> bool:
        """Whether the valid configs of every template are held as a list."""
        return all(space.is_enumerated for space in self.spaces)

    def count(self) -> int:
        """Number of valid configs over all templates, as far as ``SearchSpace.count`` knows it."""
        return sum(space.count() for space in self.spaces)

    def of(self, template: str) -> SearchSpace:
        """The space of that template.

        Raises:
            UnknownNameError: the template takes no part.
        """
        for space in self.spaces:
            if space.template == template:
                return space
        raise UnknownNameError("template", template, [s.template for s in self.spaces])

    def check(self, config: Config) -> str | None:
        """None if the config is in the space of its template, else the reason why not."""
        for space in self.spaces:
            if space.template == config.template:
                return space.check(config)
        return f"template {config.template!r} takes no part in this search"

    def adapted(self, config: Config) -> Config | None:
        """The config made to fit the space of its template; None where that is not possible."""
        fitting = (space.adapted(config) for space in self.spaces)
        return next((adapted for adapted in fitting if adapted is not None), None)

    @property
    def default(self) -> Config:
        """What runs untuned: the default of the first template."""
        return self.spaces[0].default

    def valid_seeds(self) -> tuple[Config, ...]:
        """Defaults of all templates first, then their seeds, a template's after another's."""
        turns = itertools.zip_longest(*(space.valid_seeds() for space in self.spaces))
        return tuple(dict.fromkeys(seed for turn in turns for seed in turn if seed is not None))

    def neighbours(self, config: Config) -> tuple[Config, ...]:
        """Neighbours inside the template of ``config``."""
        return self.of(config.template).neighbours(config)

    def fingerprint(self) -> str:
        """Sixteen hex digits over the fingerprints of the parts."""
        text = canonical_json(sorted(space.fingerprint() for space in self.spaces))
        return hashlib.sha256(text.encode()).hexdigest()[:16]
