"""The paged-decode problem: one query token a request against a paged KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..base import Problem

__all__ = ["DTYPE_BYTES", "PagedDecodeProblem"]

DTYPE_BYTES = {"bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class PagedDecodeProblem(Problem):
    """``batch`` requests of ``kv_len`` tokens each; layout NHD, CSR page tables.

    q ``[batch, num_qo_heads, head_dim]``, KV cache
    ``[num_pages, 2, page_size, num_kv_heads, head_dim]``.
    """

    op: ClassVar[str] = "paged_decode"
    dynamic_fields: ClassVar[tuple[str, ...]] = ("kv_len", "batch")

    batch: int
    """Requests."""
    kv_len: int
    """Tokens in the cache of each request."""
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    """Tokens of one page."""
    dtype: str
    """Of q, the KV cache and the output: ``bfloat16`` or ``float16``."""

    def __post_init__(self) -> None:
        self.check_sizes()
        self.check_one_of("dtype", DTYPE_BYTES)
        self.check_multiple("num_qo_heads", "num_kv_heads")

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_qo_heads // self.num_kv_heads

    @property
    def flops(self) -> int:
        """Q k^T and p v: 4 x tokens x query heads x head_dim."""
        return 4 * self.batch * self.kv_len * self.num_qo_heads * self.head_dim

    @property
    def bytes_moved(self) -> int:
        """K, V, q and the output; page table and partial results are not counted."""
        kv = 2 * self.batch * self.kv_len * self.num_kv_heads * self.head_dim
        q_and_out = 2 * self.batch * self.num_qo_heads * self.head_dim
        return (kv + q_and_out) * DTYPE_BYTES[self.dtype]

    @property
    def compute_dtype(self) -> str:
        """Dtype of the matrix products."""
        return self.dtype
