"""The toy operation with one more behaviour: a config that dies only after many launches."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import ClassVar

import toy_op

LAUNCHES_TO_LIVE = 6


@dataclass(frozen=True)
class LateToyProblem(toy_op.ToyProblem):
    """Same as the toy's, under another name."""

    op: ClassVar[str] = "late_toy"


class LateToyLauncher:
    """Launches as the toy does and counts."""

    def __init__(self, config):
        self._launcher = toy_op.ToyLauncher(config)
        self._launches = 0

    def launch(self, inputs, outputs) -> None:
        self._launches += 1
        is_mortal = self._launcher.config.get("behaviour") == "die_late"
        if is_mortal and self._launches > LAUNCHES_TO_LIVE:
            os._exit(13)
        self._launcher.launch(inputs, outputs)


class LateToyTemplate(toy_op.ToyTemplate):
    op = "late_toy"

    def build(self, problem, config, inputs):
        return LateToyLauncher(config)


OPERATION = replace(
    toy_op.OPERATION,
    name="late_toy",
    problem_type=LateToyProblem,
    load_template=lambda name: LateToyTemplate(),
)
