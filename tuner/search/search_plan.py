"""A search that is about to begin, and what it will try first."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ...kernels.base import Config
from ...search_spaces.space import JointSpace
from ..records import Evaluation
from .sampler import Sampler

__all__ = ["SearchPlan"]


class SearchPlan:
    """A sampler that can be asked early: what it said is what the search then gets, in order."""

    def __init__(
        self, space: JointSpace, sampler: Sampler, known: Sequence[Evaluation], num_trials: int
    ) -> None:
        """``sampler`` was told of the trials in ``known``; ``num_trials`` counts them."""
        self.space = space
        self.known = known
        self.num_trials = num_trials
        self._sampler = sampler
        self._asked: deque[Config] = deque()

    def begins_with(self, num_in_flight: int) -> list[Config]:
        """What the search asks for before it has a result, if so many may be in flight."""
        num = min(num_in_flight, self.num_trials - len(self.known)) - len(self._asked)
        if num > 0:
            self._asked.extend(self._sampler.ask(num))
        return list(self._asked)

    def ask(self, n: int) -> list[Config]:
        """See ``Sampler``."""
        early = [self._asked.popleft() for _ in range(min(n, len(self._asked)))]
        return early + self._sampler.ask(n - len(early)) if len(early) < n else early

    def tell(self, evaluation: Evaluation) -> None:
        """See ``Sampler``."""
        self._sampler.tell(evaluation)
