"""The interface of an evaluator: takes configs, returns what became of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ...kernels.base import Config
from ..records import Evaluation, Provenance

__all__ = ["Evaluator"]


class Evaluator(Protocol):
    """Evaluates configs of one problem on one device; a context manager that frees its processes.

    The driver keeps up to ``capacity`` configs submitted, so that compilation overlaps
    measurement, and collects them in whatever order they end. A config that fails is an
    ``Evaluation`` with a status, never an exception.
    """

    provenance: Provenance
    capacity: int
    """How many configs may be in flight."""

    def submit(self, config: Config) -> None:
        """Starts work on a config."""

    def prepare(self, config: Config) -> None:
        """Says that a config may be submitted later: what can be done early is, if nothing waits.

        It is not in flight, and need not be submitted.
        """

    def collect(self, until: float | None = None) -> Evaluation | None:
        """The next config that ended; waits for one. Only legal while one is in flight.

        None: a config was taken back, because it still compiled when the time was up: that of the
        evaluator, or of this call, in seconds of ``time.monotonic``.
        """

    def finals(self, configs: Sequence[Config]) -> list[Evaluation]:
        """Compares the best configs against each other as carefully as the evaluator can.

        Returned in final order, the winner first; the first of ``configs`` wins unless it is beaten
        by more than the noise. Those that fail now come last, with their status.
        """

    def close(self) -> None:
        """Ends all processes."""
