from __future__ import annotations

import random

import pytest
from fake_timer import FakeTimer
from tilescout.tuner.measure import MeasureSettings, count_copies, count_launches, measure

SETTINGS = MeasureSettings()
MIB = 2**20


def nothing() -> None:
    pass


def constant(time_us: float, **kwargs: float) -> FakeTimer:
    return FakeTimer(lambda call: time_us, **kwargs)


def test_steady_times_end_after_the_fewest_samples() -> None:
    measurement = measure([nothing] * 4, constant(20.0), SETTINGS)
    assert not measurement.is_pruned
    assert measurement.timing.median_us == 20.0
    assert measurement.timing.num_samples == SETTINGS.min_samples


def test_noisy_times_are_sampled_up_to_the_cap() -> None:
    rng = random.Random(0)
    timer = FakeTimer(lambda call: 20.0 * rng.uniform(0.9, 1.1))
    timing = measure([nothing] * 4, timer, SETTINGS, keep_samples=True).timing
    assert timing.num_samples == len(timing.samples_us) == SETTINGS.max_samples
    assert timing.ci_low_us < timing.median_us < timing.ci_high_us


def test_a_noisy_time_far_above_the_best_is_not_sampled_to_the_end() -> None:
    rng = random.Random(0)
    timer = FakeTimer(lambda call: 20.0 * rng.uniform(0.9, 1.1))
    measurement = measure([nothing] * 4, timer, SETTINGS, best_us=15.0)
    assert not measurement.is_pruned
    assert measurement.timing.num_samples == SETTINGS.slow_samples


def test_what_looks_slow_and_is_not_gets_all_its_samples() -> None:
    """The pilot was unlucky: its estimate alone decides nothing."""
    times_us = iter([11.0, 11.0, 11.0])  # a launch, then the two runs of the pilot
    timing = measure(
        [nothing], FakeTimer(lambda call: next(times_us, 10.0)), SETTINGS, best_us=10.0
    ).timing
    assert timing.median_us == 10.0
    assert timing.num_samples == SETTINGS.slow_samples + SETTINGS.min_samples


@pytest.mark.parametrize(
    ("time_us", "is_pruned"),
    [(140.0, False), (149.0, False), (152.0, True), (100_000.0, True)],
)
def test_only_configs_clearly_slower_than_the_best_are_cut(time_us: float, is_pruned: bool) -> None:
    measurement = measure([nothing], constant(time_us), SETTINGS, best_us=100.0)
    assert measurement.is_pruned is is_pruned
    assert measurement.timing.median_us == time_us


def test_without_a_best_nothing_is_cut() -> None:
    assert not measure([nothing], constant(1e6), SETTINGS).is_pruned


def test_a_hopeless_config_costs_one_timed_launch() -> None:
    timer = constant(5000.0)
    measure([nothing] * 60, timer, SETTINGS, best_us=100.0)
    assert timer.num_timed_launches == 1


def test_host_overhead_of_an_eager_launch_cuts_nothing() -> None:
    timer = constant(5.0, eager_overhead_us=100.0)
    assert not measure([nothing], timer, SETTINGS, best_us=5.0).is_pruned


def test_each_copy_is_launched_before_it_is_captured() -> None:
    launched: list[int] = []
    calls = [lambda i=i: launched.append(i) for i in range(5)]
    measure(calls, constant(20.0), SETTINGS)
    assert launched == [1, 2, 3, 4]  # copy 0 by the rough estimate


@pytest.mark.parametrize(
    ("estimate_us", "copies", "launches"),
    [
        pytest.param(5.0, 60, 480, id="short: as many turns as the cap allows"),
        pytest.param(50.0, 4, 80, id="the target duration"),
        pytest.param(4000.0, 2, 2, id="long: one turn"),
        pytest.param(0.0, 3, 510, id="below the clock's resolution"),
    ],
)
def test_a_sample_is_whole_turns_of_about_the_target_duration(
    estimate_us: float, copies: int, launches: int
) -> None:
    assert count_launches(estimate_us, copies, SETTINGS) == launches


@pytest.mark.parametrize(
    ("moved", "held", "free", "copies"),
    [
        pytest.param(4 * MIB, 4 * MIB, 100_000 * MIB, 60, id="covers the L2 four times"),
        pytest.param(16_000 * MIB, 16_000 * MIB, 100_000 * MIB, 2, id="large: still two"),
        pytest.param(40_000 * MIB, 40_000 * MIB, 60_000 * MIB, 1, id="memory is short"),
        pytest.param(4 * MIB, 40 * MIB, 1000 * MIB, 10, id="a copy holds more than it moves"),
        pytest.param(1, 1, 100_000 * MIB, 512, id="tiny: capped"),
    ],
)
def test_copies_outrun_the_l2_as_far_as_memory_allows(
    moved: int, held: int, free: int, copies: int
) -> None:
    count = count_copies(
        bytes_moved=moved,
        bytes_held=held,
        l2_bytes=60 * MIB,
        free_bytes=free,
        settings=SETTINGS,
    )
    assert count == copies


@pytest.mark.parametrize(
    ("moved", "free", "copies"),
    [
        pytest.param(100 * MIB, 10_000 * MIB, 4, id="at-least-each-once"),
        pytest.param(25 * MIB, 10_000 * MIB, 12, id="rounded-up"),
        pytest.param(25 * MIB, 500 * MIB, 8, id="memory-rounds-down"),
        pytest.param(100 * MIB, 250 * MIB, 4, id="each-once-even-where-memory-is-short"),
    ],
)
def test_copies_hold_every_variant_equally_often(moved: int, free: int, copies: int) -> None:
    count = count_copies(
        bytes_moved=moved,
        bytes_held=moved,
        l2_bytes=60 * MIB,
        free_bytes=free,
        settings=SETTINGS,
        num_variants=4,
    )
    assert count == copies


def test_a_config_is_not_cut_for_the_slowest_of_several_variants() -> None:
    def slow() -> None: ...

    def fast() -> None: ...

    timer = FakeTimer(lambda call: 3000.0 if call is slow else 1000.0)
    calls = [slow, fast, fast, fast]
    timed = FakeTimer(lambda call: {slow: 3000.0, fast: 1000.0}[call])
    # The fake replays report the first call alone, so only the eager estimate is judged here.
    timed.time_us = lambda runs, *, is_kept=False: [1500.0 for _ in runs]  # type: ignore[method-assign]
    assert not measure(calls, timed, SETTINGS, best_us=1500.0, num_variants=4).is_pruned
    assert measure(calls, timer, SETTINGS, best_us=1500.0).is_pruned
