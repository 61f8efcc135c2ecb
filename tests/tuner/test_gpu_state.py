"""The watch over the clock, with the driver played by a stand-in."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import chain, repeat
from typing import Any

import pynvml
import pytest
from tilescout.tuner.gpu_state import ClockWatch, GpuState, nvml_reader
from tilescout.tuner.timers import Run, WallTimer

FAST = GpuState(1980)
SLOW = GpuState(1500)
HOT = GpuState(1980, frozenset({"hardware thermal slowdown"}))


def watch_on(*states: GpuState | None, **options: Any) -> ClockWatch:
    """A watch that sees these states and then the last for ever."""
    source: Iterator[GpuState | None] = chain(states, repeat(states[-1]))
    return ClockWatch(lambda: next(source), min_known=2, **options)


def judged(watch: ClockWatch, count: int) -> list[str | None]:
    return [watch.disturbance() for _ in range(count)]


def test_a_steady_clock_is_no_disturbance() -> None:
    watch = watch_on(FAST, GpuState(1965), GpuState(1995))
    assert judged(watch, 6) == [None] * 6
    assert watch.num_disturbed == 0


def test_a_clock_off_the_median_is_one() -> None:
    watch = watch_on(FAST, FAST, FAST, SLOW, FAST)
    assert judged(watch, 5) == [None, None, None, "clock of 1500 MHz, 1980 MHz before", None]
    assert watch.num_disturbed == 1


def test_a_new_reason_is_one_and_an_old_one_is_not() -> None:
    watch = watch_on(FAST, FAST, HOT)
    assert judged(watch, 5) == [
        None,
        None,
        "newly throttled by hardware thermal slowdown",
        None,
        None,
    ]


def test_what_is_seen_twice_is_how_the_gpu_is() -> None:
    watch = watch_on(FAST, FAST, FAST, SLOW)
    assert [reason is not None for reason in judged(watch, 5)] == [False] * 3 + [True, False]


def test_too_few_readings_judge_nothing() -> None:
    assert judged(watch_on(FAST, SLOW), 2) == [None, None]


def test_without_an_answer_nothing_is_judged() -> None:
    watch = watch_on(None)
    assert judged(watch, 4) == [None] * 4


def run_of(log: list[str]) -> Run:
    return Run(lambda: log.append("run"), 1)


@pytest.mark.parametrize(
    ("states", "num_blocks"),
    [
        pytest.param([FAST], 3, id="steady: nothing is repeated"),
        pytest.param([FAST, FAST, SLOW, FAST], 4, id="disturbed once: repeated once"),
        pytest.param([FAST, FAST, SLOW, GpuState(1200), GpuState(900)], 5, id="for ever: bounded"),
    ],
)
def test_a_disturbed_block_is_repeated(states: list[GpuState], num_blocks: int) -> None:
    log: list[str] = []
    timer = WallTimer(watch=watch_on(*states))
    for _ in range(3):
        assert len(timer.time_us([run_of(log)], is_kept=True)) == 1
    assert len(log) == 2 * num_blocks  # one untimed, one timed


def test_what_is_not_kept_is_not_watched() -> None:
    log: list[str] = []
    watch = watch_on(FAST, FAST, SLOW, FAST, SLOW)
    timer = WallTimer(watch=watch)
    for _ in range(5):
        timer.time_us([run_of(log)])
    assert len(log) == 10
    assert watch.num_disturbed == 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    played: dict[str, Any] = {"clock": 1980, "bits": 0, "error": None, "calls": 0}

    def answer(key: str) -> int:
        played["calls"] += 1
        if played["error"] is not None:
            raise pynvml.NVMLError(played["error"])
        return int(played[key])

    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", lambda uuid: uuid)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetClockInfo", lambda handle, kind: answer("clock"))
    monkeypatch.setattr(
        pynvml, "nvmlDeviceGetCurrentClocksEventReasons", lambda handle: answer("bits")
    )
    return played


def test_reading_names_the_reasons_that_slow_down(driver: dict[str, Any]) -> None:
    read = nvml_reader("0f0f")
    driver["bits"] = pynvml.nvmlClocksEventReasonGpuIdle | pynvml.nvmlClocksEventReasonSwPowerCap
    assert read() == GpuState(1980, frozenset({"power cap"}))
    assert driver["calls"] == 2  # a reading is two short calls


def test_a_driver_that_stops_to_answer_is_left_alone(
    driver: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    read = nvml_reader("0f0f")
    assert read() is not None
    driver["error"] = pynvml.NVML_ERROR_NOT_SUPPORTED
    calls = driver["calls"]
    with caplog.at_level(logging.INFO):
        assert read() is None
        assert read() is None
    assert driver["calls"] == calls + 1
    assert caplog.text.count("no longer watched") == 1


def test_no_driver_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", fail)
    assert nvml_reader("0f0f")() is None
