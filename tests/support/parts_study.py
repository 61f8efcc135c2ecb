"""Searches of the toy with parts in a real store, timed by its formulas; also a program to kill.

    python parts_study.py DATABASE LOG NUM_TRIALS

appends the study and the config to LOG before each evaluation.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import parts_toy_op
from formula_evaluator import FormulaEvaluator, RecordingListener, timing
from tilescout.kernels import registry
from tilescout.kernels.base import Config
from tilescout.search_spaces import registry as spaces
from tilescout.search_spaces.parts import PartScope
from tilescout.search_spaces.registry import joint_space
from tilescout.tuner import worker
from tilescout.tuner.records import Evaluation, TrialStatus
from tilescout.tuner.search.partwise import run_search
from tilescout.tuner.store import Store
from tilescout.tuner.store.records import StudyRecord
from toy_study import toy_device, toy_key


def register() -> None:
    registry.register("parts_toy", parts_toy_op.MODULE)
    spaces.register("parts_toy", parts_toy_op.MODULE)


class PartsEvaluator(FormulaEvaluator):
    """Times whole configs, or those of a part by its own formula."""

    def __init__(self, scope: PartScope | None, log: Evaluations, **options) -> None:
        super().__init__(**options)
        self.scope = scope
        self._log = log

    def collect(self, until: float | None = None) -> Evaluation:
        self._log.before(self._in_flight[0], self.scope)
        return super().collect()

    def evaluate(self, config: Config) -> Evaluation:
        whole = self.scope.whole(config) if self.scope else config
        fate = self._fate(whole)
        if fate is not None:
            return Evaluation(config, fate[0], self.provenance, fate[1])
        if self.scope is None:
            time_us = parts_toy_op.time_us(whole)
        else:
            time_us = parts_toy_op.part_time_us(whole, self.scope.part)
        return Evaluation(config, TrialStatus.OK, self.provenance, timing=timing(time_us))


class Evaluations:
    """Makes evaluators for a search and remembers every evaluation: (part, config), in order."""

    def __init__(
        self,
        *,
        fate: Callable[[Config], tuple[TrialStatus, str] | None] = lambda config: None,
        interrupt_after: int | None = None,
        file: Path | None = None,
    ) -> None:
        self.seen: list[tuple[str, Config]] = []
        self.bases: dict[str, list[Config]] = {}
        self.opened: list[PartsEvaluator] = []
        self._fate = fate
        self._interrupt_after = interrupt_after
        self._file = file

    def __call__(self, study: StudyRecord, scope: PartScope | None) -> PartsEvaluator:
        assert bool(study.key.part) == (scope is not None)
        if scope is not None:
            self.bases.setdefault(scope.part, []).append(scope.base)
        self.opened.append(PartsEvaluator(scope, self, fate=self._fate))
        return self.opened[-1]

    def before(self, config: Config, scope: PartScope | None) -> None:
        if len(self.seen) == self._interrupt_after:
            raise KeyboardInterrupt
        self.seen.append((scope.part if scope else "", config))
        if self._file is not None:
            time.sleep(0.02)
            with self._file.open("a") as file:
                file.write(f"{self.seen[-1][0]} {config.config_id}\n")

    def of(self, part: str) -> list[Config]:
        return [config for name, config in self.seen if name == part]


def search_parts(store, device, evaluations, *, size=64, space=None, listener=None, **changes):
    """Runs (or goes on with) the search of one problem of the toy with parts."""
    problem = parts_toy_op.PartsToyProblem(size=size)
    space = space or joint_space(problem, device)
    study = store.study(
        toy_key(device, problem, space_fingerprint=space.fingerprint()), seed=changes.get("seed", 0)
    )
    limits = {"num_trials": 80, "deadline": None, "seed": 0, "num_finalists": 3, **changes}
    return run_search(
        space=space,
        evaluators=evaluations,
        store=store,
        study=study,
        listener=listener or RecordingListener(),
        **limits,
    )


def count_visits() -> int:
    """A job of the GPU worker: how often it came to the inputs that are there now."""
    state = worker._prepared()
    state.num_visits = getattr(state, "num_visits", 0) + 1
    return state.num_visits


if __name__ == "__main__":
    register()
    database, log, num_trials = sys.argv[1:]
    with Store.open(database) as store:
        evaluations = Evaluations(file=Path(log))
        search_parts(store, toy_device(), evaluations, num_trials=int(num_trials))
