"""Debug mode finds page tables out of range before a kernel reads there."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from decode_calls import call, problem_of
from tilescout import ops
from tilescout.errors import UsageError
from tilescout.kernels.paged_decode import reference as ref
from tilescout.ops.debug_checks import check_page_table, checks_values


def inputs_of(*, is_dense: bool = False):
    return ref.paged_inputs(
        problem_of(), [50, 0, 64], device="cpu", seed=1, num_unused_pages=2, is_dense=is_dense
    )


def changed(inputs, name: str, index, value: int):
    tensor = getattr(inputs, name).clone()
    tensor[index] = value
    return replace(inputs, **{name: tensor})


@pytest.mark.parametrize("is_dense", [False, True], ids=["csr", "dense"])
def test_right_tables_pass_whatever_lies_beyond_their_ends(is_dense: bool) -> None:
    check_page_table("f", inputs_of(is_dense=is_dense))
    if not is_dense:
        longer = inputs_of()
        table = torch.cat([longer.kv_indices, torch.tensor([-7], dtype=torch.int32)])
        check_page_table("f", replace(longer, kv_indices=table))


@pytest.mark.parametrize(
    ("name", "index", "value", "reason"),
    [
        ("kv_indices", 0, -1, "request 0 in f: a page id is -1, must be from 0 to 9"),
        ("kv_indices", 5, 10, "request 2 in f: a page id is 10, must be from 0 to 9: the cache"),
        ("kv_indptr", 1, 9, "request 0 in f: kv_indptr goes from 0 to 9, must be rising"),
        ("kv_indptr", 1, 5, "request 1 in f: kv_indptr goes from 5 to 4, must be rising"),
        ("kv_last_page_len", 0, 17, "request 0 in f: kv_last_page_len is 17, must be from 1 to 16"),
        ("kv_last_page_len", 2, 0, "request 2 in f: kv_last_page_len is 0"),
    ],
)
def test_csr_tables_out_of_range(name: str, index: int, value: int, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        check_page_table("f", changed(inputs_of(), name, index, value))


@pytest.mark.parametrize(
    ("name", "index", "value", "reason"),
    [
        ("kv_indices", (0, 1), 99, "request 0 in f: a page id is 99"),
        ("seq_lens", 1, -1, "request 1 in f: seq_lens is -1, must be from 0 to 64"),
        ("seq_lens", 2, 65, "request 2 in f: seq_lens is 65, must be from 0 to 64, its row's room"),
    ],
)
def test_dense_tables_out_of_range(name: str, index, value: int, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        check_page_table("f", changed(inputs_of(is_dense=True), name, index, value))


def test_calls_check_in_debug_mode_only(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = changed(inputs_of(), "kv_indices", 0, -1)
    cpu = torch.device("cpu")
    assert not checks_values(cpu)
    with ops.debugging():
        assert checks_values(cpu)
        with pytest.raises(UsageError, match="request 0 in paged_decode: a page id is -1"):
            call(wrong)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert not checks_values(torch.device("cuda"))
    assert not checks_values(cpu)
