"""Debug mode: also looks at the values of page tables, which makes every call wait for the device.

Off by default. A page table out of range makes a kernel read memory that is not the cache's.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import pairwise

import torch

from ..errors import UsageError
from ..kernels.paged_decode import PagedDecodeInputs

__all__ = ["check_page_table", "checks_values", "debugging", "is_debugging"]

DEBUG_VARIABLE = "TILESCOUT_DEBUG"
"""Environment variable that turns the mode on, by any value but 0 and the empty one."""

_of_environment = os.environ.get(DEBUG_VARIABLE, "").strip() not in ("", "0")
_is_on: ContextVar[bool] = ContextVar("tilescout_debug", default=_of_environment)
is_debugging = _is_on.get
"""Whether the mode is on in this thread or task."""


@contextmanager
def debugging() -> Iterator[None]:
    """Calls inside check values too, in this thread or task."""
    token = _is_on.set(True)
    try:
        yield
    finally:
        _is_on.reset(token)


def checks_values(device: torch.device) -> bool:
    """Whether values are to be checked; never while a CUDA graph is captured."""
    if not _is_on.get():
        return False
    return device.type != "cuda" or not torch.cuda.is_current_stream_capturing()


def check_page_table(function: str, inputs: PagedDecodeInputs) -> None:
    """Raises UsageError where a kernel would read outside the table or the cache."""
    num_pages, page_size = inputs.k_cache.shape[:2]
    if inputs.seq_lens is None:
        assert inputs.kv_indptr is not None
        assert inputs.kv_last_page_len is not None
        pages = _csr_pages(function, inputs.kv_indptr.tolist(), inputs.kv_indices)
        for request, (ids, last) in enumerate(
            zip(pages, inputs.kv_last_page_len.tolist(), strict=True)
        ):
            if len(ids) and not 1 <= last <= page_size:
                _fail(function, request, f"kv_last_page_len is {last}", f"from 1 to {page_size}")
            _check_ids(function, request, ids, num_pages)
        return
    room = inputs.kv_indices.shape[1] * page_size
    for request, length in enumerate(inputs.seq_lens.tolist()):
        if not 0 <= length <= room:
            _fail(function, request, f"seq_lens is {length}", f"from 0 to {room}, its row's room")
        ids = inputs.kv_indices[request, : -(-length // page_size)]
        _check_ids(function, request, ids, num_pages)


def _csr_pages(function: str, indptr: list[int], indices: torch.Tensor) -> list[torch.Tensor]:
    pages = []
    for request, (first, end) in enumerate(pairwise(indptr)):
        if not 0 <= first <= end <= indices.shape[0]:
            allowed = f"rising, from 0 to {indices.shape[0]}, the length of kv_indices"
            _fail(function, request, f"kv_indptr goes from {first} to {end}", allowed)
        pages.append(indices[first:end])
    return pages


def _check_ids(function: str, request: int, ids: torch.Tensor, num_pages: int) -> None:
    wrong = ids[(ids < 0) | (ids >= num_pages)]
    if wrong.numel():
        allowed = f"from 0 to {num_pages - 1}: the cache has {num_pages} pages"
        _fail(function, request, f"a page id is {int(wrong[0])}", allowed)


def _fail(function: str, request: int, what: str, allowed: str) -> None:
    raise UsageError(f"request {request} in {function}: {what}, must be {allowed}")
