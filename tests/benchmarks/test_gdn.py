"""The gated-delta-net benchmark without a GPU: libraries called, table, targets, filling."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import fake_libraries
import pytest
import torch
from tilescout.kernels.base import Config
from tilescout.kernels.gdn_chunk_fwd import GdnChunkProblem
from tilescout.kernels.gdn_decode import GdnDecodeProblem
from tilescout.kernels.registry import operation
from tilescout.tuner.catalog import gpu
from winner_databases import MadeUpWinner, write_winners

FOLDER = Path(__file__).parents[2] / "benchmarks"
CHUNK = GdnChunkProblem(2, 150, 100, 1, 2, 128, 128, "bfloat16")
DECODE = GdnDecodeProblem(3, 1, 1, 2, 128, 128, "bfloat16", state_layout="VK")


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return import_module("gdn")


@pytest.fixture
def libraries(bench):
    return import_module("gdn_libraries")


def cell_of(problem):
    timing = import_module("side_by_side")
    op = operation(problem.op)
    inputs = [op.make_inputs(problem, device="cpu", seed=seed) for seed in range(2)]
    return timing.Cell(problem, inputs, [op.make_outputs(problem, i) for i in inputs])


@pytest.mark.parametrize("layout", ["KV", "VK"])
@pytest.mark.parametrize("name", ["fla", "flash_qla", "flashinfer", "flashinfer_kv"])
def test_prefill_libraries_are_called_and_verified(libraries, monkeypatch, name, layout) -> None:
    called = fake_libraries.install(monkeypatch)
    problem = GdnChunkProblem.from_dict({**CHUNK.as_dict(), "state_layout": layout})
    if (name, layout) == ("flashinfer_kv", "VK"):
        with pytest.raises(import_module("side_by_side").LeftOutError, match="as they are"):
            libraries.CHUNK_LIBRARIES[name](cell_of(problem))
        return
    calls = libraries.CHUNK_LIBRARIES[name](cell_of(problem))
    assert len(calls) == len(called) == 2
    calls[1]()
    assert len(called) == 3


@pytest.mark.parametrize("layout", ["KV", "VK"])
@pytest.mark.parametrize("name", ["fla", "flashinfer", "flashinfer_kv"])
def test_decode_libraries_are_called_and_verified(libraries, monkeypatch, name, layout) -> None:
    fake_libraries.install(monkeypatch)
    problem = GdnDecodeProblem.from_dict({**DECODE.as_dict(), "state_layout": layout})
    assert len(libraries.DECODE_LIBRARIES[name](cell_of(problem))) == 2
    ordered = replace(cell_of(problem), inputs=in_batch_order(libraries, cell_of(problem)))
    assert len(libraries.DECODE_LIBRARIES[name](ordered)) == 2


def in_batch_order(libraries, cell):
    return [libraries.in_batch_order(i) for i in cell.inputs]


def test_a_pool_is_given_to_flashinfer_as_it_is(libraries, monkeypatch) -> None:
    called = fake_libraries.install(monkeypatch)
    left_out = import_module("side_by_side").LeftOutError
    cell = cell_of(DECODE)
    before = cell.inputs[0].state.clone()
    assert len(libraries.DECODE_LIBRARIES["flashinfer_pool"](cell)) == len(called) == 2
    assert torch.equal(cell.inputs[0].state, before), "states of the cell are only read"
    ordered = replace(cell, inputs=in_batch_order(libraries, cell))
    assert all(i.slots is None for i in ordered.inputs)
    assert torch.equal(ordered.inputs[0].state, before[cell.inputs[0].slots.long()])
    with pytest.raises(left_out, match="batch order"):
        libraries.DECODE_LIBRARIES["flashinfer_pool"](ordered)
    kv = GdnDecodeProblem.from_dict({**DECODE.as_dict(), "state_layout": "KV"})
    with pytest.raises(left_out, match=r"\[V, K\]"):
        libraries.DECODE_LIBRARIES["flashinfer_pool"](cell_of(kv))


def test_a_wrong_library_is_left_out(libraries, monkeypatch) -> None:
    fake_libraries.install(monkeypatch)
    right = sys.modules["flash_qla"].chunk_gated_delta_rule_fwd

    def wrong(*args, **kwargs):
        found = list(right(*args, **kwargs))
        found[2] = found[2] * 1.05
        return tuple(found)

    monkeypatch.setattr(sys.modules["flash_qla"], "chunk_gated_delta_rule_fwd", wrong)
    with pytest.raises(import_module("side_by_side").LeftOutError, match="wrong: output"):
        libraries.CHUNK_LIBRARIES["flash_qla"](cell_of(CHUNK))


def test_missing_libraries_are_named_with_what_they_need(libraries, monkeypatch) -> None:
    fake_libraries.install(monkeypatch, "fla-core")
    found, missing = libraries.usable(libraries.CHUNK_LIBRARIES, ["fla", "flashinfer"])
    assert list(found) == ["fla"]
    assert list(missing) == ["flashinfer", "flashinfer_kv"]
    assert "flashinfer-python>=0.6.18" in missing["flashinfer"]


def test_targets_say_pass_fail_and_what_was_not_measured(bench) -> None:
    targets = import_module("gdn_targets")
    rows = {
        "a": {"tilescout": 100.0, "dispatch": 80.0, "fla": 150.0, "flash_qla": 90.0},
        "b": {"tilescout": 100.0, "dispatch": 100.0, "fla": 110.0},
    }
    found = {t.name: t for t in targets.prefill_targets(rows)}
    verdicts = [t.is_reached for t in found.values()]
    assert verdicts == [False, False, True, True, True]
    fla = found["ours against FLA, every row at least 1.2"]
    assert str(fla).strip().startswith("FAIL")
    assert "1.100 over 2 rows, lowest 1.100 at b" in fla.detail
    # A library whose states are the other way round is no rival of a look-up.
    native = {"a": {"tilescout": 90.0, "dispatch": 90.0, "flashinfer": 50.0, "flashinfer_kv": 95.0}}
    look_up = [targets.prefill_targets(native, layout)[-1].is_reached for layout in ("KV", "VK")]
    assert look_up == [True, False]
    del native["a"]["flashinfer_kv"]
    assert targets.prefill_targets(native)[-1].is_reached is None
    native["a"]["flashinfer_kv"] = 95.0
    assert bench.ratios_of(native["a"])["best/ours"] == pytest.approx(50 / 90)
    assert bench.ratios_of(native["a"])["best/dispatch"] == pytest.approx(95 / 90)
    alone = targets.prefill_targets({"a": {"tilescout": 1.0}})
    assert {t.is_reached for t in alone} == {None}
    batches = {
        1: {"tilescout": 3.1, "dispatch": 3.1, "flashinfer": 2.9},
        4: {"fla": 6.0},
        16: {"tilescout": 20.0, "dispatch": 20.0, "flashinfer": 19.0, "flashinfer_pool": 20.5},
    }
    pool = [t.is_reached for t in targets.decode_targets(batches)]
    assert pool == [True, False, True, True]
    ordered = [t.is_reached for t in targets.decode_targets(batches, "VK")]
    assert ordered == [False, False, True, False]
    assert targets.decode_targets(batches, "KV pool")[0].is_reached is None


def test_rows_and_batches_that_are_timed(bench, monkeypatch) -> None:
    def labels(*words):
        monkeypatch.setattr(sys, "argv", ["gdn.py", *words])
        return bench.labels(bench.parse_arguments())

    assert labels() == [*bench.ROWS, *(f"decode {b}" for b in bench.BATCHES)]
    assert labels("--decode", "4") == ["decode 4"]
    assert labels("--decode") == [f"decode {b}" for b in bench.BATCHES]
    assert labels("--rows", "1x2048 16/48") == ["1x2048 16/48"]
    assert labels("--rows") == list(bench.ROWS)
    for label in labels():
        layout = "KV" if label in bench.ROWS else "VK"
        problem = bench.problem_of(label, layout)
        assert problem.state_layout == layout


def test_table_json_and_targets_of_a_run(bench, monkeypatch, capsys, tmp_path) -> None:
    fake_libraries.install(monkeypatch, "fla-core")
    seen = {}

    def time_cell(problem, device, databases, baselines, *, is_verified, libraries, adjust_inputs):
        seen[problem.op] = (set(baselines), set(libraries), adjust_inputs)
        if problem.op == "gdn_decode":
            raise RuntimeError("no kernel image\nmore")
        us = {"tilescout": 50.0, "default": 60.0, "dispatch": 50.0, "fla": 100.0}
        return {
            "problem": problem.as_dict(),
            "us": us,
            "left_out": {},
            "config": {"chunk": 64},
            "template": "triton",
            "dispatch_template": "triton",
        }

    path = tmp_path / "gdn.json"
    monkeypatch.setattr(bench, "time_cell", time_cell)
    monkeypatch.setattr(bench, "require_gpu", lambda: gpu("h200"))
    words = ["--rows", "1x2048 16/48", "--decode", "1", "--json", str(path)]
    monkeypatch.setattr(sys, "argv", ["gdn.py", *words])
    bench.main()
    printed = capsys.readouterr().out
    assert seen["gdn_chunk_fwd"] == ({"fla"}, {"fla", "flash_qla", "flashinfer"}, None)
    assert seen["gdn_decode"][-1] is None
    assert "PASS  ours against FLA" in printed
    assert "tilescout is missing: RuntimeError: no kernel image" in printed
    assert "flashinfer is missing: flashinfer-python is not installed" in printed
    assert "NOT MEASURED  ours at batch 1" in printed
    record = json.loads(path.read_text())
    assert [row["row"] for row in record["rows"]] == ["1x2048 16/48", "decode 1"]
    assert [row["states"] for row in record["rows"]] == ["KV", "VK pool"]
    assert record["targets"][0]["is_reached"] is True


def test_decode_in_batch_order_is_judged_by_who_has_it_so(
    bench, monkeypatch, capsys, tmp_path
) -> None:
    fake_libraries.install(monkeypatch)
    seen = []

    def time_cell(problem, device, databases, baselines, *, is_verified, libraries, adjust_inputs):
        seen.append(adjust_inputs(cell_of(DECODE).inputs))
        us = {"tilescout": 60.0, "dispatch": 60.0, "flashinfer": 57.0, "flashinfer_pool": 66.0}
        return {"problem": problem.as_dict(), "us": us, "left_out": {}, "config": {}}

    path = tmp_path / "gdn.json"
    monkeypatch.setattr(bench, "time_cell", time_cell)
    monkeypatch.setattr(bench, "require_gpu", lambda: gpu("h200"))
    words = ["--decode", "64", "--batch-order", "--json", str(path)]
    monkeypatch.setattr(sys, "argv", ["gdn.py", *words])
    bench.main()
    assert all(inputs.slots is None for inputs in seen[0])
    (row,) = json.loads(path.read_text())["rows"]
    assert row["states"] == "VK"
    assert "FAIL  dispatch against the best library" in capsys.readouterr().out


@pytest.mark.interpreter
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="set TRITON_INTERPRET=1")
def test_decode_is_timed_in_place_and_dispatch_beside_ours(
    libraries, monkeypatch, tmp_path
) -> None:
    import interpreter_shim

    interpreter_shim.install()
    fake_libraries.install(monkeypatch)
    timing = import_module("side_by_side")
    device, path = gpu("h200"), tmp_path / "winners.db"
    write_winners(path, [MadeUpWinner(DECODE, device, Config.of("flashinfer", {}))])
    cell = cell_of(DECODE)
    before = cell.inputs[0].state.clone()
    timed = {}

    def time_contenders(contenders):
        timed.update(contenders)
        for calls in contenders.values():
            for call in calls:
                call()
        return dict.fromkeys(contenders, 2.0)

    monkeypatch.setattr(timing, "_make_cell", lambda *_: cell)
    monkeypatch.setattr(timing, "_time_contenders", time_contenders)
    names = frozenset(("fla", "flashinfer"))
    baselines = {"flashinfer": libraries.DECODE_LIBRARIES["flashinfer"]}
    row = timing.time_cell(
        DECODE, device, [str(path)], baselines, is_verified=set(baselines), libraries=names
    )
    assert row["left_out"] == {}
    assert list(timed) == ["tilescout", "default", "dispatch", "flashinfer"]
    assert (row["template"], row["dispatch_template"]) == ("triton", "flashinfer")
    assert torch.equal(cell.inputs[0].state, before), "states of the cell are only read"
    without = timing.time_cell(DECODE, device, None, {}, libraries=names)
    assert without["us"]["dispatch"] == without["us"]["tilescout"]


def test_filling_runs_every_task_and_ends_what_is_late(bench, capsys, tmp_path) -> None:
    cache = import_module("gdn_cache")
    script = tmp_path / "task.py"
    script.write_text(
        "import sys, time\n"
        "name = sys.argv[sys.argv.index('--warm') + 1]\n"
        "time.sleep(60 if name == 'late' else 0)\n"
        "sys.exit('no such kernel' if name == 'bad' else 0)\n"
    )
    tasks = [cache.FillTask(name, "row", "KV") for name in ("good", "bad", "late", "last")]
    failed = cache.fill(
        [sys.executable, str(script)], tasks, tmp_path, budget_s=4.0, num_processes=1
    )
    assert failed == 3
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["good", "bad", "late", "last"]
    assert lines[0].endswith("ok")
    assert lines[1].endswith("no such kernel")
    assert lines[2].endswith("ended: the budget is spent")
    assert lines[3].endswith("not begun: the budget is spent")


def test_tuners_time_in_turn_and_compile_before(bench, tmp_path) -> None:
    from triton.runtime.autotuner import Autotuner

    cache = import_module("gdn_cache")
    before = vars(Autotuner)["do_bench"]
    events = []

    class Tuner:
        _do_bench = staticmethod(lambda call, quantiles: (events.append("timed"), call())[0])

    with cache._timing_in_turn(tmp_path):
        timed = type.__getattribute__(Autotuner, "do_bench").fget(Tuner())
        timed(lambda: events.append("called"), quantiles=(0.5,))
    assert events == ["called", "timed", "called"]
    assert vars(Autotuner)["do_bench"] is before
