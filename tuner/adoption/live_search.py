"""Searches configs of a user's kernel on a call at hand, and keeps every trial like any other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

from ...kernels.base import Config
from ...kernels.device import DeviceSpec
from ...search_spaces.listed import listed_space
from ...search_spaces.space import JointSpace
from ..dispatch import current_snapshot, find_device, refresh
from ..dispatch_policy import current_policy
from ..explain import LookupResult
from ..paths import user_database_path
from ..records import MeasurementPolicy, Provenance, StudyKey
from .live_evaluator import LiveEvaluator
from .operation import KernelProblem

__all__ = ["MEASUREMENT", "device_at_hand", "is_capturing", "lookup_live", "search_live"]

MEASUREMENT = MeasurementPolicy(is_cuda_graph=False, is_cold_l2=True)
"""How Triton's ``do_bench`` measures: eager launches, L2 flushed before each."""

_NUM_FINALISTS = 3


def lookup_live(problem: KernelProblem) -> LookupResult:
    """What a call with this problem gets, under the policy in force.

    Raises:
        NoWinnerError: the policy is ``strict`` and nothing was measured for the problem.
    """
    return current_snapshot().lookup(
        problem, device_at_hand(), policy=current_policy(), measurement=MEASUREMENT
    )


def search_live(
    problem: KernelProblem,
    configs: Sequence[Config],
    evaluator: Callable[[], LiveEvaluator],
    source: str,
) -> Config | None:
    """The winner among configs of one template; None where none works.

    Args:
        problem: What is tuned.
        configs: All are tried.
        evaluator: Makes what verifies and times them.
        source: Hash of the kernel's source, for which the winner holds.
    """
    from ..environment import toolchain
    from ..progress import LoggingListener
    from ..search.partwise import run_search
    from ..store import Store

    template = configs[0].template
    space = JointSpace((listed_space(template, configs),))
    key = StudyKey(
        problem=problem,
        device=device_at_hand(),
        toolchain=toolchain(with_driver=True),
        provenance=Provenance.MEASURED,
        policy=MEASUREMENT,
        space_fingerprint=space.fingerprint(),
        template_hashes=((template, source),),
    )
    with Store.open(user_database_path()) as store:
        winner = run_search(
            space=space,
            evaluators=lambda *_: evaluator(),
            store=store,
            study=store.study(key, seed=0),
            num_trials=len(configs),
            deadline=None,
            seed=0,
            num_finalists=_NUM_FINALISTS,
            listener=LoggingListener(),
        )
    refresh()
    return None if winner is None else winner.trial.evaluation.config


def is_capturing() -> bool:
    """Whether a CUDA graph is being captured, where nothing may be tuned."""
    import torch

    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


@cache
def device_at_hand() -> DeviceSpec:
    """The GPU at hand; under Triton's interpreter any will do, and look-ups need one."""
    import triton

    if triton.knobs.runtime.interpret:
        from ..catalog import gpu_names

        return find_device(gpu_names()[0])
    return find_device(None)
