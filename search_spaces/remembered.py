"""Constraints whose answers are remembered by the few values that decide them.

Looking through a part asks a constraint about thousands of configs that differ in values it never
looks at. So what it reads is watched: a tree has the name it reads first, below each of its values
the name it reads next, and at the end the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar
from weakref import WeakKeyDictionary

from ..kernels.base import Config, ParameterValue
from .constraints import Constraint

__all__ = ["UNDECIDED", "Remembered"]


class _Undecided(Enum):
    UNDECIDED = "undecided"


UNDECIDED = _Undecided.UNDECIDED
"""Said of values that do not decide a constraint, or have not been asked about."""


@dataclass
class _Node:
    """A name that is read, or an answer."""

    name: str | None = None
    below: dict[ParameterValue | None, _Node] = field(default_factory=dict)
    answer: str | None = None


class Remembered:
    """A constraint with its answers; it must depend on nothing but the config."""

    _known: ClassVar[WeakKeyDictionary[Constraint, Remembered]] = WeakKeyDictionary()

    def __init__(self, constraint: Constraint) -> None:
        # Not the constraint, which would then live for ever as a key.
        self._check = constraint.check
        self._first: _Node | None = None
        self._reads_all = False

    @classmethod
    def of(cls, constraint: Constraint) -> Remembered:
        """The one of this constraint, which all spaces that share it share."""
        found = cls._known.get(constraint)
        if found is None:
            found = cls._known[constraint] = cls(constraint)
        return found

    def check(
        self, values: Mapping[str, ParameterValue], config: Callable[[], Config]
    ) -> str | None:
        """What the constraint says of ``config()``, whose values are ``values``."""
        if self._reads_all:
            return self._check(config())
        node = self._first
        while node is not None:
            if node.name is None:
                return node.answer
            node = node.below.get(values.get(node.name))
        return self._learnt(config())

    def known(
        self, values: Mapping[str, ParameterValue], missing: Collection[str]
    ) -> str | _Undecided | None:
        """What is remembered of every config with these values, whatever the missing ones are."""
        node = None if self._reads_all else self._first
        while node is not None:
            if node.name is None:
                return node.answer
            if node.name in missing:
                return UNDECIDED
            node = node.below.get(values.get(node.name))
        return UNDECIDED

    def _learnt(self, config: Config) -> str | None:
        watched = _Watched(config)
        answer = self._check(watched)
        if watched.is_read_whole:
            self._reads_all = True
            return answer
        leaf = _Node(answer=answer)
        names = list(watched.read.items())
        if self._first is None:
            self._first = _Node(names[0][0]) if names else leaf
        node = self._first
        for place, (_, value) in enumerate(names):
            is_last = place + 1 == len(names)
            following = leaf if is_last else _Node(names[place + 1][0])
            node = node.below.setdefault(value, following)
        return answer


class _Watched(Config):
    """A config that notes which of its values are read, in order."""

    read: dict[str, ParameterValue | None]
    is_read_whole: bool

    def __init__(self, config: Config) -> None:
        for name, value in (("_own", config), ("read", {}), ("is_read_whole", False)):
            object.__setattr__(self, name, value)
        object.__setattr__(self, "template", config.template)

    def __getattribute__(self, name: str) -> object:
        if name == "values":
            object.__setattr__(self, "is_read_whole", True)
            return object.__getattribute__(self, "_own").values
        return object.__getattribute__(self, name)

    def get(self, name: str, default: ParameterValue | None = None) -> ParameterValue | None:
        own: Config = object.__getattribute__(self, "_own")
        value = own.get(name)
        self.read.setdefault(name, value)
        return default if value is None else value

    def __getitem__(self, name: str) -> ParameterValue:
        value = self.get(name)
        if value is None:
            raise KeyError(name)
        return value
