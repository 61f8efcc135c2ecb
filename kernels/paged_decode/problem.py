"""The paged-decode problem: a few query tokens a request against a paged KV cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import ClassVar

from ...errors import UsageError
from ..base import Problem
from .lengths import LENGTH_MIXES, NUM_VARIANTS, request_lengths

__all__ = ["DTYPE_BYTES", "KV_DTYPE_BYTES", "NVFP4", "NVFP4_BLOCK", "PagedDecodeProblem"]

DTYPE_BYTES = {"bfloat16": 2, "float16": 2}
"""Of q and the output."""
KV_DTYPE_BYTES = {**DTYPE_BYTES, "float8_e4m3fn": 1, "float8_e5m2": 1}
"""Of the KV cache where values are stored one by one: q's dtype, or an 8-bit one."""
NVFP4 = "nvfp4"
"""``kv_dtype`` of a cache of e2m1 codes, two a byte, with an e4m3 scale for each block."""
NVFP4_BLOCK = 16
"""Values of a row that share a scale."""


@dataclass(frozen=True)
class PagedDecodeProblem(Problem):
    """``batch`` requests that attend with ``query_len`` tokens each to a paged KV cache.

    q ``[batch * query_len, num_qo_heads, head_dim]``; K and V pools of pages of ``page_size``
    tokens for ``num_kv_heads`` heads. Where ``head_dim_v`` is less than ``head_dim`` (MLA), V is
    the first ``head_dim_v`` values of the row of K and is stored once.
    """

    op: ClassVar[str] = "paged_decode"
    dynamic_fields: ClassVar[tuple[str, ...]] = ("kv_len", "batch")
    following_fields: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"kv_dtype": "dtype", "head_dim_v": "head_dim"}
    )

    batch: int
    """Requests."""
    kv_len: int
    """Tokens of a request; the longest request where ``lengths`` says that they differ."""
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    """Of q and K."""
    page_size: int
    """Tokens of one page."""
    dtype: str
    """Of q and the output: ``bfloat16`` or ``float16``."""
    kv_dtype: str = ""
    """Of the cache: as ``dtype`` (also for an empty word), ``float8_e4m3fn``, ``float8_e5m2`` or
    ``nvfp4`` (two codes a byte and a scale for 16 values)."""
    query_len: int = 1
    """Query tokens of each request, the last ones of its sequence."""
    head_dim_v: int = 0
    """Of V and the output; 0: as ``head_dim``."""
    kv_layout: str = "NHD"
    """Order within a page: ``NHD`` (token, head, dimension) or ``HND``."""
    lengths: str = "equal"
    """How tokens are spread over the requests: one of ``LENGTH_MIXES``."""
    window_left: int = -1
    """Tokens before a query that it attends to besides itself; -1: all."""
    is_causal: bool = True
    """Whether a query token attends to none of the tokens after it."""
    has_soft_cap: bool = False
    """Whether logits x become cap * tanh(x / cap)."""
    has_sinks: bool = False
    """Whether every query head has a logit without a value in its softmax."""
    has_alibi: bool = False
    """Whether a slope per query head times the (negative) distance is added to the logits."""
    has_rope: bool = False
    """Whether q and K are rotated by their positions in the kernel."""

    def __post_init__(self) -> None:
        # Frozen: the two words that stand for another field's value are spelt out once.
        object.__setattr__(self, "kv_dtype", self.kv_dtype or self.dtype)
        object.__setattr__(self, "head_dim_v", self.head_dim_v or self.head_dim)
        self.check_sizes(besides=("window_left",))
        self.check_one_of("dtype", DTYPE_BYTES)
        self.check_one_of("kv_dtype", (self.dtype, "float8_e4m3fn", "float8_e5m2", NVFP4))
        self.check_one_of("kv_layout", ("NHD", "HND"))
        self.check_one_of("lengths", LENGTH_MIXES)
        self.check_multiple("num_qo_heads", "num_kv_heads")
        # Kernels subtract both from a position in 32 bits.
        if not -1 <= self.window_left < 2**31 - self.query_len:
            raise self._wrong("window_left", "-1 (none) or a number of tokens below 2^31")
        if self.head_dim_v > self.head_dim:
            raise self._wrong("head_dim_v", f"at most head_dim={self.head_dim}")
        if self.is_latent and self.num_kv_heads != 1:
            raise self._wrong("num_kv_heads", f"1 where head_dim_v < head_dim={self.head_dim}")
        if self.kv_dtype == NVFP4 and (self.is_latent or self.head_dim % NVFP4_BLOCK):
            allowed = f"another one where head_dim={self.head_dim} is no multiple of {NVFP4_BLOCK}"
            raise self._wrong("kv_dtype", f"{allowed}, or head_dim_v={self.head_dim_v} is less")
        if self.has_soft_cap and self.has_alibi:
            # Peers disagree on the order of the two; no model has both.
            raise self._wrong("has_soft_cap", "false where has_alibi is true")
        if self.is_latent and self.has_rope:
            raise self._wrong("has_rope", "false where head_dim_v < head_dim (rotate before)")

    def _wrong(self, name: str, allowed: str) -> UsageError:
        value = getattr(self, name)
        return UsageError(f"{name}={value!r} of a {self.op} problem must be {allowed}")

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_qo_heads // self.num_kv_heads

    @property
    def rows_per_kv_head(self) -> int:
        """Rows of q that read the same K and V: query heads of a group times query tokens."""
        return self.group_size * self.query_len

    @property
    def is_latent(self) -> bool:
        """Whether V is a part of K's row (MLA)."""
        return self.head_dim_v != self.head_dim

    @property
    def kv_row_bytes(self) -> int:
        """Bytes of one token's K for one head, block scales included."""
        if self.kv_dtype == NVFP4:
            return self.head_dim // 2 + self.head_dim // NVFP4_BLOCK
        return self.head_dim * KV_DTYPE_BYTES[self.kv_dtype]

    @property
    def num_input_variants(self) -> int:
        """Inputs of a problem of mixed lengths differ; copies come in multiples of this."""
        return NUM_VARIANTS if self.lengths == "mixed" else 1

    @cached_property
    def tokens_read(self) -> int:
        """Tokens of K and V that one launch has to read, in the mean of the variants."""
        total = 0
        for seed in range(self.num_input_variants):
            lengths = request_lengths(self.lengths, self.batch, self.kv_len, seed)
            if self.window_left >= 0:
                window = self.window_left + self.query_len
                lengths = [min(length, window) for length in lengths]
            total += sum(lengths)
        return total // self.num_input_variants

    @property
    def flops(self) -> int:
        """Q k^T and p v: 2 x tokens x query rows of a head x (head_dim + head_dim_v)."""
        rows = self.num_qo_heads * self.query_len
        return 2 * self.tokens_read * rows * (self.head_dim + self.head_dim_v)

    @property
    def bytes_moved(self) -> int:
        """K, V, q and the output; page table and partial results are not counted."""
        pools = 1 if self.is_latent else 2
        kv = self.tokens_read * self.num_kv_heads * pools * self.kv_row_bytes
        rows = self.batch * self.query_len * self.num_qo_heads
        return kv + rows * (self.head_dim + self.head_dim_v) * DTYPE_BYTES[self.dtype]

    @property
    def compute_dtype(self) -> str:
        """Dtype of the matrix products."""
        return self.dtype
