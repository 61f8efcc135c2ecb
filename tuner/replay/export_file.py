"""Reads what ``tilescout export`` wrote: each study in it is one recorded space."""

from __future__ import annotations

from ...errors import UsageError
from ...kernels.base import Config, ParameterValue, canonical_json
from ..records import BASELINE_TEMPLATE, Evaluation, TrialStatus
from ..store.fields import Fields, is_number
from .kernel_tuner_file import parameter_value
from .recorded import RecordedSpace, failed, measured, recorded_space

__all__ = ["read_export"]

_STUDY_FIELDS = ("op", "gpu", "problem", "provenance", "policy", "toolchain", "space_fingerprint")
"""Trials that agree in these belong to one study."""


def read_export(label: str, data: object) -> tuple[RecordedSpace, ...]:
    """The recorded spaces of a decoded export, in the order of their first trials.

    Raises:
        UsageError: a field is missing or wrong; the message names file and field.
    """
    read = Fields(label, data)
    studies: dict[str, list[Evaluation]] = {}
    names: dict[str, str] = {}
    for index, value in enumerate(read.items("trials")):
        trial = Fields(f"{label}.trials[{index}]", value)
        if trial.text("template", default="") == BASELINE_TEMPLATE:
            continue
        key = canonical_json([trial.raw(name) for name in _STUDY_FIELDS])
        studies.setdefault(key, []).append(_evaluation(trial))
        names.setdefault(key, _name(trial))
    if not studies:
        raise UsageError(f"{label}.trials is empty: a replay needs recorded configs")
    if len(studies) == 1:
        return tuple(recorded_space(label, trials) for trials in studies.values())
    return tuple(
        recorded_space(f"{label}#{number}: {names[key]}", trials)
        for number, (key, trials) in enumerate(studies.items(), 1)
        if any(trial.time_us is not None for trial in trials)
    )


def _name(trial: Fields) -> str:
    problem = trial.nested("problem")
    fields = " ".join(f"{name}={problem.raw(name)}" for name in problem.names())
    return f"{trial.text('op')} {trial.text('gpu')} {fields}"


def _evaluation(trial: Fields) -> Evaluation:
    read = trial.nested("config")
    values: dict[str, ParameterValue] = {}
    for name in read.names():
        value = parameter_value(read.raw(name))
        if value is None:
            raise read.refuse(name, "a number, a text, true or false")
        values[name] = value
    config = Config.of(trial.text("template"), values)
    status = TrialStatus(trial.one_of("status", [status.value for status in TrialStatus]))
    # A trial that was cut short is right but slow: its time is what is known of it.
    if status not in (TrialStatus.OK, TrialStatus.PRUNED):
        return failed(config, status, trial.text("reason", default=""))
    timing = trial.nested("timing")
    samples = timing.items("samples_us") if timing.has("samples_us") else []
    if not all(map(is_number, samples)):
        raise timing.refuse("samples_us", "a list of numbers")
    return measured(config, trial.positive("time_us"), [float(s) for s in samples if is_number(s)])
