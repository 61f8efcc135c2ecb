"""The toy operation with a library's kernel beside ours; the library is one that is installed.

It works in place: it doubles ``x`` where outputs share it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import ClassVar

import toy_op
from tilescout.kernels.base import Config
from tilescout.kernels.external import ExternalTemplate, Library
from tilescout.search_spaces.external import external_spaces

MODULE = "rival_toy_op"
WORKLOAD = """
name = "rivals"
description = "One problem."
source = "made up"

[[problems]]
op = "rival_toy"
label = "rival {size}"
size = [64]
"""


@dataclass(frozen=True)
class RivalToyProblem(toy_op.ToyProblem):
    """Same as the toy's, under another name; the library takes no other size than 64."""

    op: ClassVar[str] = "rival_toy"


class RivalToyTemplate(toy_op.ToyTemplate):
    op = "rival_toy"


class LibraryLauncher:
    def launch(self, inputs: dict, outputs: dict) -> None:
        if outputs["y"] is not inputs["x"]:
            outputs["y"].copy_(inputs["x"])
            time.sleep(0.005)  # far slower than in place
        outputs["y"].mul_(2.0)


class LibraryTemplate(ExternalTemplate):
    op = "rival_toy"
    name = "library"
    backend = "cute"
    library = Library("pebble", "5.0", ("pebble",))
    module = "pebble"
    sources = (MODULE,)
    is_in_place = True

    def refusal(self, problem: RivalToyProblem, device: object) -> str | None:
        return None if problem.size == 64 else f"size={problem.size} is not 64"

    def build(self, problem: RivalToyProblem, config: Config, inputs: dict) -> LibraryLauncher:
        return LibraryLauncher()


def make_in_place(problem: RivalToyProblem, inputs: dict) -> tuple[dict, dict]:
    x = inputs["x"].clone()
    return {"x": x}, {"y": x}


TEMPLATES = {"triton": RivalToyTemplate, "library": LibraryTemplate}
SPACES = {"triton": toy_op.toy_space, **external_spaces("library")}
OPERATION = replace(
    toy_op.OPERATION,
    name="rival_toy",
    problem_type=RivalToyProblem,
    template_names=tuple(TEMPLATES),
    load_template=lambda name: TEMPLATES[name](),
    make_in_place=make_in_place,
)
