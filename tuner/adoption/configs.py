"""Triton's configs as ours and back: meta-parameters and launch options by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ...kernels.base import Config, ParameterValue

__all__ = ["TEMPLATE", "ConfigTable"]

TEMPLATE = "triton"
"""Name of the one template of a user's kernel."""

_ALTERNATIVE = "alternative"
"""Tells configs apart that differ in their hooks only."""


class ConfigTable:
    """The configs of one kernel, in the order in which its author wrote them."""

    def __init__(self, configs: Iterable[Any]) -> None:
        self._ours: dict[Any, Config] = {}
        self._theirs: dict[Config, Any] = {}
        for config in configs:
            values = _values(config.all_kwargs())
            ours = Config.of(TEMPLATE, values)
            number = 1
            while ours in self._theirs:
                number += 1
                ours = Config.of(TEMPLATE, {**values, _ALTERNATIVE: number})
            if config not in self._ours:
                self._ours[config] = ours
                self._theirs[ours] = config

    @property
    def all(self) -> tuple[Config, ...]:
        """Every config, the author's first one first."""
        return tuple(self._theirs)

    def ours(self, config: Any) -> Config | None:
        """Our form of one of Triton's; None for one that is not in the table."""
        return self._ours.get(config)

    def theirs(self, config: Config) -> Any | None:
        """Triton's form of one of ours; None for one that is not in the table."""
        return self._theirs.get(config)


def _values(kwargs: Mapping[str, Any]) -> dict[str, ParameterValue]:
    return {
        name: value if isinstance(value, bool | int | str) else repr(value)
        for name, value in kwargs.items()
    }
