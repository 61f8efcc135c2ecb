"""Which baselines are timed and which are left out, and the data that all contenders get."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest
import torch
from tilescout.kernels.paged_decode import PagedDecodeProblem
from tilescout.kernels.paged_decode import reference as ref

FOLDER = Path(__file__).parents[2] / "benchmarks"
PROBLEM = PagedDecodeProblem(3, 48, 4, 2, 64, 16, "bfloat16", lengths="uniform")


@pytest.fixture
def timing(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return import_module("side_by_side")


@pytest.fixture
def flashinfer_paged(timing):
    return import_module("flashinfer_paged")


@pytest.fixture
def cell(timing, flashinfer_paged):
    inputs = [ref.make_inputs(PROBLEM, device="cpu", seed=seed) for seed in range(3)]
    inputs = flashinfer_paged.with_equal_tables(inputs)
    return timing.Cell(PROBLEM, inputs, [ref.make_outputs(PROBLEM, i) for i in inputs])


def scaled_reference(factor: float):
    """Launches that write the right output times a factor."""

    def calls_of(cell):
        def call(i, o):
            for request in range(PROBLEM.batch):
                o.out[request] = (ref.reference(i, request)[0][0] * factor).to(o.out.dtype)

        return [lambda i=i, o=o: call(i, o) for i, o in zip(cell.inputs, cell.outputs, strict=True)]

    return calls_of


def test_baselines_that_refuse_fail_or_are_wrong_are_left_out_with_a_reason(timing, cell) -> None:
    def refuses(cell):
        raise timing.LeftOutError("page_size=16 is not one of 1")

    def fails(cell):
        raise ValueError("no kernel image\nmore lines")

    baselines = {
        "right": scaled_reference(1.0),
        "wrong": scaled_reference(0.9),
        "coarse": scaled_reference(0.97),
        "refuses": refuses,
        "fails": fails,
        "writes nothing": lambda cell: [lambda: None] * 3,
    }
    bounds = {"coarse": 0.05, "wrong": 0.05, "writes nothing": 0.05}
    usable, left_out = timing._usable_baselines(cell, baselines, (), bounds)
    assert set(usable) == {"right", "coarse"}
    assert left_out["refuses"] == "page_size=16 is not one of 1"
    assert left_out["fails"] == "ValueError: no kernel image"
    assert "wrong" in left_out["wrong"]
    assert "RMS" in left_out["wrong"]
    assert "NaN" in left_out["writes nothing"]
    without_bounds, _ = timing._usable_baselines(cell, baselines, (), {})
    assert set(without_bounds) == {"right"}


def test_a_wrong_kernel_of_ours_raises(timing, cell) -> None:
    from tilescout.errors import TilescoutError

    timing._require_right(cell, "ours", scaled_reference(1.0)(cell))
    with pytest.raises(TilescoutError, match=r"ours is wrong on batch=3 .*RMS"):
        timing._require_right(cell, "ours", scaled_reference(0.0)(cell))


def test_copies_have_equal_tables_in_memory_of_their_own(cell) -> None:
    first, *others = cell.inputs
    for other in others:
        for name in ("kv_indices", "kv_indptr", "kv_last_page_len"):
            mine, theirs = getattr(first, name), getattr(other, name)
            assert torch.equal(mine, theirs)
            assert mine.data_ptr() != theirs.data_ptr()
        assert not torch.equal(first.k_cache, other.k_cache)
        assert int(other.kv_indices.max()) < other.k_cache.shape[0]


def test_dense_tables_and_lengths_say_what_the_csr_table_says(flashinfer_paged, cell) -> None:
    first = cell.inputs[0]
    lengths = flashinfer_paged._lengths(cell)
    tables = flashinfer_paged._block_tables(cell)
    assert sorted(lengths.tolist()) == [8, 24, 40]
    assert lengths.dtype == tables.dtype == torch.int32
    for request, length in enumerate(lengths.tolist()):
        begin, end = first.kv_indptr[request : request + 2].tolist()
        assert end - begin == -(-length // PROBLEM.page_size)
        assert tables[request, : end - begin].tolist() == first.kv_indices[begin:end].tolist()


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"has_sinks": True}, "has_sinks"),
        ({"query_len": 2}, "query_len=2"),
        ({"window_left": 5}, "BatchAttention has no sliding window"),
    ],
)
def test_flashinfer_is_not_asked_for_what_is_not_set_up(
    timing, flashinfer_paged, monkeypatch, fields, reason
) -> None:
    monkeypatch.setitem(import_module("sys").modules, "flashinfer", object())
    values = {**PROBLEM.as_dict(), **fields}
    problem = PagedDecodeProblem.from_dict(values)
    cell = timing.Cell(problem, [ref.make_inputs(problem, device="cpu", seed=0)], [])
    with pytest.raises(timing.LeftOutError, match=reason):
        flashinfer_paged.persistent_calls(cell)
