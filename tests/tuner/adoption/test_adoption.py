"""Kernels of users: adopted as they are, tuned when asked, looked up like ours."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import tilescout
import torch
import triton
import tunable_kernels as kernels
from tilescout.errors import NoWinnerError, UsageError
from tilescout.tuner import dispatch
from tilescout.tuner.adoption import live_search
from tilescout.tuner.adoption.operation import source_of
from tilescout.tuner.paths import user_database_path
from tilescout.tuner.store import Store
from tunable_kernels import configs, made_up_timer

N = 200


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    monkeypatch.setattr(dispatch, "shipped_database_path", lambda: tmp_path / "shipped.db")
    dispatch.refresh()
    live_search.device_at_hand.cache_clear()
    yield
    dispatch.refresh()
    live_search.device_at_hand.cache_clear()


def grid(meta: dict) -> tuple[int]:
    return (triton.cdiv(N, meta["BLOCK"]),)


def autotuned(function, *blocks: int, key=("n",), **options):
    options.setdefault("configs", configs(*blocks))
    decorate = triton.autotune(key=list(key), do_bench=made_up_timer, **options)
    return decorate(triton.jit(function))


def vectors() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(N), torch.full((N,), float("nan"))


def trials() -> dict[int, str]:
    """Status of every trial by block size."""
    with Store.open(user_database_path(), read_only=True) as store:
        return {
            int(t.evaluation.config["BLOCK"]): t.evaluation.status.value
            for study in store.studies()
            for t in store.trials(study.study_id)
        }


def test_untuned_it_runs_the_first_config_and_tunes_nothing() -> None:
    kernel = autotuned(kernels.double, 16, 32, 64)
    (adopted,) = tilescout.adopt(kernel).kernels
    x, y = vectors()
    kernel[grid](x, y, N)
    assert torch.equal(y, 2 * x)
    assert kernel.best_config.kwargs == {"BLOCK": 16}
    assert adopted.lookup(x, y, N).tier == "default"
    assert not user_database_path().exists()


def test_tuned_it_runs_the_winner_and_other_processes_find_it() -> None:
    kernel = autotuned(kernels.double, 16, 32, 64)
    (adopted,) = tilescout.adopt(kernel).kernels
    x, y = vectors()
    with tilescout.tuning():
        kernel[grid](x, y, N)
    assert torch.equal(y, 2 * x)
    assert kernel.best_config.kwargs == {"BLOCK": 32}
    assert trials() == {16: "ok", 32: "ok", 64: "ok"}
    found = adopted.lookup(x, y, N)
    assert (found.tier, found.config["BLOCK"], found.time_us) == ("exact", 32, 1000.0)
    # A new process has a new autotuner, and the database.
    again = autotuned(kernels.double, 16, 32, 64)
    tilescout.adopt(again)
    again[grid](x, y, N)
    assert again.best_config.kwargs == {"BLOCK": 32}
    # Another key is another problem, another dtype too.
    for arguments in ((x[:100], y, 100), (x.double(), y.double(), N)):
        again[grid](*arguments)
        assert again.best_config.kwargs == {"BLOCK": 16}


def test_tuning_is_done_once_a_problem() -> None:
    kernel = autotuned(kernels.double, 16, 32)
    tilescout.adopt(kernel, on_miss="tune")
    x, y = vectors()
    kernel[grid](x, y, N)
    with Store.open(user_database_path(), read_only=True) as store:
        (first,) = store.studies()
    kernel[grid](x, y, N)
    with tilescout.tuning():
        kernel[grid](x, y, N)
    with Store.open(user_database_path(), read_only=True) as store:
        assert [study.study_id for study in store.studies()] == [first.study_id]


def test_a_config_that_is_wrong_never_wins() -> None:
    kernel = autotuned(kernels.double_wrongly_at_128, 16, 32, 128)
    tilescout.adopt(kernel)
    x, y = vectors()
    with tilescout.tuning():
        kernel[grid](x, y, N)
    assert trials()[128] == "incorrect"
    assert kernel.best_config.kwargs == {"BLOCK": 32}
    assert torch.equal(y, 2 * x)


def test_a_reference_judges_the_first_config_too() -> None:
    kernel = autotuned(kernels.double_wrongly_at_128, 128, 16)
    tilescout.adopt(kernel, reference=lambda x, y, n: {"y": 2 * x})
    x, y = vectors()
    with tilescout.tuning():
        kernel[grid](x, y, N)
    assert trials() == {128: "incorrect", 16: "ok"}
    assert torch.equal(y, 2 * x)


def test_an_in_place_kernel_is_applied_once() -> None:
    kernel = autotuned(kernels.increase, 16, 32)
    tilescout.adopt(kernel)
    x = torch.zeros(N)
    with tilescout.tuning():
        kernel[grid](x, N)
    assert torch.equal(x, torch.ones(N))
    kernel[grid](x, N)
    assert torch.equal(x, torch.full((N,), 2.0))


def test_restore_value_and_hooks_are_called_as_in_triton() -> None:
    kernel = autotuned(kernels.increase, 16, 32, restore_value=["x"])
    tilescout.adopt(kernel)
    x = torch.zeros(N)
    with tilescout.tuning():
        kernel[grid](x, N)
    assert torch.equal(x, torch.ones(N))
    seen: list[str] = []
    hooked = autotuned(
        kernels.double,
        16,
        32,
        pre_hook=lambda nargs, reset_only=False: seen.append("pre"),
        post_hook=lambda nargs, exception: seen.append("post"),
    )
    tilescout.adopt(hooked)
    x, y = vectors()
    with tilescout.tuning():
        hooked[grid](x, y, N)
    assert seen.count("post") > 0
    assert seen.count("pre") > seen.count("post")  # once more a config, before its check
    seen.clear()
    hooked[grid](x, y, N)
    assert seen == []


def test_reset_to_zero_starts_every_run_from_zero() -> None:
    kernel = autotuned(kernels.accumulate, 16, 32, reset_to_zero=["total"])
    tilescout.adopt(kernel)
    x, total = torch.rand(N), torch.zeros(1)
    with tilescout.tuning():
        kernel[grid](x, total, N)
    torch.testing.assert_close(total, x.sum()[None], rtol=1e-4, atol=1e-4)
    assert trials() == {16: "ok", 32: "ok"}


def test_a_hook_of_a_config_runs_before_each_launch() -> None:
    seen: list[int] = []

    def hook(nargs: dict) -> None:
        seen.append(nargs["BLOCK"])

    both = [triton.Config({"BLOCK": 16}, pre_hook=hook), triton.Config({"BLOCK": 16})]
    kernel = autotuned(kernels.double, configs=both)
    (adopted,) = tilescout.adopt(kernel).kernels
    assert len(set(adopted.table.all)) == 2
    x, y = vectors()
    kernel[grid](x, y, N)
    assert seen == [16]


def test_pruning_decides_what_may_run() -> None:
    def prune(all_configs, nargs, **kwargs):
        assert nargs["n"] == N
        return [c for c in all_configs if c.kwargs["BLOCK"] != 32 and c.kwargs["BLOCK"] != 16]

    kernel = autotuned(
        kernels.double, 16, 32, 64, 128, prune_configs_by={"early_config_prune": prune}
    )
    tilescout.adopt(kernel)
    x, y = vectors()
    kernel[grid](x, y, N)
    assert kernel.best_config.kwargs == {"BLOCK": 64}
    with tilescout.tuning():
        kernel[grid](x, y, N)
    assert set(trials()) == {64, 128}
    assert kernel.best_config.kwargs == {"BLOCK": 128}


def test_a_winner_that_pruning_refuses_does_not_serve() -> None:
    kernel = autotuned(kernels.double, 16, 128)
    tilescout.adopt(kernel)
    x, y = vectors()
    with tilescout.tuning():
        kernel[grid](x, y, N)
    assert kernel.best_config.kwargs == {"BLOCK": 128}
    narrow = {"early_config_prune": lambda c, nargs, **kw: c[:1]}
    other = autotuned(kernels.double, 16, 128, prune_configs_by=narrow)
    tilescout.adopt(other)
    other[grid](x, y, N)
    assert other.best_config.kwargs == {"BLOCK": 16}


def test_strict_says_so_and_triton_may_tune() -> None:
    kernel = autotuned(kernels.double, 16, 32)
    tilescout.adopt(kernel)
    x, y = vectors()
    with tilescout.policy("strict"), pytest.raises(NoWinnerError, match="tunable_kernels:double"):
        kernel[grid](x, y, N)
    theirs = autotuned(kernels.double, 16, 32)
    tilescout.adopt(theirs, on_miss="triton")
    theirs[grid](x, y, N)
    assert theirs.best_config.kwargs == {"BLOCK": 32}
    assert not user_database_path().exists()


def test_heuristics_around_it_stay() -> None:
    inner = triton.jit(kernels.double)
    outer = triton.heuristics({"n": lambda args: args["x"].numel()})(
        triton.autotune(configs=configs(16, 32), key=["n"], do_bench=made_up_timer)(inner)
    )
    (adopted,) = tilescout.adopt(outer).kernels
    x, y = vectors()
    outer[grid](x, y)
    assert torch.equal(y, 2 * x)
    assert adopted.autotuner.best_config.kwargs == {"BLOCK": 16}


def test_a_changed_kernel_has_no_winner_yet() -> None:
    x, y = vectors()
    kernel = autotuned(kernels.double, 16, 32)
    (before,) = tilescout.adopt(kernel).kernels
    with tilescout.tuning():
        kernel[grid](x, y, N)
    assert before.lookup(x, y, N).tier == "exact"
    source = source_of(kernel.fn)
    assert source == source_of(autotuned(kernels.double, 64).fn)
    assert source != source_of(autotuned(kernels.increase, 64).fn)
    # Another kernel of the same name is another operation.
    renamed = autotuned(kernels.increase, 16, 32)
    renamed.base_fn = kernels.double
    (other,) = tilescout.adopt(renamed).kernels
    assert (before.op, other.op[:23]) == ("tunable_kernels:double", "tunable_kernels:double@")


def test_a_module_is_adopted_at_once() -> None:
    module = type(sys)("adopted_module")
    module.one = autotuned(kernels.double, 16, 32)
    module.same = module.one
    module.two = autotuned(kernels.increase, 16, 32)
    module.single = autotuned(kernels.accumulate, 16)
    module.other = 7
    sys.modules["adopted_module"] = module
    try:
        adoption = tilescout.adopt("adopted_module")
        assert [k.op for k in adoption.kernels] == [
            "tunable_kernels:double",
            "tunable_kernels:increase",
        ]
        assert adoption.refused == (
            ("adopted_module.single", "it has one config: there is nothing to choose"),
        )
        assert tilescout.adopt(module).kernels == adoption.kernels
        with pytest.raises(
            UsageError, match=r"a reference is of one kernel, but module .* holds 3"
        ):
            tilescout.adopt(module, reference=dict)
    finally:
        del sys.modules["adopted_module"]


@pytest.mark.parametrize("target", ["no_such_package", 7, kernels, kernels.double])
def test_what_holds_no_kernel_is_named(target: object) -> None:
    with pytest.raises(UsageError, match=r"holds no kernel that @triton\.autotune decorates"):
        tilescout.adopt(target)


def test_on_miss_is_checked() -> None:
    with pytest.raises(UsageError, match="on_miss='never' is not one of default, triton, tune"):
        tilescout.adopt(autotuned(kernels.double, 16, 32), on_miss="never")


class TestDecorator:
    def decorated(self, **changes):
        arguments = {
            "space": {"BLOCK": (16, 32, 128), "num_warps": (4, 8)},
            "problem": ["n"],
            "reference": lambda x, y, n: {"y": 2 * x},
            "do_bench": made_up_timer,
        }
        decorate = tilescout.autotune(**{**arguments, **changes})
        return decorate(triton.jit(kernels.double_wrongly_at_128))

    def test_its_space_is_the_product_and_its_reference_the_gate(self) -> None:
        kernel = self.decorated()
        x, y = vectors()
        kernel[grid](x, y, N)
        assert torch.equal(y, 2 * x)
        with tilescout.tuning():
            kernel[grid](x, y, N)
        assert trials() == {16: "ok", 32: "ok", 128: "incorrect"}
        assert kernel.best_config.kwargs == {"BLOCK": 32}
        with Store.open(user_database_path(), read_only=True) as store:
            (study,) = store.studies()
            assert len(store.trials(study.study_id)) == 6

    def test_a_constraint_leaves_configs_out(self) -> None:
        kernel = self.decorated(
            constraint=lambda c: "too wide" if c["BLOCK"] * c["num_warps"] > 128 else None
        )
        assert [(c.kwargs["BLOCK"], c.num_warps) for c in kernel.configs] == [
            (16, 4),
            (16, 8),
            (32, 4),
        ]

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"problem": ["m"]}, r"'m' is no argument of double_wrongly_at_128: it takes x, y, n"),
            ({"space": {"BLOCK": ()}}, r"space\['BLOCK'\]=\(\) must be a list"),
            ({"space": {"BLOCK": "16"}}, "must be a list"),
            ({"space": []}, "has no valid config"),
            ({"space": {"BLOCK": range(1000), "A": range(101)}}, r"101000 configs .* at most"),
            ({"constraint": lambda c: "never"}, "has no valid config"),
            ({"restore_value": ["z"]}, "'z' is no argument"),
        ],
    )
    def test_what_is_wrong_is_named(self, changes: dict, reason: str) -> None:
        with pytest.raises(UsageError, match=reason):
            self.decorated(**changes)

    def test_a_plain_function_is_refused(self) -> None:
        with pytest.raises(UsageError, match=r"put @triton\.jit or @tilelang\.jit under"):
            tilescout.autotune(space={"BLOCK": (16, 32)}, problem=["n"])(kernels.double)
