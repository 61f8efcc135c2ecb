from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from tilescout.kernels.base import Config
from tilescout.tuner.records import TrialStatus
from tilescout.tuner.validate import build_on_poison, validate

BASE = {"block_n": 64, "num_stages": 3, "split_rule": "none"}


def judge(toy: Any, template: Any, **behaviour: str):
    problem = toy.ToyProblem(64)
    inputs = toy.OPERATION.make_validation_inputs(problem, device="cpu", seed=0)
    config = Config.of("triton", {**BASE, **behaviour})
    return validate(toy.OPERATION, template, problem, config, inputs)


@pytest.mark.parametrize(
    ("behaviour", "status", "reason"),
    [
        ("wrong", TrialStatus.INCORRECT, "largest error .* exceeds 1e-3"),
        ("nan", TrialStatus.INCORRECT, "largest error nan"),
        ("unrepeatable", TrialStatus.UNREPEATABLE, "outputs differ after a second launch"),
    ],
)
def test_what_is_wrong_is_refused_with_figures(
    toy: Any, behaviour: str, status: TrialStatus, reason: str
) -> None:
    verdict = judge(toy, toy.ToyTemplate(), behaviour=behaviour)
    assert verdict.status is status
    assert not verdict.is_ok
    assert re.search(reason, verdict.reason)
    assert verdict.max_abs_error is not None


def test_what_is_right_passes_with_its_error(toy: Any) -> None:
    verdict = judge(toy, toy.ToyTemplate())
    assert verdict.is_ok
    assert verdict.max_abs_error == 0.0
    assert verdict.reason == ""


def test_a_template_that_claims_no_repeatability_may_differ(toy: Any) -> None:
    template = toy.ToyTemplate()
    template.is_repeatable = False
    assert judge(toy, template, behaviour="unrepeatable").is_ok


def test_an_error_of_the_launch_is_the_callers(toy: Any) -> None:
    with pytest.raises(RuntimeError, match="toy launch failed"):
        judge(toy, toy.ToyTemplate(), behaviour="runtime_error")


class _Scratch:
    """Stands for a template whose launcher holds uninitialised memory."""

    def build(self, problem: Any, config: Any, inputs: Any) -> Any:
        return torch.empty(8), torch.empty(8, dtype=torch.int32)


def test_scratch_memory_is_poisoned_while_building_and_only_then(toy: Any) -> None:
    before = torch.get_deterministic_debug_mode()
    floats, integers = build_on_poison(_Scratch(), None, None, None)
    assert floats.isnan().all()
    assert (integers == torch.iinfo(torch.int32).max).all()
    assert torch.get_deterministic_debug_mode() == before
