"""The database as JSON, for review, merging and shipping: the readable form of every trial.

A row stands on its own: it repeats its problem, device and toolchain. Import takes all rows of a
file or none, and the same file twice changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from typing import Any

from ...errors import UsageError
from ...kernels.registry import operation_names
from ..records import (
    SCHEMA_VERSION,
    BinaryFacts,
    Evaluation,
    Provenance,
    StudyKey,
    Timing,
    Toolchain,
    TrialStatus,
)
from .codec import (
    LARGEST_DURATION_S,
    LARGEST_TIME_US,
    POLICIES,
    decode_binary,
    decode_config,
    decode_device,
    decode_mix,
    decode_problem,
    device_dict,
    to_milliseconds,
)
from .fields import Fields, is_integer, is_number
from .models import TrialRow
from .reading import study_filter
from .records import ImportSummary, StudyRecord, TrialRecord, WinnerRecord
from .store import Store
from .writing import Writer

__all__ = ["export_json", "import_json"]

_SPREAD = ("p10_us", "p90_us", "ci_low_us", "ci_high_us")
# What float32 holds.
_LARGEST_SAMPLE_US = 3e38


def export_json(
    store: Store, *, op: str | None = None, skus: Sequence[str] | None = None
) -> dict[str, Any]:
    """Everything the store holds about the operation and SKUs, ready for ``json.dumps``.

    Only the catalogue's notes on a device (aliases, sources of its figures) are left out.
    """
    trials: list[dict[str, Any]] = []
    with store.reading() as reader:
        for study in reader.studies(*study_filter(op, skus)):
            found = reader.trials(TrialRow.study_id == study.study_id)
            trials.extend(_trial_dict(study, trial) for trial in found)
        exported = {trial["trial_id"] for trial in trials}
        winners = [_winner_dict(winner, exported) for winner in reader.winners(op, skus)]
    return {"schema": SCHEMA_VERSION, "trials": trials, "winners": winners}


def import_json(store: Store, data: object) -> ImportSummary:
    """Adds the trials and winners of an export that the store lacks.

    A config that its study already has stays as it is, unless the file's decision on that study is
    newer: then the decision and the figures of its finals are taken over.

    Raises:
        UsageError: something in the data does not fit; the message names row and field, and
            nothing was imported.
    """
    read = Fields("export", data)
    schema = read.integer("schema", at_least=1)
    if schema > SCHEMA_VERSION:
        raise UsageError(
            f"export.schema={schema} is newer than {SCHEMA_VERSION}, the newest that this "
            "Tilescout knows: upgrade Tilescout, or export with the older version"
        )
    rows = [
        _parse_trial(Fields(f"trials[{index}]", value))
        for index, value in enumerate(read.items("trials"))
    ]
    trials = _by_id(rows)
    winners = [
        _parse_winner(Fields(f"winners[{index}]", value), trials)
        for index, value in enumerate(read.items("winners"))
    ]
    read.finish()
    _check_unique_winners(winners)
    return store.transaction(lambda writer: _write(writer, rows, winners))


@dataclass(frozen=True)
class _ImportedTrial:
    where: str
    trial_id: int
    number: int
    key: StudyKey
    seed: int
    evaluation: Evaluation
    created_at: datetime
    original: Mapping[str, Any]
    """The row as ``_winner_dict`` would repeat it, to compare winners with."""


@dataclass(frozen=True)
class _ImportedWinner:
    where: str
    trial: _ImportedTrial
    finals: tuple[_ImportedTrial, ...]
    decided_at: datetime


def _trial_dict(study: StudyRecord, trial: TrialRecord) -> dict[str, Any]:
    key, evaluation = study.key, trial.evaluation
    device = device_dict(key.device)
    del device["aliases"], device["sources"]
    return {
        "trial_id": trial.trial_id,
        **_identity(key, evaluation),
        "number": trial.number,
        "status": evaluation.status.value,
        "reason": evaluation.reason,
        "timing": _timing_dict(evaluation.timing),
        "facts": [_facts_dict(facts) for facts in evaluation.facts],
        "max_abs_error": _figure(evaluation.max_abs_error),
        "relative_rms_error": _figure(evaluation.relative_rms_error),
        "compile_s": evaluation.compile_s,
        "measure_s": evaluation.measure_s,
        "created_at": _iso(trial.created_at),
        "device": device,
        "template_hashes": dict(key.template_hashes),
        "space_fingerprint": key.space_fingerprint,
        **({"part": key.part} if key.part else {}),
        "seed": study.seed,
    }


def _winner_dict(winner: WinnerRecord, exported: Collection[int]) -> dict[str, Any]:
    return {
        **_identity(winner.study.key, winner.trial.evaluation),
        "trial_id": winner.trial.trial_id,
        # A damaged row among the finals must not keep the others from being imported.
        "finals": [trial_id for trial_id in winner.finals if trial_id in exported],
        "decided_at": _iso(winner.decided_at),
    }


def _identity(key: StudyKey, evaluation: Evaluation) -> dict[str, Any]:
    """What trials and winners say in the same words."""
    return {
        "op": key.problem.op,
        "gpu": key.device.sku,
        "problem": key.problem.as_dict(),
        "config": evaluation.config.as_dict(),
        "template": evaluation.config.template,
        "provenance": key.provenance.value,
        "policy": str(key.policy),
        "toolchain": key.toolchain.as_dict(),
        "time_us": evaluation.time_us,
    }


def _timing_dict(timing: Timing | None) -> dict[str, Any] | None:
    if timing is None:
        return None
    values: dict[str, Any] = {name: getattr(timing, name) for name in _SPREAD}
    values["num_samples"] = timing.num_samples
    if timing.samples_us:
        # Nine digits name a float32; all seventeen of its double would only look precise.
        values["samples_us"] = [float(f"{sample:.9g}") for sample in timing.samples_us]
    return values


def _facts_dict(facts: BinaryFacts) -> dict[str, Any]:
    values = {field.name: getattr(facts, field.name) for field in fields(facts)}
    return {**values, "instruction_mix": dict(facts.instruction_mix)}


def _figure(value: float | None) -> float | str | None:
    """JSON has no NaN or infinity: they are text."""
    return value if value is None or math.isfinite(value) else str(value)


def _iso(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _parse_trial(read: Fields) -> _ImportedTrial:
    op = read.one_of("op", operation_names())
    problem = decode_problem(f"{read.where}.problem", op, read.raw("problem"))
    device_read = read.nested("device")
    device = decode_device(device_read)
    if read.text("gpu") != device.sku:
        raise read.refuse("gpu", f"{device.sku!r}, the sku of its device")
    hashes = read.nested("template_hashes")
    config = decode_config(f"{read.where}.config", read.text("template"), read.raw("config"))
    if config.template not in hashes.names():
        raise read.refuse("template", f"one of template_hashes: {', '.join(hashes.names())}")
    versions = read.nested("toolchain")
    toolchain = Toolchain(**{name: versions.text(name) for name in Toolchain().as_dict()})
    versions.finish()
    key = StudyKey(
        problem=problem,
        device=device,
        toolchain=toolchain,
        provenance=Provenance(read.one_of("provenance", [p.value for p in Provenance])),
        policy=POLICIES[read.one_of("policy", POLICIES)],
        space_fingerprint=read.text("space_fingerprint"),
        template_hashes=tuple(sorted((name, hashes.text(name)) for name in hashes.names())),
        part=read.text("part", default=""),
    )
    evaluation = Evaluation(
        config=config,
        status=TrialStatus(read.one_of("status", [status.value for status in TrialStatus])),
        provenance=key.provenance,
        reason=read.text("reason"),
        timing=_parse_timing(read),
        facts=tuple(
            _parse_facts(Fields(f"{read.where}.facts[{index}]", value))
            for index, value in enumerate(read.items("facts"))
        ),
        max_abs_error=read.any_number("max_abs_error"),
        relative_rms_error=read.any_number("relative_rms_error"),
        compile_s=read.number("compile_s", at_least=0, at_most=LARGEST_DURATION_S),
        measure_s=read.number("measure_s", at_least=0, at_most=LARGEST_DURATION_S),
    )
    if evaluation.status is TrialStatus.OK and evaluation.timing is None:
        raise read.refuse("timing", "an object, as status is ok")
    parsed = _ImportedTrial(
        where=read.where,
        trial_id=read.integer("trial_id", at_least=0),
        number=read.integer("number", at_least=0),
        key=key,
        seed=read.integer("seed"),
        evaluation=evaluation,
        created_at=_parse_moment(read, "created_at"),
        original=_identity(key, evaluation),
    )
    read.finish()
    return parsed


def _parse_timing(read: Fields) -> Timing | None:
    if not read.has("timing"):
        if read.has("time_us"):
            raise read.refuse("time_us", "null, as timing is null")
        return None
    timing = read.nested("timing")
    samples = timing.items("samples_us") if timing.has("samples_us") else []
    numbers = [s for s in samples if is_number(s) and 0 <= s <= _LARGEST_SAMPLE_US]
    if len(numbers) != len(samples):
        raise timing.refuse("samples_us", f"a list of numbers from 0 to {_LARGEST_SAMPLE_US:g}")
    num_samples = timing.integer("num_samples", at_least=0)
    if samples and len(samples) != num_samples:
        raise timing.refuse("num_samples", f"{len(samples)}, the length of samples_us")
    parsed = Timing(
        _time(read, "time_us"),
        _time(timing, "p10_us"),
        _time(timing, "p90_us"),
        _time(timing, "ci_low_us"),
        _time(timing, "ci_high_us"),
        samples_us=tuple(map(float, numbers)),
        num_samples=num_samples,
    )
    timing.finish()
    return parsed


def _time(read: Fields, name: str) -> float:
    return read.number(name, at_least=0, at_most=LARGEST_TIME_US)


def _parse_facts(read: Fields) -> BinaryFacts:
    facts = decode_binary(read, decode_mix(read.nested("instruction_mix")))
    read.finish()
    return facts


def _parse_moment(read: Fields, name: str) -> datetime:
    try:
        moment = datetime.fromisoformat(read.text(name))
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None:
        raise read.refuse(name, "a time with its zone, such as 2026-01-31T12:00:00.000Z")
    return moment


def _parse_winner(read: Fields, trials: Mapping[int, _ImportedTrial]) -> _ImportedWinner:
    trial_id = read.integer("trial_id")
    if trial_id not in trials:
        raise read.refuse("trial_id", "the trial_id of a row in trials")
    trial = trials[trial_id]
    for name, expected in trial.original.items():
        if read.raw(name) != expected:
            raise read.refuse(name, f"{expected!r}, as in {trial.where}")
    finals = []
    for value in read.items("finals"):
        final = trials.get(value) if is_integer(value) else None
        if final is None or final.key.digest != trial.key.digest or final in finals:
            raise read.refuse("finals", "different trial_ids of trials in the winner's study")
        finals.append(final)
    if not finals or finals[0] is not trial:
        raise read.refuse("finals", f"a list that begins with the winner, {trial_id}")
    if trial.key.part:
        raise read.refuse("trial_id", f"a trial of a whole operation, not of {trial.key.part!r}")
    if trial.key.is_baseline:
        raise read.refuse("trial_id", "a trial of a search, not a baseline")
    if trial.evaluation.status is not TrialStatus.OK:
        raise read.refuse("trial_id", f"a trial whose status is ok, unlike {trial.where}")
    decided_at = _parse_moment(read, "decided_at")
    read.finish()
    return _ImportedWinner(read.where, trial, tuple(finals), decided_at)


def _by_id(rows: Sequence[_ImportedTrial]) -> dict[int, _ImportedTrial]:
    """The rows by trial id; refuses ids, numbers and configs that come twice."""
    found: dict[tuple[object, ...], str] = {}
    for row in rows:
        digest = row.key.digest
        for name, value, scope in (
            ("trial_id", row.trial_id, ""),
            ("number", row.number, digest),
            ("config", row.evaluation.config, digest),
        ):
            other = found.setdefault((name, scope, value), row.where)
            if other != row.where:
                raise UsageError(f"{row.where}.{name}={value} is there already, in {other}")
    return {row.trial_id: row for row in rows}


def _check_unique_winners(winners: Sequence[_ImportedWinner]) -> None:
    found: dict[str, str] = {}
    for winner in winners:
        other = found.setdefault(winner.trial.key.digest, winner.where)
        if other != winner.where:
            raise UsageError(f"{winner.where} decides the same study as {other}")


def _write(
    writer: Writer, rows: Sequence[_ImportedTrial], winners: Sequence[_ImportedWinner]
) -> ImportSummary:
    study_ids: dict[str, int] = {}
    num_studies = num_trials = num_winners = 0
    for row in rows:
        digest = row.key.digest
        if digest not in study_ids:
            study_ids[digest], is_new = writer.study(row.key, row.seed, row.created_at)
            num_studies += is_new
        *_, is_new = writer.trial(
            study_ids[digest],
            row.evaluation,
            row.created_at,
            number=row.number,
            keep_samples=True,
        )
        num_trials += is_new
    for winner in winners:
        study_id = study_ids[winner.trial.key.digest]
        decided_ms = writer.decided_ms(study_id)
        if decided_ms is not None and decided_ms >= to_milliseconds(winner.decided_at):
            continue
        finals = [final.evaluation for final in winner.finals]
        trial_ids = writer.finals(study_id, finals)
        writer.winner(study_id, trial_ids[0], winner.decided_at)
        num_winners += 1
    return ImportSummary(num_studies, num_trials, num_winners)
