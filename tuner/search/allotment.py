"""How the trials and the time of a search are divided between its parts and its algorithms."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

__all__ = ["TimeAllotment", "divide", "num_rounds"]


def divide(total: int, weights: Sequence[float], room: Sequence[int]) -> list[int]:
    """``total`` in proportion to ``weights``, to none more than its room.

    What one has no room for goes to the others. What is left over by rounding goes to those who
    are furthest behind their share, earlier ones first.
    """
    given = [0] * len(weights)
    total = min(total, sum(room))
    while (left := total - sum(given)) > 0:
        is_open = [g < r for g, r in zip(given, room, strict=True)]
        all_open = sum(w for w, o in zip(weights, is_open, strict=True) if o)
        shares = [left * w / all_open if o else 0.0 for w, o in zip(weights, is_open, strict=True)]
        steps = [min(math.floor(s), r - g) for s, r, g in zip(shares, room, given, strict=True)]
        if not any(steps):
            behind = max(range(len(shares)), key=lambda i: (shares[i], -i))
            steps[behind] = 1
        given = [g + step for g, step in zip(given, steps, strict=True)]
    return given


def num_rounds(num_rivals: int) -> int:
    """Rounds in which rivals are halved until one is left, that one's own round included."""
    return math.ceil(math.log2(num_rivals)) + 1


class TimeAllotment:
    """Shares of the time until a deadline, in proportion to trials."""

    def __init__(self, deadline: float | None, num_trials: int, clock: Callable[[], float]) -> None:
        """``num_trials`` are all that have to be run until then."""
        self._deadline = deadline
        self._left = num_trials
        self._clock = clock

    @property
    def is_over(self) -> bool:
        """Whether the deadline has passed."""
        return self._deadline is not None and self._clock() >= self._deadline

    def until(self, num_trials: int) -> float | None:
        """The deadline of the next so many trials; what they leave goes to later ones."""
        if self._deadline is None:
            return None
        now = self._clock()
        share = min(1.0, num_trials / max(1, self._left))
        self._left -= num_trials
        return now + max(0.0, self._deadline - now) * share
