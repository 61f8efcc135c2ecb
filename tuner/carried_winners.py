"""Winners of other studies of the same problem, which a study tries first of all.

A prediction tries those of other SKUs, so that a report can say what the winner of each costs on
every other, and what was predicted before. A measurement tries what a look-up gave before it, be it
predicted or of a neighbouring problem, and those of earlier searches on its own SKU, with other
templates, other versions or less time: what either decides is the newest and is handed out, so it
must not be worse than what was known for want of time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path

from ..errors import UnknownNameError
from ..kernels.base import Config
from ..kernels.registry import operation, template
from ..search_spaces.space import JointSpace
from .explain import LookupResult
from .paths import shipped_database_path
from .records import Provenance, StudyKey
from .snapshot import Snapshot
from .store import Store
from .store.location import Location
from .store.records import WinnerRecord
from .tiers import Tier

__all__ = ["CarriedWinners"]


class CarriedWinners:
    """The winners in the database of a run and in the shipped one; a context manager."""

    def __init__(self, store: Store, location: str | Path) -> None:
        """``location`` is that of ``store``."""
        self._store = store
        self._resources = ExitStack()
        self._location = location
        self._shipped: Store | None = None
        self._snapshots: list[Snapshot] | None = None
        """As they were when first asked for."""
        self._of_op: dict[str, Sequence[WinnerRecord]] = {}
        """Those of the shipped database: nobody adds to it."""

    def of(self, key: StudyKey, space: JointSpace) -> tuple[Config, ...]:
        """What won this problem elsewhere and is valid in ``space``, each config once.

        Of each SKU the winner that speaks for it: the measured before the predicted, then the one
        decided last. By the names of the SKUs.
        """
        best: dict[str, WinnerRecord] = {}
        op = key.problem.op
        for winner in (*self._shipped_winners(op), *self._store.winners(op=op)):
            theirs = winner.study.key
            sku = theirs.device.sku
            if (theirs.problem, theirs.policy) != (key.problem, key.policy):
                continue
            if sku == key.device.sku or _is_library(op, winner):
                continue
            if sku not in best or _weight(winner) >= _weight(best[sku]):
                best[sku] = winner
        configs = (best[sku].trial.evaluation.config for sku in sorted(best))
        return tuple(dict.fromkeys(c for c in configs if space.check(c) is None))

    def served(self, key: StudyKey, space: JointSpace) -> tuple[Config, ...]:
        """What a search of ``space`` takes the place of: what look-ups gave when the run began.

        Among the templates of ``space`` and valid there; for a measured search of whichever tier,
        down to the default, for a prediction only what was predicted.
        """
        searched = {part.template for part in space.spaces}
        others = set(operation(key.problem.op).template_names) - searched
        answers = self._looked_up(key, frozenset(others))
        if key.provenance is Provenance.PREDICTED:
            answers = [answer for answer in answers if answer.tier is Tier.PREDICTED]
        configs = (answer.config for answer in answers)
        return tuple(dict.fromkeys(c for c in configs if space.check(c) is None))

    def _looked_up(self, key: StudyKey, without: frozenset[str]) -> list[LookupResult]:
        """With the database of the run over the shipped one, and in it alone, if it is a file."""
        if self._snapshots is None:
            shipped, own = shipped_database_path(), Location.parse(self._location).path
            both = [path.resolve() for path in (shipped, own) if path and path.exists()]
            reads = (both, both[1:]) if len(both) > 1 else (both,)
            self._snapshots = [Snapshot.load(list(dict.fromkeys(paths))) for paths in reads]
        answers = (
            snapshot.peek(key.problem, key.device, measurement=key.policy, without=without)
            for snapshot in self._snapshots
        )
        return [answer for answer in answers if answer is not None]

    def earlier(self, key: StudyKey, space: JointSpace) -> tuple[Config, ...]:
        """What other searches measured as the best of this problem on this SKU, the last first.

        Only what is valid in ``space``, each config once.
        """
        op = key.problem.op
        winners = (*self._shipped_winners(op), *self._store.winners(op=op))
        others = (w for w in _measured(winners, key) if w.study.key != key)
        found = [winner for winner in others if not _is_library(op, winner)]
        found.sort(key=lambda winner: winner.decided_at, reverse=True)
        configs = (winner.trial.evaluation.config for winner in found)
        return tuple(dict.fromkeys(c for c in configs if space.check(c) is None))

    def standing(self, key: StudyKey, space: JointSpace) -> tuple[Config, ...]:
        """What is handed out for this problem on this SKU that a search of ``space`` cannot meet.

        In the order in which look-ups take it: measured winners of the database of the run before
        those of the shipped one, the last decided first; then what a look-up gave when the run
        began, be it predicted or of another problem, but no default. What a search of some of the
        templates finds would come before all of them.
        """
        searched = {part.template for part in space.spaces}
        op = key.problem.op
        found: list[Config] = []
        for winners in (self._store.winners(op=op), self._shipped_winners(op)):
            ordered = sorted(_measured(winners, key), key=lambda w: w.decided_at, reverse=True)
            found += [winner.trial.evaluation.config for winner in ordered]
        answers = self._looked_up(key, frozenset())
        found += [answer.config for answer in answers if answer.tier is not Tier.DEFAULT]
        return tuple(dict.fromkeys(c for c in found if c.template not in searched))

    def last_decision(self, key: StudyKey) -> datetime | None:
        """When the database of the run last had a measured winner of this problem on this SKU."""
        winners = _measured(self._store.winners(op=key.problem.op), key)
        return max((winner.decided_at for winner in winners), default=None)

    def _shipped_winners(self, op: str) -> Sequence[WinnerRecord]:
        if op not in self._of_op:
            shipped = self._opened()
            self._of_op[op] = () if shipped is None else shipped.winners(op=op)
        return self._of_op[op]

    def _opened(self) -> Store | None:
        """The shipped database, from the first use on; None where the run writes it itself."""
        path, own = shipped_database_path(), Location.parse(self._location).path
        if self._shipped is None and path.exists() and (own is None or own.resolve() != path):
            self._shipped = self._resources.enter_context(Store.open(path, read_only=True))
        return self._shipped

    def close(self) -> None:
        """Closes the shipped database."""
        self._resources.close()


def _measured(winners: Iterable[WinnerRecord], key: StudyKey) -> Iterator[WinnerRecord]:
    """Those that some search measured as the best of this problem on this SKU."""
    for winner in winners:
        theirs = winner.study.key
        is_same = (theirs.problem, theirs.policy) == (key.problem, key.policy)
        is_measured = theirs.provenance is Provenance.MEASURED
        if is_same and is_measured and theirs.device.sku == key.device.sku:
            yield winner


def _weight(winner: WinnerRecord) -> tuple[bool, float]:
    is_measured = winner.study.key.provenance is Provenance.MEASURED
    return is_measured, winner.decided_at.timestamp()


def _is_library(op: str, winner: WinnerRecord) -> bool:
    try:
        return template(op, winner.trial.evaluation.config.template).is_external
    except UnknownNameError:
        return False
