"""Reads a T4 file, the results format of the autotuning literature, as one recorded space."""

from __future__ import annotations

from ...errors import UsageError
from ...kernels.base import Config, ParameterValue
from ..records import Evaluation, TrialStatus
from ..store.fields import Fields, is_number
from .kernel_tuner_file import TEMPLATE, parameter_value
from .recorded import RecordedSpace, failed, measured, recorded_space

__all__ = ["read_t4_results"]

_STATUSES = {
    "timeout": TrialStatus.TIMEOUT,
    "compile": TrialStatus.COMPILE_ERROR,
    "runtime": TrialStatus.RUNTIME_ERROR,
    "correctness": TrialStatus.INCORRECT,
    "correct": TrialStatus.OK,
}
_REFUSED = "constraints"
"""Such a config was never valid, so it is no part of the space."""
_US_PER_UNIT = {"s": 1e6, "seconds": 1e6, "ms": 1e3, "milliseconds": 1e3, "us": 1.0, "ns": 1e-3}
_DEFAULT_UNIT = "ms"
_TIME_NAMES = ("time", "runtime", "kernel_time")


def read_t4_results(label: str, data: object) -> RecordedSpace:
    """The recorded space of a decoded T4 file.

    Raises:
        UsageError: a field is missing or wrong; the message names file and field.
    """
    read = Fields(label, data)
    found = [
        _evaluation(Fields(f"{label}.results[{index}]", value))
        for index, value in enumerate(read.items("results"))
    ]
    evaluations = [evaluation for evaluation in found if evaluation is not None]
    if not evaluations:
        raise UsageError(f"{label}.results has no valid config: a replay needs recorded ones")
    return recorded_space(label, evaluations)


def _evaluation(read: Fields) -> Evaluation | None:
    """What became of the config, or None if it was never valid."""
    status = read.one_of("invalidity", (*_STATUSES, _REFUSED))
    if status == _REFUSED:
        return None
    configuration = read.nested("configuration")
    values: dict[str, ParameterValue] = {}
    for name in configuration.names():
        value = parameter_value(configuration.raw(name))
        if value is None:
            raise configuration.refuse(name, "a number, a text, true or false")
        values[name] = value
    config = Config.of(TEMPLATE, values)
    if status != "correct":
        return failed(config, _STATUSES[status], f"invalidity {status}")
    time_us, us_per_unit = _time(read)
    return measured(config, time_us, [sample * us_per_unit for sample in _runtimes(read)])


def _time(read: Fields) -> tuple[float, float]:
    """Microseconds, and how many of them the file's unit has."""
    entries = [
        Fields(f"{read.where}.measurements[{index}]", value)
        for index, value in enumerate(read.items("measurements"))
    ]
    for entry in entries:
        if entry.text("name") in _TIME_NAMES:
            unit = entry.text("unit", default="") or _DEFAULT_UNIT
            if unit not in _US_PER_UNIT:
                raise entry.refuse("unit", f"one of {', '.join(_US_PER_UNIT)}")
            return entry.positive("value") * _US_PER_UNIT[unit], _US_PER_UNIT[unit]
    raise read.refuse("measurements", f"a list with one named {' or '.join(_TIME_NAMES)}")


def _runtimes(read: Fields) -> list[float]:
    times = read.nested("times") if read.has("times") else None
    samples = times.items("runtimes") if times and times.has("runtimes") else []
    numbers = [float(sample) for sample in samples if is_number(sample) and sample > 0]
    if times and len(numbers) != len(samples):
        raise times.refuse("runtimes", "a list of numbers above 0")
    return numbers
