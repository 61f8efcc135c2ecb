"""Spaces of external templates: one config each, what the library chooses by itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ..kernels.base import Config
from ..kernels.device import DeviceSpec
from .space import SearchSpace

__all__ = ["external_spaces"]


def external_spaces(*templates: str) -> dict[str, Callable[[Any, DeviceSpec], SearchSpace]]:
    """The space of each external template by its name."""
    return {name: partial(_one_config, name) for name in templates}


def _one_config(template: str, problem: Any, device: DeviceSpec) -> SearchSpace:
    del problem, device
    return SearchSpace(template, (), (), Config.of(template, {}))
