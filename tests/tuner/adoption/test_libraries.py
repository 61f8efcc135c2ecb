"""Autotuned kernels of fla-core and liger-kernel, as they come from PyPI, adopted and compared."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import gdn_calls
import pytest
import tilescout
import torch
import triton
from tilescout.tuner import dispatch
from tilescout.tuner.adoption import live_search
from tilescout.tuner.paths import user_database_path
from tilescout.tuner.store import Store

interpreted = [
    pytest.mark.interpreter,
    pytest.mark.skipif(
        not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1 before the import"
    ),
]
DEVICES = [pytest.param("cpu", marks=interpreted), pytest.param("cuda", marks=pytest.mark.gpu)]
CHUNK = 16


def made_up_timer(kernel_call: Callable[[], None], quantiles: Any = None) -> list[float]:
    """In the place of ``do_bench`` on the CPU, where no config is faster."""
    del quantiles
    kernel_call()
    return [1.0, 1.0, 1.0]


@dataclass(frozen=True)
class Case:
    """A function of a library, which launches adopted kernels, and what it must give."""

    module: str
    kernels: tuple[str, ...]
    call: Callable[[Any, dict[str, torch.Tensor]], tuple[torch.Tensor, ...]]
    expected: Callable[[dict[str, torch.Tensor]], tuple[torch.Tensor, ...]]
    shapes: dict[str, tuple[int, ...]]
    not_on_cpu: str = ""
    """Why it does not run in the interpreter."""


def softmax(module: Any, given: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    p = module.softmax_fwd(given["x"])
    return p, module.softmax_bwd(p, given["dp"])


def softmax_expected(given: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    p = torch.softmax(given["x"], -1)
    return p, p * (given["dp"] - (p * given["dp"]).sum(-1, keepdim=True))


def summed(given: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    g = given["g"]
    chunks = g.view(g.shape[0], -1, CHUNK, g.shape[2])
    return (chunks.cumsum(2).view(g.shape),)


def dyt_forward(module: Any, given: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    x, alpha, gamma, beta = (given[name] for name in ("x", "alpha", "gamma", "beta"))
    return (module.liger_dyt_fwd(x, alpha, gamma, beta),)


def dyt_backward(module: Any, given: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    names = ("dy", "x", "alpha", "gamma", "beta")
    found: tuple[torch.Tensor, ...] = module.liger_dyt_bwd(*(given[name] for name in names))
    return found


def dyt(given: dict[str, torch.Tensor]) -> torch.Tensor:
    return given["gamma"] * torch.tanh(given["alpha"] * given["x"]) + given["beta"]


def dyt_gradients(given: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    leaves = {
        name: given[name].detach().requires_grad_() for name in ("x", "alpha", "gamma", "beta")
    }
    return torch.autograd.grad(dyt(leaves), list(leaves.values()), given["dy"])


DYT = {"x": (3, 1500), "dy": (3, 1500), "alpha": (1,), "gamma": (1500,), "beta": (1500,)}
CASES = {
    "fla softmax": Case(
        "fla.ops.utils.softmax",
        ("softmax_fwd_kernel", "softmax_bwd_kernel"),
        softmax,
        softmax_expected,
        {"x": (5, 50), "dp": (5, 50)},
    ),
    "fla logsumexp": Case(
        "fla.ops.utils.logsumexp",
        ("logsumexp_fwd_kernel",),
        lambda module, given: (module.logsumexp_fwd(given["x"]),),
        lambda given: (torch.logsumexp(given["x"], -1),),
        {"x": (5, 50)},
    ),
    "fla cumsum": Case(
        "fla.ops.utils.cumsum",
        ("chunk_local_cumsum_scalar_kernel",),
        lambda module, given: (module.chunk_local_cumsum(given["g"], CHUNK),),
        summed,
        {"g": (2, 4 * CHUNK, 3)},
    ),
    "liger DyT": Case(
        "liger_kernel.ops.dyt",
        ("_dyt_fwd_kernel",),
        dyt_forward,
        lambda given: (dyt(given),),
        DYT,
        not_on_cpu="the interpreter has no functions of libdevice",
    ),
    "liger DyT, backward, reset_to_zero": Case(
        "liger_kernel.ops.dyt",
        ("_dyt_bwd_kernel",),
        dyt_backward,
        dyt_gradients,
        DYT,
        not_on_cpu="its host code asks the GPU for the number of its SMs",
    ),
}


@pytest.fixture(autouse=True)
def _no_winners(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Iterator[None]:
    monkeypatch.setattr(dispatch, "shipped_database_path", lambda: tmp_path / "shipped.db")
    dispatch.refresh()
    live_search.device_at_hand.cache_clear()
    yield
    dispatch.refresh()
    live_search.device_at_hand.cache_clear()


def loaded(name: str) -> Any:
    """The module of a library; skips where the library is not installed."""
    if find_spec(name.partition(".")[0]) is None:
        pytest.skip(f"{name.partition('.')[0]} is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # theirs, of what is not installed beside them
        return import_module(name)


def autotuner_of(kernel: Any) -> Any:
    """What ``@triton.autotune`` made, which ``@triton.heuristics`` may wrap."""
    while not hasattr(kernel, "configs"):
        kernel = kernel.fn
    return kernel


def tensors(case: Case, device: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator).to(device)
        for name, shape in case.shapes.items()
    }


def agree(found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        # Sums over 50 to 1500 values in fp32, in another order.
        torch.testing.assert_close(ours.view(theirs.shape), theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_an_adopted_kernel_gives_what_the_author_meant(
    case: Case,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    if device == "cpu" and case.not_on_cpu:
        pytest.skip(case.not_on_cpu)
    module = loaded(case.module)
    given = tensors(case, device)
    expected = case.expected(given)
    kernels = [getattr(module, name) for name in case.kernels]
    adopted = [tilescout.adopt(kernel).kernels[0] for kernel in kernels]
    if device == "cpu":
        for kernel in kernels:
            # A cached property, which would ask for a GPU.
            monkeypatch.setitem(vars(autotuner_of(kernel)), "do_bench", made_up_timer)

    agree(case.call(module, given), expected)  # untuned: the author's first config
    assert not user_database_path().exists()
    with tilescout.tuning():
        agree(case.call(module, given), expected)
    agree(case.call(module, given), expected)

    with Store.open(user_database_path(), read_only=True) as store:
        studies = [list(store.trials(study.study_id)) for study in store.studies()]
    assert len(studies) == len(adopted)
    sizes = sorted(len(autotuner_of(kernel).configs) for kernel in kernels)
    assert sorted(map(len, studies)) == sizes
    for trials in studies:
        status = [trial.evaluation.status.value for trial in trials]
        record_property("status of the configs", status)
        assert status.count("ok") >= 2, status


@pytest.mark.gpu
def test_all_of_fla_is_adopted_and_its_delta_rule_is_right(
    record_property: Callable[[str, object], None],
) -> None:
    module = loaded("fla.ops.gated_delta_rule")
    adoption = tilescout.adopt("fla")
    record_property("adopted, refused", (len(adoption.kernels), len(adoption.refused)))
    assert len(adoption.kernels) > 50
    given = gdn_calls.tensors("cuda", batch=1, steps=256, heads=4, v_heads=4, dtype="bfloat16")
    with torch.no_grad():
        found = module.chunk_gated_delta_rule(**given, scale=0.125, output_final_state=True)
    ran = [kernel for kernel in adoption.kernels if _has_run(kernel)]
    record_property("kernels that ran", len(ran))
    assert len(ran) >= 3
    assert not user_database_path().exists()
    none = torch.zeros(1, 4, 64, 64, device="cuda")
    exact = gdn_calls.recurrence(**given, state=none, scale=0.125)
    for ours, expected in zip(found, exact, strict=True):
        difference = (ours.double() - expected).norm() / expected.norm()
        assert difference < 0.02, float(difference)  # bf16 between the kernels


def _has_run(kernel: Any) -> bool:
    return getattr(kernel.autotuner, "best_config", None) is not None
