"""Foreign winners in a search: few where they mislead, all where they help, followed by none."""

from __future__ import annotations

import pytest
from formula_evaluator import timing
from tilescout.kernels.base import Config
from tilescout.search_spaces.parameters import ordered
from tilescout.search_spaces.space import JointSpace, SearchSpace
from tilescout.tuner.records import Evaluation, Provenance, TrialStatus
from tilescout.tuner.search.foreign import NUM_PROBES
from tilescout.tuner.search.samplers import make_sampler, sampler_names

NUM_TRIALS = 200
START = 20
"""Own trials at the start of a search of that length."""
FAILED = None


def config_at(a: int, b: int, c: int) -> Config:
    return Config.of("t", {"a": a, "b": b, "c": c})


SPACE = JointSpace(
    (
        SearchSpace(
            template="t",
            parameters=tuple(ordered(name, *range(12)) for name in "abc"),
            constraints=(),
            default=config_at(0, 0, 0),
        ),
    )
)
FOREIGN = [config_at(11, 11, c) for c in range(8)]


def ended(config: Config, time_us: float | None) -> Evaluation:
    if time_us is FAILED:
        return Evaluation(config, TrialStatus.CRASHED, Provenance.MEASURED, "no luck")
    return Evaluation(config, TrialStatus.OK, Provenance.MEASURED, timing=timing(time_us))


def own_time_us(config: Config) -> float:
    """20 to 53: fastest at the default, far away from the foreign winners."""
    return 20.0 + sum(int(config[name]) for name in "abc")


def course(sampler, num_trials: int, foreign_us: float | None, num_in_flight: int = 1):
    """Configs in the order in which they were asked for."""
    asked: list[Config] = []
    while len(asked) < num_trials:
        batch = sampler.ask(num_in_flight)
        asked += batch
        for config in batch:
            sampler.tell(ended(config, foreign_us if config in FOREIGN else own_time_us(config)))
    return asked


def sampler_of(*, seed=0, name="portfolio", first=(), foreign=FOREIGN):
    return make_sampler(name, SPACE, seed=seed, num_trials=NUM_TRIALS, first=first, foreign=foreign)


@pytest.mark.parametrize("name", sampler_names())
@pytest.mark.parametrize("foreign_us", [100.0, FAILED], ids=["slow", "failed"])
def test_misleading_source_is_dropped_after_the_probes(name, foreign_us):
    asked = course(sampler_of(name=name), START, foreign_us)
    assert [config for config in asked if config in FOREIGN] == FOREIGN[:NUM_PROBES]


@pytest.mark.parametrize("name", sampler_names())
def test_good_source_is_tried_in_full_in_turn_with_own_trials(name):
    asked = course(sampler_of(name=name), START, 10.0)
    assert asked[0 : 2 * len(FOREIGN) : 2] == FOREIGN
    assert not set(asked[1 : 2 * len(FOREIGN) : 2]) & set(FOREIGN)


def test_others_wait_for_the_probes_to_end_however_many_are_in_flight():
    sampler = sampler_of()
    asked = sampler.ask(16)
    assert [config for config in asked if config in FOREIGN] == FOREIGN[:NUM_PROBES]
    for config in asked:
        sampler.tell(ended(config, 10.0 if config in FOREIGN else own_time_us(config)))
    assert set(FOREIGN) <= {*asked, *sampler.ask(16)}


def test_source_that_others_overtake_is_dropped_later():
    """Best of the start at first, but not of the best quarter once more is known."""
    sampler = sampler_of()
    asked: list[Config] = []
    for index in range(30):
        (config,) = sampler.ask(1)
        asked.append(config)
        own_us = 40.0 if index < 8 else 20.0
        sampler.tell(ended(config, 30.0 if config in FOREIGN else own_us))
    assert NUM_PROBES < sum(config in FOREIGN for config in asked) < len(FOREIGN)


def test_start_has_as_many_own_trials_as_a_cold_one():
    """A cold search of the same seed draws the same random start."""
    cold = course(sampler_of(foreign=()), START, FAILED)
    warm = course(sampler_of(), START + len(FOREIGN), 10.0)
    assert [config for config in warm if config not in FOREIGN] == cold


def test_search_does_not_follow_foreign_winners_even_the_best():
    """What looks best of all may lie in a poor basin: its neighbours are left alone."""
    asked = course(sampler_of(), 80, 10.0)
    late = asked[START + len(FOREIGN) :]
    near = {neighbour for config in FOREIGN for neighbour in SPACE.neighbours(config)}
    assert sum(config in near for config in late) <= 2
    assert min(map(own_time_us, late)) <= 21.0


def test_seeds_come_first_and_do_not_judge():
    seeds = [config_at(0, 0, 0), config_at(0, 0, 1)]
    asked = course(sampler_of(first=seeds), 18, 21.5)
    assert asked[:2] == seeds
    assert set(FOREIGN) <= set(asked)


def test_search_that_goes_on_remembers_the_verdict():
    before = course(sampler_of(), 12, 100.0)
    sampler = sampler_of(seed=2)
    for config in before:
        sampler.tell(ended(config, 100.0 if config in FOREIGN else own_time_us(config)))
    after = course(sampler, 12, 100.0)
    assert not set(before) & set(after)
    assert not set(FOREIGN) & set(after)


def test_small_space_is_tried_in_full():
    space = JointSpace(
        (
            SearchSpace(
                template="t",
                parameters=tuple(ordered(name, 0, 11) for name in "abc"),
                constraints=(),
                default=config_at(0, 0, 0),
            ),
        )
    )
    foreign = list(space)[:5]
    sampler = make_sampler("portfolio", space, seed=0, num_trials=20, foreign=foreign)
    asked = []
    while configs := sampler.ask(1):
        asked += configs
        sampler.tell(ended(configs[0], 5.0))
    assert sorted(asked, key=str) == sorted(space, key=str)
