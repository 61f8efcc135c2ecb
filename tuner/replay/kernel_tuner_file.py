"""Reads a cache file of Kernel Tuner: each valid config of a kernel on one GPU, with its time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...errors import UsageError
from ...kernels.base import Config, ParameterValue
from ..records import Evaluation, TrialStatus
from ..store.fields import Fields, is_number
from .recorded import RecordedSpace, failed, measured, recorded_space

__all__ = ["TEMPLATE", "parameter_value", "read_kernel_tuner_cache"]

TEMPLATE = "recorded"
"""Template of the configs of a file that names none."""

_US_PER_MS = 1000.0
_FAILURES = {
    "CompilationFailedConfig": TrialStatus.COMPILE_ERROR,
    "RuntimeFailedConfig": TrialStatus.RUNTIME_ERROR,
    "InvalidConfig": TrialStatus.INVALID,
}
"""What Kernel Tuner writes in the place of a time."""


def read_kernel_tuner_cache(label: str, data: object) -> RecordedSpace:
    """The recorded space of a decoded cache file.

    Raises:
        UsageError: a field is missing or wrong; the message names file and field.
    """
    read = Fields(label, data)
    objective = read.text("objective", default="time")
    if objective != "time":
        raise read.refuse("objective", "'time', the one objective that a replay knows")
    names = [_text(read, "tune_params_keys", name) for name in read.items("tune_params_keys")]
    values = _values(read.nested("tune_params"), names)
    records = read.nested("cache")
    evaluations = [_evaluation(records.nested(key), names, values) for key in records.names()]
    if not evaluations:
        raise UsageError(f"{label}.cache is empty: a replay needs the recorded configs")
    return recorded_space(label, evaluations, values)


def parameter_value(value: object) -> ParameterValue | None:
    """The value as configs hold it, or None if it is none: a fraction becomes text."""
    if isinstance(value, float):
        return int(value) if value.is_integer() else repr(value)
    return value if isinstance(value, bool | int | str) else None


def _text(read: Fields, field: str, value: object) -> str:
    if not isinstance(value, str):
        raise read.refuse(field, "a list of names")
    return value


def _values(read: Fields, names: Sequence[str]) -> dict[str, tuple[ParameterValue, ...]]:
    values: dict[str, tuple[ParameterValue, ...]] = {}
    for name in names:
        found = [parameter_value(value) for value in read.items(name)]
        known = tuple(value for value in found if value is not None)
        if not known or len(known) != len(found) or len(set(known)) != len(known):
            raise read.refuse(name, "a list of different numbers or texts")
        values[name] = known
    return values


def _evaluation(
    read: Fields, names: Sequence[str], values: Mapping[str, Sequence[ParameterValue]]
) -> Evaluation:
    chosen: dict[str, ParameterValue] = {}
    for name in names:
        value = parameter_value(read.raw(name))
        if value is None or value not in values[name]:
            raise read.refuse(name, f"one of {', '.join(map(str, values[name]))}")
        chosen[name] = value
    config = Config.of(TEMPLATE, chosen)
    time = read.raw("time")
    if isinstance(time, str):
        if time not in _FAILURES:
            raise read.refuse("time", f"milliseconds or one of {', '.join(_FAILURES)}")
        return failed(config, _FAILURES[time], time)
    samples = read.items("times") if read.has("times") else []
    if not all(is_number(sample) and sample > 0 for sample in samples):
        raise read.refuse("times", "a list of milliseconds above 0")
    return measured(
        config,
        read.positive("time") * _US_PER_MS,
        [float(sample) * _US_PER_MS for sample in samples if is_number(sample)],
    )
