"""The rule that finds the fastest of a few configs with few samples; knows no clock and no GPU.

All contestants open with a few samples each. From then on a block times the leader beside those
most likely to beat it, so samples go to the close calls and nothing is cut for good by bad luck.
The race is over once it is improbable that anything beats the leader by more than the noise.
``benchmarks/racing.py`` judges the rule on recorded samples; docs/measuring.md has the figures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from .median_posterior import MedianPosterior

__all__ = ["Race", "RaceRules", "SampleSource", "race"]


class SampleSource(Protocol):
    """Where samples come from: a device, or a recording."""

    def draw(self, contestants: Sequence[int], num_rounds: int) -> Sequence[Sequence[float]]:
        """``num_rounds`` new samples of each contestant, taken in turns; in their order."""


@dataclass(frozen=True)
class RaceRules:
    """How sure a race has to be, and what it may cost."""

    noise: float = 0.005
    """Contestants closer than this are a tie."""
    risk: float = 0.01
    """Tolerated probability that another is faster than the leader by more than the noise."""
    opening: int = 8
    """Samples that each contestant has at least."""
    max_samples: int = 60
    """Most samples of one contestant: the median of these is what the race is about."""
    share: float = 1 / 3
    """Most samples in all, as a share of ``max_samples`` for each."""
    num_challengers: int = 2
    rounds_per_block: int = 3
    """Samples of each in one block; more make a block's fixed cost count less."""

    @classmethod
    def up_to(cls, max_samples: int, *, noise: float = noise) -> RaceRules:
        """Rules in proportion to the most samples there may be of one contestant."""
        return cls(
            noise=noise,
            opening=max(1, round(max_samples / 8)),
            max_samples=max_samples,
            rounds_per_block=max(1, max_samples // 20),
        )


@dataclass(frozen=True)
class Race:
    """Outcome of a race, contestants named by their number."""

    order: tuple[int, ...]
    """Best first."""
    samples: tuple[tuple[float, ...], ...]
    """What each was judged by."""
    is_settled: bool
    """Whether the winner is known well enough; else the samples or the time ran out."""


def race(
    source: SampleSource,
    num_contestants: int,
    rules: RaceRules,
    *,
    incumbent: int | None = None,
    is_late: Callable[[], bool] = lambda: False,
) -> Race:
    """Samples until the winner is settled or the allowance is used up.

    Args:
        source: gives samples.
        num_contestants: numbered from 0.
        rules: when it is enough.
        incumbent: the one that wins unless it is beaten by more than the noise.
        is_late: asked after each block; the race ends when it says so.
    """
    field_ = _Field(rules, num_contestants, incumbent)
    field_.take(source, range(num_contestants), rules.opening)
    while not (field_.is_settled() or is_late()):
        block = field_.next_block()
        if not block:
            break
        field_.take(source, block, field_.rounds_left(block))
    return Race(field_.order(), tuple(map(tuple, field_.samples)), field_.is_settled())


@dataclass
class _Field:
    """The contestants with what is known of each."""

    rules: RaceRules
    num_contestants: int
    incumbent: int | None
    samples: list[list[float]] = field(init=False)
    posteriors: list[MedianPosterior] = field(init=False)

    def __post_init__(self) -> None:
        self.samples = [[] for _ in range(self.num_contestants)]
        self.posteriors = [MedianPosterior((), (), ())] * self.num_contestants

    def take(self, source: SampleSource, block: Sequence[int], num_rounds: int) -> None:
        """Draws samples of each in the block."""
        for contestant, drawn in zip(block, source.draw(block, num_rounds), strict=True):
            seen = self.samples[contestant]
            seen.extend(drawn)
            self.posteriors[contestant] = MedianPosterior.of(seen, self.rules.max_samples)

    def leader(self) -> int:
        """The one that looks fastest."""
        return min(range(self.num_contestants), key=lambda i: self.posteriors[i].mean)

    def is_settled(self) -> bool:
        """Whether the winner is known as well as the rules ask for."""
        leader = self.leader()
        safe = 1.0
        for other in range(self.num_contestants):
            if other != leader:
                safe *= 1.0 - self._odds(other, leader, 1.0 + self.rules.noise)
        return 1.0 - safe < self.rules.risk and self._is_incumbent_settled(leader)

    def next_block(self) -> list[int]:
        """The leader and those most likely to beat it; empty once nothing may be sampled."""
        leader = self.leader()
        odds = {i: self._odds(i, leader) for i in range(self.num_contestants) if i != leader}
        challengers = [i for i in sorted(odds, key=lambda i: -odds[i]) if self._has_left(i)]
        challengers = challengers[: self.rules.num_challengers]
        doubtful = self._doubtful_incumbent(leader)
        if doubtful is not None and doubtful not in challengers:
            challengers = [doubtful, *challengers[:-1]]
        block = [leader, *challengers] if self._has_left(leader) else challengers
        return block[: self._allowance()]

    def rounds_left(self, block: Sequence[int]) -> int:
        """Rounds that the block may have."""
        fewest = min(self.rules.max_samples - len(self.samples[i]) for i in block)
        return max(1, min(self.rules.rounds_per_block, fewest, self._allowance() // len(block)))

    def order(self) -> tuple[int, ...]:
        """Best first; the incumbent before what does not beat it by more than the noise."""
        ranked = sorted(range(self.num_contestants), key=lambda i: self.posteriors[i].mean)
        incumbent = self.incumbent
        if incumbent is None:
            return tuple(ranked)
        limit = self.posteriors[ranked[0]].mean * (1.0 + self.rules.noise)
        if self.posteriors[incumbent].mean > limit:
            return tuple(ranked)
        return (incumbent, *(i for i in ranked if i != incumbent))

    def _odds(self, contestant: int, leader: int, ratio: float = 1.0) -> float:
        return self.posteriors[contestant].odds_below(self.posteriors[leader], ratio)

    def _is_incumbent_settled(self, leader: int) -> bool:
        """Whether it is known that the leader beats the incumbent by the noise, or does not."""
        if self.incumbent is None or self.incumbent == leader:
            return True
        is_beaten = self._odds(leader, self.incumbent, 1.0 + self.rules.noise)
        return min(is_beaten, 1.0 - is_beaten) < self.rules.risk

    def _doubtful_incumbent(self, leader: int) -> int | None:
        """The incumbent, if its fate is open and samples of it are left."""
        incumbent = self.incumbent
        if incumbent is None or self._is_incumbent_settled(leader):
            return None
        return incumbent if self._has_left(incumbent) else None

    def _has_left(self, contestant: int) -> bool:
        return len(self.samples[contestant]) < self.rules.max_samples

    def _allowance(self) -> int:
        """Samples that may still be taken."""
        most = int(self.rules.share * self.rules.max_samples * self.num_contestants)
        return max(0, most - sum(map(len, self.samples)))
