"""Short names of problems: what all of an operation share, and defaults, are said once."""

from __future__ import annotations

from collections.abc import Collection

import pandas as pd

from .collected import Collected
from .searches import Search
from .wording import common_fields, default_words, problem_text, slug

__all__ = ["ProblemNames", "problem_anchor"]


def problem_anchor(search: Search) -> str:
    """The HTML id of the plots of the search's problem."""
    problem = search.key.problem
    return slug(["problem", problem.op, *map(str, problem.as_dict().values())])


class ProblemNames:
    """The names, by operation and by what distinguishes its problems in this report."""

    def __init__(self, collected: Collected, drawn: Collection[str] = ()) -> None:
        """``drawn`` are the anchors of problems that have a plot."""
        self.by_op: dict[str, dict[str, str]] = {}
        current = collected.current
        problems = [search.key.problem for search in current]
        problems += [baseline.key.problem for baseline in collected.baselines]
        self.defaults: dict[str, dict[str, str]] = {}
        """Fields that need not be told, with their default, less those that all share."""
        for problem in {problem.op: problem for problem in problems}.values():
            shared = common_fields(p for p in problems if p.op == problem.op)
            words = default_words(problem)
            self.by_op[problem.op] = shared
            self.defaults[problem.op] = {n: w for n, w in words.items() if n not in shared}
        self.short: dict[tuple[str, str], str] = {}
        self.anchors: dict[tuple[str, str], str] = {}
        for problem in problems:
            place = (problem.op, str(problem))
            self.short[place] = problem_text(problem, self.by_op[problem.op])
        for search in current:
            if problem_anchor(search) in drawn:
                place = (search.key.problem.op, str(search.key.problem))
                self.anchors[place] = f"#{problem_anchor(search)}"

    def shortened(self, frame: pd.DataFrame) -> pd.DataFrame:
        """The frame with short problem names and the links to their plots."""
        if "problem" not in frame.columns:
            return frame
        places = list(zip(frame["op"], frame["problem"], strict=True))
        return frame.assign(
            problem=[self.short.get(place, place[1]) for place in places],
            problem_href=[self.anchors.get(place, "") for place in places],
        )

    def shared_sentences(self) -> list[str]:
        """What is left out of the short names, an operation a sentence."""
        sentences = []
        for op, fields in self.by_op.items():
            shared = " ".join(f"{name}={value}" for name, value in fields.items())
            defaults = " ".join(f"{name}={word}" for name, word in self.defaults[op].items())
            parts = [f"all {op} problems here have {shared}"] if shared else []
            if defaults:
                where = "and" if shared else f"{op} problems have"
                parts.append(f"{where}, where a row does not say otherwise, {defaults}")
            if parts:
                sentences.append(" ".join(parts))
        return [sentence[0].upper() + sentence[1:] for sentence in sentences]
