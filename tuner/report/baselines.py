"""Times of other libraries that a report sets beside our own.

Which baseline a search is compared with is decided here, once: the fastest under the same policy,
of the provenance that says most.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..records import BASELINE_TEMPLATE, Provenance, StudyKey

if TYPE_CHECKING:
    from ..store import Store
    from ..store.records import StudyRecord, TrialRecord

__all__ = ["TRUST", "Baseline", "fastest_baseline", "load_baselines", "mixture"]

TRUST = (
    Provenance.MEASURED,
    Provenance.PUBLISHED,
    Provenance.PREDICTED,
    Provenance.DEFAULT,
)
"""Which time stands for a SKU where it has several."""


BESIDE_OURS = "measured beside ours by tilescout tune"
"""The source of a library's time that is no figure of a table."""


@dataclass(frozen=True)
class Baseline:
    """One library's time for one problem on one SKU."""

    study: StudyRecord
    trial: TrialRecord

    @property
    def key(self) -> StudyKey:
        """Problem, device, provenance, policy."""
        return self.study.key

    @property
    def sku(self) -> str:
        """Short name of the device."""
        return self.key.device.sku

    @property
    def time_us(self) -> float:
        """The time."""
        time_us = self.trial.evaluation.time_us
        assert time_us is not None
        return time_us

    @property
    def source(self) -> str:
        """Where the figure is from."""
        return dict(self.key.template_hashes).get(BASELINE_TEMPLATE, BESIDE_OURS)

    @property
    def name(self) -> str:
        """The library with its variant: ``flashinfer fa2``."""
        template = self.trial.evaluation.config.template
        if template != BASELINE_TEMPLATE:
            return template
        return " ".join(filter(None, (self.said("library"), self.said("variant"))))

    def said(self, what: str) -> str:
        """``library``, ``variant``, ``version`` or ``conditions``; empty where it was not said."""
        return str(self.trial.evaluation.config.get(what, ""))


def load_baselines(stores: Sequence[Store], skus: Sequence[str] | None) -> tuple[Baseline, ...]:
    """All baselines of the stores on these SKUs; one that is in two stores counts once."""
    found: dict[tuple[object, ...], Baseline] = {}
    for store in stores:
        studies = store.baselines(skus=skus)
        trials = store.trials_by_study([s.study_id for s in studies], with_samples=False)
        for study in studies:
            for trial in trials[study.study_id]:
                if trial.evaluation.time_us is not None:
                    place = (study.key.digest, trial.evaluation.config)
                    found.setdefault(place, Baseline(study, trial))
    return tuple(sorted(found.values(), key=_order))


def _order(baseline: Baseline) -> tuple[object, ...]:
    problem = baseline.key.problem
    values = tuple((str(type(v)), v) for v in problem.as_dict().values())
    config = str(baseline.trial.evaluation.config)
    return problem.op, values, baseline.sku, baseline.key.provenance, config, baseline.source


def fastest_baseline(baselines: Iterable[Baseline], key: StudyKey) -> Baseline | None:
    """What a search of this key is compared with; None without a baseline under its policy.

    Of the problem and SKU of the key: measured ones before published ones, then the fastest.
    """
    alike = (
        baseline
        for baseline in baselines
        if (baseline.key.problem, baseline.sku, baseline.key.policy)
        == (key.problem, key.device.sku, key.policy)
    )
    return min(alike, key=lambda b: (TRUST.index(b.key.provenance), b.time_us), default=None)


def mixture(base: Provenance, other: Provenance) -> str:
    """What a ratio of two times rests on."""
    if base is other:
        return other.value
    return f"mixed: {base.value} / {other.value}"
