"""Which outputs lie where they may be written."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tilescout.ops.overlap import is_in_place_of, shares_memory


def addresses(tensor: torch.Tensor) -> set[int]:
    """Byte offsets of every element in the storage, one by one."""
    strides = tensor.stride()
    found: set[int] = set()
    for index in itertools.product(*map(range, tensor.shape)):
        element = tensor.storage_offset() + sum(i * s for i, s in zip(index, strides, strict=True))
        first = element * tensor.element_size()
        found.update(range(first, first + tensor.element_size()))
    return found


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_sharing_is_never_missed(data: st.DataObject) -> None:
    base = torch.zeros(96, dtype=torch.float16)
    views = []
    for _ in range(2):
        shape = data.draw(st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4)))
        strides = (data.draw(st.integers(1, 16)), data.draw(st.integers(1, 8)), 1)
        views.append(base.as_strided(shape, strides, data.draw(st.integers(0, 40))))
    first, second = views
    if addresses(first) & addresses(second):
        assert shares_memory(first, second)
        assert shares_memory(second, first)


WIDE = torch.zeros(3, 8, 16)
APART = {
    "heads of one row": (WIDE[:, :4], WIDE[:, 4:]),
    "every other head": (WIDE[:, ::2], WIDE[:, 1::2]),
    "values of one head": (WIDE[..., :8], WIDE[..., 8:]),
    "other rows": (WIDE[:1], WIDE[1:]),
    "narrower heads": (WIDE[..., :4], WIDE[..., 4:]),
    "nothing": (WIDE[:0], WIDE),
    "another tensor": (WIDE, WIDE.clone()),
    "another dtype": (WIDE, torch.zeros(3, 8, 16).half()),
}


@pytest.mark.parametrize("case", APART)
def test_slices_that_do_not_touch_are_apart(case: str) -> None:
    first, second = APART[case]
    assert not shares_memory(first, second)
    assert not shares_memory(second, first)


def test_the_same_elements_in_the_same_order_are_in_place() -> None:
    assert is_in_place_of(WIDE[:, :4], WIDE.narrow(1, 0, 4))
    assert not is_in_place_of(WIDE[:2], WIDE)
    assert not is_in_place_of(WIDE, WIDE.transpose(0, 1).contiguous().transpose(0, 1))
