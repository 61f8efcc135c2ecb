"""The samplers by name."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace

import optuna
from optuna.samplers import BaseSampler

from ...errors import UnknownNameError
from ...kernels.base import Config
from ...search_spaces.space import JointSpace
from .portfolio import PortfolioSampler, PortfolioSettings
from .sampler import OptunaSampler

__all__ = ["DEFAULT_SAMPLER", "make_sampler", "sampler_names"]

DEFAULT_SAMPLER = "portfolio"


def sampler_names() -> tuple[str, ...]:
    """Names that ``make_sampler`` knows, the default first."""
    return tuple(_SAMPLERS)


def make_sampler(
    name: str,
    space: JointSpace,
    *,
    seed: int,
    num_trials: int,
    first: Sequence[Config] = (),
    foreign: Sequence[Config] = (),
) -> OptunaSampler:
    """The sampler of that name.

    Args:
        name: one of ``sampler_names``.
        space: what may be tried.
        seed: equal seeds and equal trials give equal proposals.
        num_trials: how long the search may become.
        first: tried before anything else, in this order.
        foreign: tried between random configs, nearest first, as long as they do well.

    Raises:
        UnknownNameError: no such sampler.
    """
    if name not in _SAMPLERS:
        raise UnknownNameError("sampler", name, _SAMPLERS)
    sampler = _SAMPLERS[name](space, seed, num_trials)
    return OptunaSampler(space, sampler, seed=seed, first=first, foreign=foreign)


def _portfolio(space: JointSpace, seed: int, num_trials: int) -> BaseSampler:
    return PortfolioSampler(space, seed=seed, num_trials=num_trials)


def _forest(space: JointSpace, seed: int, num_trials: int) -> BaseSampler:
    settings = replace(PortfolioSettings(), num_polish=0, num_random=0)
    return PortfolioSampler(space, seed=seed, num_trials=num_trials, settings=settings)


def _tpe(space: JointSpace, seed: int, num_trials: int) -> BaseSampler:
    with warnings.catch_warnings():
        # ``group`` is what fits a model to each template's own parameters; still experimental.
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return optuna.samplers.TPESampler(
            seed=seed, multivariate=True, group=True, constant_liar=True
        )


def _random(space: JointSpace, seed: int, num_trials: int) -> BaseSampler:
    """Uniform over the valid configs, which Optuna's own, over the product, is not."""
    settings = PortfolioSettings(start_share=1.0, start_limits=(1, num_trials))
    return PortfolioSampler(space, seed=seed, num_trials=num_trials, settings=settings)


_SAMPLERS: dict[str, Callable[[JointSpace, int, int], BaseSampler]] = {
    DEFAULT_SAMPLER: _portfolio,
    "forest": _forest,
    "tpe": _tpe,
    "random": _random,
}
