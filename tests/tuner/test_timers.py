from __future__ import annotations

import time

import pytest
from tilescout.tuner.timers import Run, WallTimer


def test_a_run_goes_round_the_calls() -> None:
    launched: list[int] = []
    calls = [lambda i=i: launched.append(i) for i in range(3)]
    WallTimer().prepare(calls, 7).enqueue()
    assert launched == [0, 1, 2, 0, 1, 2, 0]


def test_a_run_keeps_what_it_launches() -> None:
    """A graph refers to the scratch memory of its launchers by address alone."""
    calls = [lambda: None, lambda: None]
    assert WallTimer().prepare(calls, 5).calls == tuple(calls)


def test_times_are_per_launch() -> None:
    run = WallTimer().prepare([lambda: time.sleep(0.004)], 5)
    (time_us,) = WallTimer().time_us([run])
    assert 4000.0 <= time_us < 8000.0


def test_the_first_repetition_is_not_timed() -> None:
    repetitions: list[str] = []

    def run(name: str) -> Run:
        return Run(lambda: repetitions.append(name), 1)

    times_us = WallTimer().time_us([run("a"), run("b")])
    assert repetitions == ["b", "a", "b"]
    assert len(times_us) == 2


def test_a_slow_first_launch_does_not_show() -> None:
    delays = iter([0.05, 0.0, 0.0])
    assert WallTimer().rough_us(lambda: time.sleep(next(delays))) < 20_000.0


def test_an_error_of_a_launch_surfaces() -> None:
    def fail() -> None:
        raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        WallTimer().rough_us(fail)
