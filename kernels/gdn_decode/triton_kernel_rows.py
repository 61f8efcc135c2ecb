"""Triton device code that moves states between a pool and batch order."""

import triton
import triton.language as tl


@triton.jit
def move_rows_kernel(pool, rows, slots, num_elements, IS_GATHER: tl.constexpr, BLOCK: tl.constexpr):
    """rows[i] = pool[slots[i]], or the other way; BLOCK elements of one row a program.

    A negative slot gives a row of zeros and is written nowhere.
    """
    sequence = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + sequence).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = offsets < num_elements
    is_live = offsets < tl.where(slot >= 0, num_elements, 0)
    in_pool = pool + tl.maximum(slot, 0) * num_elements + offsets
    in_rows = rows + sequence * num_elements + offsets
    if IS_GATHER:
        tl.store(in_rows, tl.load(in_pool, is_live, other=0.0), is_inside)
    else:
        value = tl.load(in_rows, is_live, other=0.0)
        tl.store(in_pool, value.to(pool.dtype.element_ty), is_live)
