"""Validated reading of a decoded JSON object: every error names the place, value and what fits.

Used for columns of a database and rows of an import file alike; both may come from anywhere.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from reprlib import Repr
from typing import TypeGuard

from ...errors import UsageError

__all__ = ["Fields", "decode_json", "is_integer", "is_number"]

_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_MISSING = object()
_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxother = 60


def is_integer(value: object) -> TypeGuard[int]:
    """Whether it is an integer that any database can hold; ``True`` is none."""
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether it is a finite number; ``True`` is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value) if isinstance(value, float) else is_integer(value)


def decode_json(where: str, text: object) -> object:
    """The value of a JSON text.

    Raises:
        UsageError: it is no JSON.
    """
    if not isinstance(text, str):
        raise UsageError(f"{where} must be JSON text, not {_SHORT.repr(text)}")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where} is not valid JSON ({error}): {_SHORT.repr(text)}") from None


class Fields:
    """One JSON object and its place in the input; remembers which fields were asked for."""

    def __init__(self, where: str, value: object) -> None:
        if not isinstance(value, Mapping):
            raise UsageError(f"{where}={_SHORT.repr(value)} must be an object")
        self.where = where
        self._value = value
        self._known: dict[str, None] = {}

    def _get(self, name: str, default: object = _MISSING) -> object:
        self._known[name] = None
        value = self._value.get(name, default)
        if value is _MISSING:
            raise UsageError(f"{self.where} lacks the field {name!r}")
        return value

    def refuse(self, name: str, what: str) -> UsageError:
        """The error for a field whose value is not ``what``."""
        value = _SHORT.repr(self._value.get(name))
        return UsageError(f"{self.where}.{name}={value} must be {what}")

    def has(self, name: str) -> bool:
        """Whether the field is there and not null; asking makes it a known field."""
        return self._get(name, None) is not None

    def text(self, name: str, *, default: str | None = None) -> str:
        """A text field."""
        value = self._get(name, _MISSING if default is None else default)
        if not isinstance(value, str):
            raise self.refuse(name, "text")
        return value

    def one_of(self, name: str, allowed: Collection[str]) -> str:
        """A text field with closed choices."""
        value = self._get(name)
        if not isinstance(value, str) or value not in allowed:
            raise self.refuse(name, f"one of {', '.join(allowed)}")
        return value

    def integer(self, name: str, *, at_least: int | None = None) -> int:
        """An integer field."""
        value = self._get(name)
        what = "an integer" if at_least is None else f"an integer of at least {at_least}"
        if not is_integer(value) or (at_least is not None and value < at_least):
            raise self.refuse(name, what)
        return value

    def number(self, name: str, *, at_least: float, at_most: float = math.inf) -> float:
        """A finite number field."""
        value = self._get(name)
        what = f"a finite number of at least {at_least:g}"
        if at_most < math.inf:
            what = f"a number from {at_least:g} to {at_most:g}"
        if not is_number(value) or not at_least <= value <= at_most:
            raise self.refuse(name, what)
        return float(value)

    def positive(self, name: str) -> float:
        """A finite number field above 0: something divides by it."""
        value = self._get(name)
        if not is_number(value) or value <= 0:
            raise self.refuse(name, "a finite number above 0")
        return float(value)

    def any_number(self, name: str) -> float | None:
        """A number that may be null or, as text, ``nan``, ``inf`` or ``-inf``."""
        value = self._get(name)
        if value is None:
            return None
        if isinstance(value, str) and value in _NON_FINITE:
            return _NON_FINITE[value]
        if not is_number(value):
            raise self.refuse(name, "a number, null, 'nan', 'inf' or '-inf'")
        return float(value)

    def nested(self, name: str) -> Fields:
        """A field that is itself an object."""
        return Fields(f"{self.where}.{name}", self._get(name))

    def items(self, name: str) -> list[object]:
        """A field that is a list."""
        value = self._get(name)
        if not isinstance(value, list):
            raise self.refuse(name, "a list")
        return value

    def names(self) -> tuple[str, ...]:
        """Names of the fields that are there."""
        return tuple(str(name) for name in self._value)

    def raw(self, name: str) -> object:
        """The value as it stands."""
        return self._get(name)

    def finish(self) -> None:
        """Refuses fields that nobody asked for: most likely a name is misspelt."""
        for name in self._value:
            if name not in self._known:
                known = ", ".join(self._known)
                raise UsageError(f"{self.where} has an unknown field {name!r}: known are {known}")
