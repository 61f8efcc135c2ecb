"""Measured trials as JSON: one line a problem, one a distinct kernel, one a trial.

Smaller than a database and independent of its schema. Run as a program, it writes such a file:

    python tests/support/recorded_trials.py results.db tests/data/prediction_h200.jsonl 30
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from tilescout.kernels.base import Config, Problem
from tilescout.kernels.device import DeviceSpec
from tilescout.kernels.registry import operation
from tilescout.tuner.catalog import gpu
from tilescout.tuner.records import BinaryFacts, Evaluation, Provenance, Timing, TrialStatus
from tilescout.tuner.store.store import Store

Recorded = tuple[Problem, DeviceSpec, list[Evaluation]]


def write_recorded(path: Path, recorded: Iterable[Recorded]) -> int:
    """Writes the trials that have a time; returns how many."""
    lines: list[str] = []
    facts: dict[str, int] = {}
    num_trials = 0
    for problem, device, evaluations in recorded:
        lines.append(_line("problem", [problem.op, problem.as_dict(), device.sku]))
        for evaluation in evaluations:
            if evaluation.time_us is None:
                continue
            ids = []
            for kernel in evaluation.facts:
                text = _line("facts", asdict(kernel))
                if text not in facts:
                    facts[text] = len(facts)
                    lines.append(text)
                ids.append(facts[text])
            config = evaluation.config
            row = [config.template, config.as_dict(), evaluation.status, evaluation.time_us, ids]
            lines.append(_line("trial", row))
            num_trials += 1
    path.write_text("\n".join(lines) + "\n")
    return num_trials


def read_recorded(path: Path) -> list[Recorded]:
    """What ``write_recorded`` wrote."""
    found: list[Recorded] = []
    facts: list[BinaryFacts] = []
    for line in path.read_text().splitlines():
        ((kind, value),) = json.loads(line).items()
        if kind == "problem":
            op, fields, sku = value
            found.append((operation(op).problem_type.from_dict(fields), gpu(sku), []))
        elif kind == "facts":
            facts.append(BinaryFacts(**value))
        else:
            template, values, status, time_us, ids = value
            found[-1][2].append(
                Evaluation(
                    config=Config.of(template, values),
                    status=TrialStatus(status),
                    provenance=Provenance.MEASURED,
                    timing=Timing(time_us, time_us, time_us, time_us, time_us),
                    facts=tuple(facts[i] for i in ids),
                )
            )
    return found


def thinned(evaluations: Sequence[Evaluation], count: int) -> list[Evaluation]:
    """``count`` of those with a time, evenly from the fastest to the slowest."""
    timed = sorted((e for e in evaluations if e.time_us), key=lambda e: e.time_us or 0.0)
    if len(timed) <= count:
        return timed
    step = (len(timed) - 1) / (count - 1)
    return [timed[round(i * step)] for i in range(count)]


def _line(kind: str, value: object) -> str:
    return json.dumps({kind: value}, separators=(",", ":"))


def main() -> None:
    database, path, count = sys.argv[1:]
    with Store.open(database, read_only=True) as store:
        recorded = [
            (
                study.key.problem,
                study.key.device,
                thinned([t.evaluation for t in store.trials(study.study_id)], int(count)),
            )
            for study in store.studies()
            if study.key.provenance is Provenance.MEASURED
        ]
    write_recorded(Path(path), recorded)


if __name__ == "__main__":
    main()
