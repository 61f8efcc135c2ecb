"""How a search of parts flows where compilers take their time: by a clock that only waiting moves.

The space, its kernels and the compile pool's queue are real; compilers and the GPU are not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from formula_evaluator import RecordingListener
from tilescout.kernels.base import Config, Problem
from tilescout.kernels.tilelang_spec import TileLangKernelSpec
from tilescout.search_spaces.registry import joint_space
from tilescout.tuner import catalog
from tilescout.tuner.search.partwise import run_search
from tilescout.tuner.store import Store
from toy_study import toy_key
from waiting_compilers import WaitingCompilers, WaitingEvaluator

PARTS = ("gate", "intra", "transition", "stitch", "scan", "output")
INPUTS_S = 1.2
"""Until the GPU worker has the inputs of a problem."""


def made_up_us(config: Config, part: str) -> float:
    """Parts add; each takes 20 to 60 us by its values and what is shared."""
    shared = [config.get(name) for name in ("chunk", "form")]
    total = 0.0
    for name in PARTS if not part else (part,):
        own = [pair for pair in config.values if pair[0].startswith(name)]
        if own:
            digest = hashlib.sha256(repr((own, shared)).encode()).digest()
            total += 20.0 + 40.0 * digest[0] / 255
    return total


def as_compilers_take(spec: Any) -> float:
    """Seconds: TileLang's scan, Triton's unrolled blocks, other Triton kernels."""
    if isinstance(spec, TileLangKernelSpec):
        return 15.0
    return 6.0 if spec.module.endswith("intra_blocks") else 3.0


@dataclass
class Ended:
    """A search, seconds counted from its start."""

    trials: list[tuple[float, str, Config]]
    took_s: float
    best: Config

    @property
    def whole_templates(self) -> set[str]:
        return {config.template for _, part, config in self.trials if not part}


@pytest.fixture(scope="module")
def problems() -> list[Problem]:
    return [entry.problem for entry in catalog.workload("gdn_chunk").problems]


@pytest.fixture
def run(h200: Any) -> Callable[..., Ended]:
    def search(
        compilers: WaitingCompilers, problem: Problem, budget_s: float | None = None
    ) -> Ended:
        space = joint_space(problem, h200)
        start = compilers.now
        deadline = None if budget_s is None else start + budget_s
        trials: list[tuple[float, str, Config]] = []
        hashes = tuple((part.template, "made up") for part in space.spaces)
        changes = {"space_fingerprint": space.fingerprint(), "template_hashes": hashes}
        compilers.move_to(start + INPUTS_S)
        with Store.open(":memory:") as store:
            winner = run_search(
                space=space,
                evaluators=lambda study, scope: WaitingEvaluator(
                    problem, compilers, made_up_us, scope=scope, deadline=deadline, log=trials
                ),
                store=store,
                study=store.study(toy_key(h200, problem, **changes), seed=0),
                num_trials=100,
                deadline=deadline,
                seed=0,
                num_finalists=5,
                listener=RecordingListener(),
                clock=lambda: compilers.now,
            )
        assert winner is not None
        ended = [(now - start, part, config) for now, part, config in trials]
        return Ended(ended, compilers.now - start, winner.trial.evaluation.config)

    return search


def test_compilers_work_side_by_side(run: Callable[..., Ended], problems: list[Problem]) -> None:
    """One after the other, the compiles alone of 100 trials would take 500 s."""
    ended = run(WaitingCompilers(16, lambda spec: 5.0), problems[3])
    assert len(ended.trials) >= 80
    assert ended.took_s < 50.0


def test_a_short_budget_is_spent_on_trials_and_serves_the_next_problem(
    run: Callable[..., Ended], problems: list[Problem]
) -> None:
    compilers = WaitingCompilers(15, as_compilers_take)
    first, second = (run(compilers, problem, 14.75) for problem in problems[:2])
    # TileLang is not ready in time, and nobody waits for it.
    assert first.whole_templates == {"triton"}
    assert len(first.trials) >= 20
    assert first.took_s < 17.0
    # What compiled for the first goes on meanwhile.
    assert second.whole_templates == {"triton", "tilelang"}
    assert second.trials[0][0] < 2.0
    assert len(second.trials) >= 40


def test_a_compiler_that_does_not_end_costs_its_own_algorithm_alone(
    run: Callable[..., Ended], problems: list[Problem]
) -> None:
    def compile_s(spec: Any) -> float:
        return 1000.0 if isinstance(spec, TileLangKernelSpec) else 3.0

    ended = run(WaitingCompilers(15, compile_s), problems[3], 30.0)
    assert ended.whole_templates == {"triton"}
    assert len(ended.trials) >= 40
    assert ended.took_s < 33.0
