"""The sampler: seeds first, valid and new configs only, and better than chance."""

from __future__ import annotations

import random
import statistics

import pytest
from formula_evaluator import timing
from hypothesis import given, settings
from hypothesis import strategies as st
from tilescout.kernels.base import Config
from tilescout.search_spaces.constraints import Constraint
from tilescout.search_spaces.parameters import ActiveWhen, categorical, ordered
from tilescout.search_spaces.space import JointSpace, SearchSpace
from tilescout.tuner.records import Evaluation, Provenance, TrialStatus
from tilescout.tuner.search.nearest import UntriedConfigs
from tilescout.tuner.search.samplers import make_sampler, sampler_names


def part(template: str) -> SearchSpace:
    return SearchSpace(
        template=template,
        parameters=(
            ordered("a", 1, 2, 3, 4),
            categorical("mode", "x", "y"),
            ordered("b", 1, 2, 4, active_when=ActiveWhen("mode", ("y",))),
            categorical("flag", True, False),
        ),
        constraints=(Constraint("odd", lambda c: "a=3 is odd" if c["a"] == 3 else None),),
        default=Config.of(template, {"a": 1, "mode": "x", "flag": True}),
    )


TWO_TEMPLATES = JointSpace((part("s"), part("t")))


def sampler_of(space, *, seed, name="portfolio", first=(), num_trials=60):
    return make_sampler(name, space, seed=seed, num_trials=num_trials, first=first)


def told(config: Config, status: TrialStatus = TrialStatus.OK) -> Evaluation:
    if status is TrialStatus.OK:
        time_us = 1.0 + int(config["a"]) + (config.template == "s")
        return Evaluation(config, status, Provenance.MEASURED, timing=timing(time_us))
    return Evaluation(config, status, Provenance.MEASURED, "no luck")


@pytest.mark.parametrize("name", sampler_names())
@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 2**20), batch=st.integers(1, 5))
def test_asks_every_valid_config_once_over_all_templates(name, seed, batch):
    sampler = sampler_of(TWO_TEMPLATES, seed=seed, name=name)
    asked: list[Config] = []
    while configs := sampler.ask(batch):
        assert len(configs) <= batch
        asked += configs
        for config in configs:
            sampler.tell(told(config))
    assert len(asked) == len(set(asked)) == TWO_TEMPLATES.count()
    assert set(asked) == set(TWO_TEMPLATES)
    assert sampler.ask(1) == []


def test_first_configs_come_first_in_order_without_repeats_or_invalid_ones():
    valid = list(TWO_TEMPLATES)
    invalid = valid[0].replace(a=3)
    sampler = sampler_of(
        TWO_TEMPLATES, seed=0, first=[valid[5], invalid, valid[2], valid[5], valid[9]]
    )
    sampler.tell(told(valid[2]))
    assert sampler.ask(2) == [valid[5], valid[9]]


def test_does_not_ask_for_what_it_was_told():
    known = list(TWO_TEMPLATES)[:-3]
    sampler = sampler_of(TWO_TEMPLATES, seed=1)
    for config in known:
        sampler.tell(told(config, TrialStatus.CRASHED))
    assert set(sampler.ask(10)) == set(TWO_TEMPLATES) - set(known)


@pytest.mark.parametrize("name", sampler_names())
def test_same_seed_and_same_trials_give_same_proposals(name):
    def course(seed: int) -> list[Config]:
        sampler = sampler_of(TWO_TEMPLATES, seed=seed, name=name)
        asked = []
        for _ in range(15):
            (config,) = sampler.ask(1)
            asked.append(config)
            sampler.tell(told(config))
        return asked

    assert course(3) == course(3)
    assert course(3) != course(4)


def test_foreign_trial_outside_the_space_is_ignored():
    sampler = sampler_of(TWO_TEMPLATES, seed=0)
    sampler.tell(told(Config.of("u", {"a": 1})))
    assert len(sampler.ask(100)) == TWO_TEMPLATES.count()


def large_space() -> JointSpace:
    return JointSpace(
        (
            SearchSpace(
                template="t",
                parameters=tuple(ordered(name, *range(12)) for name in "abc"),
                constraints=(),
                default=Config.of("t", dict.fromkeys("abc", 0)),
            ),
        )
    )


def best_of(num_trials: int, seed: int, name: str) -> float:
    sampler = sampler_of(large_space(), seed=seed, name=name)
    best = float("inf")
    for _ in range(num_trials):
        (config,) = sampler.ask(1)
        time_us = 1.0 + sum(
            abs(int(config[name]) - best_at) for name, best_at in (("a", 7), ("b", 3), ("c", 9))
        )
        best = min(best, time_us)
        sampler.tell(
            Evaluation(config, TrialStatus.OK, Provenance.MEASURED, timing=timing(time_us))
        )
    return best


@pytest.mark.parametrize("name", [name for name in sampler_names() if name != "random"])
def test_learns_from_what_it_is_told(name):
    seeds = range(6)
    searched = statistics.mean(best_of(60, seed, name) for seed in seeds)
    by_chance = statistics.mean(best_of(60, seed, "random") for seed in seeds)
    assert searched < 0.75 * by_chance


def test_learns_to_avoid_a_template_that_fails():
    sampler = sampler_of(TWO_TEMPLATES, seed=2)
    asked = []
    for _ in range(24):
        (config,) = sampler.ask(1)
        asked.append(config.template)
        fate = TrialStatus.OK if config.template == "t" else TrialStatus.COMPILE_ERROR
        sampler.tell(told(config, fate))
    late = asked[12:]
    assert late.count("t") > late.count("s")


def test_nearest_is_the_proposal_or_one_step_away():
    untried = UntriedConfigs(TWO_TEMPLATES)
    rng = random.Random(0)
    config = Config.of("s", {"a": 2, "mode": "y", "b": 2, "flag": True})
    assert untried.nearest(config, rng) == config
    untried.remove(config)
    moved = untried.nearest(config, rng)
    assert moved in TWO_TEMPLATES.neighbours(config)
    invalid = config.replace(a=3)
    assert untried.nearest(invalid, rng) == config.replace(a=4)


def test_nearest_goes_to_another_template_when_one_is_used_up():
    untried = UntriedConfigs(TWO_TEMPLATES)
    for config in part("s"):
        untried.remove(config)
        untried.remove(config)
    assert len(untried) == part("t").count()
    found = untried.nearest(part("s").default, random.Random(0))
    assert found.template == "t"
    for config in part("t"):
        untried.remove(config)
    assert untried.nearest(part("s").default, random.Random(0)) is None


def huge_space() -> JointSpace:
    """Two templates, 10^9 configs each before a constraint."""

    def part(template: str) -> SearchSpace:
        return SearchSpace(
            template=template,
            parameters=tuple(ordered(name, *range(10)) for name in "abcdefghi"),
            constraints=(
                Constraint("sum", lambda c: "too much" if int(c["a"]) + int(c["b"]) > 12 else None),
            ),
            default=Config.of(template, dict.fromkeys("abcdefghi", 1)),
        )

    return JointSpace((part("s"), part("t")))


@pytest.mark.parametrize("name", sampler_names())
def test_huge_space_is_searched_without_enumerating_it(name, monkeypatch):
    def refuse(self):
        raise AssertionError("enumerated")

    monkeypatch.setattr(SearchSpace, "_product", refuse)
    space = huge_space()
    sampler = sampler_of(space, seed=0, name=name, first=[space.default])
    best: list[float] = []
    asked = []
    for _ in range(60):
        (config,) = sampler.ask(1)
        assert space.check(config) is None
        asked.append(config)
        time_us = 1.0 + sum(abs(int(config[p]) - 7) for p in "abcdefghi")
        time_us += 5.0 * (config.template == "s")
        best.append(min([time_us, *best[-1:]]))
        sampler.tell(
            Evaluation(config, TrialStatus.OK, Provenance.MEASURED, timing=timing(time_us))
        )
    assert asked[0] == space.default
    assert len(set(asked)) == 60
    if name != "random":
        assert best[-1] < 0.85 * best[11]


def test_the_optuna_study_holds_every_trial_as_it_ran():
    sampler = sampler_of(TWO_TEMPLATES, seed=0, num_trials=30, first=[TWO_TEMPLATES.default])
    asked = []
    for _ in range(30):
        asked += sampler.ask(1)
        sampler.tell(told(asked[-1]))
    trials = sampler.study.trials
    assert len(trials) == len(asked) == 30
    for trial, config in zip(trials, asked, strict=True):
        assert trial.params["template"] == config.template
        prefix = f"{config.template}."
        assert {name.removeprefix(prefix) for name in trial.params} == {
            "template",
            *config.as_dict(),
        }
        assert trial.params[f"{prefix}mode"] == config["mode"]


def test_start_is_half_fresh_however_much_comes_first():
    space = large_space()
    first = [c for c in space if int(c["a"]) + int(c["b"]) + int(c["c"]) < 4][:18]
    sampler = sampler_of(space, seed=0, num_trials=200, first=first)
    asked = []
    for _ in range(28):
        (config,) = sampler.ask(1)
        asked.append(config)
        # All but the first are failures, so nothing could draw the search to where it went.
        fate = TrialStatus.OK if config == first[0] else TrialStatus.CRASHED
        sampler.tell(
            Evaluation(config, fate, Provenance.MEASURED, timing=timing(1.0))
            if fate is TrialStatus.OK
            else Evaluation(config, fate, Provenance.MEASURED, "no luck")
        )
    assert asked[:18] == first
    fresh = asked[18:]
    distances = [sum(int(config[name]) for name in "abc") for config in fresh]
    assert statistics.mean(distances) > 10


def test_batch_in_flight_is_diverse():
    """Asked for many at once, as a compile pool does, it does not repeat or crowd."""
    space = large_space()
    sampler = sampler_of(space, seed=0, num_trials=60)
    for config in sampler.ask(12):
        time_us = 1.0 + int(config["a"])
        sampler.tell(
            Evaluation(config, TrialStatus.OK, Provenance.MEASURED, timing=timing(time_us))
        )
    batch = sampler.ask(24)
    assert len(set(batch)) == 24
    assert len({config["b"] for config in batch}) > 4
    assert len({config["c"] for config in batch}) > 4
