"""The toy operation whose template says how it launches: ``num_stages`` does not matter."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import toy_op


@dataclass(frozen=True)
class TwinToyProblem(toy_op.ToyProblem):
    """Same as the toy's, under another name."""

    op: ClassVar[str] = "twin_toy"


class TwinToyTemplate(toy_op.ToyTemplate):
    op = "twin_toy"

    def launch_key(self, problem, config):
        return f"num_splits={config.get('num_splits')}"


OPERATION = replace(
    toy_op.OPERATION,
    name="twin_toy",
    problem_type=TwinToyProblem,
    load_template=lambda name: TwinToyTemplate(),
)
"""Registered by tests as ``twin_toy``."""
