"""Foreign winners in a search: tried one at a time, dropped where they disappoint.

What won on another problem or another GPU may be close to the optimum here, or in a part of the
space that is slow here. Which of the two shows in a few trials, beside random configs that the
search needs anyway.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence

from ...kernels.base import Config
from ..records import Evaluation

__all__ = ["NUM_PROBES", "ForeignStart"]

NUM_PROBES = 3
"""Foreign winners that are tried whatever they show; the others are judged by them."""
_OWN_SHARE = 0.25
"""The best foreign winner has to be among this share of the search's own trials."""


class ForeignStart:
    """Says which foreign winner is tried next, if any is.

    One comes before each of the search's own trials. Once the probes have ended, another comes only
    while the best so far is in the best quarter of the search's own trials; where a foreign trial
    ends and it is not, those left are dropped for good.
    """

    def __init__(self, configs: Sequence[Config]) -> None:
        """``configs`` are the foreign winners, nearest first."""
        self._configs = frozenset(configs)
        self._pending = deque(dict.fromkeys(configs))
        self._is_turn = True
        self._open: set[Config] = set()
        self._times_us: list[float] = []
        self._own_times_us: list[float] = []

    def __contains__(self, config: Config) -> bool:
        return config in self._configs

    def next(self, is_untried: Callable[[Config], bool]) -> Config | None:
        """The foreign winner whose turn it is; None where an own trial of the search is next."""
        is_turn, self._is_turn = self._is_turn, True
        # However many trials are in flight, the others wait until the probes have ended.
        is_probe = len(self._times_us) + len(self._open) < NUM_PROBES
        if not is_turn or not (is_probe or self._is_confirmed()):
            return None
        while self._pending:
            config = self._pending.popleft()
            if is_untried(config):
                self._open.add(config)
                self._is_turn = False
                return config
        return None

    def ended(self, evaluation: Evaluation) -> None:
        """Takes in a trial of a foreign winner or an own one of the search, not a seed's."""
        time_us = math.inf if evaluation.time_us is None else evaluation.time_us
        if evaluation.config not in self:
            self._own_times_us.append(time_us)
            return
        self._open.discard(evaluation.config)
        self._times_us.append(time_us)
        if self._can_judge() and not self._is_confirmed():
            self._pending.clear()

    def _can_judge(self) -> bool:
        return len(self._times_us) >= NUM_PROBES and bool(self._own_times_us)

    def _is_confirmed(self) -> bool:
        """Whether the trials so far speak for the foreign winners that are left."""
        if not self._can_judge():
            return False
        best_us = min(self._times_us)
        rank = int(_OWN_SHARE * len(self._own_times_us))
        return best_us < math.inf and best_us <= sorted(self._own_times_us)[rank]
