"""The FP4 attention backward problem: what training needs of a forward in FP4."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..base import Problem
from ..fp4_attention.problem import KEY_PADDING, OUT_DTYPE_BYTES, PRODUCTS
from ..quantization.formats import NVFP4

__all__ = ["Fp4AttentionBwdProblem"]

_NUM_PRODUCTS = 5
_FLOAT_BYTES = 4


@dataclass(frozen=True)
class Fp4AttentionBwdProblem(Problem):
    """dQ, dK and dV of softmax(Q K^T sm_scale) V, Q and K saved in NVFP4, V in e4m3.

    P, dS, Q, K and V are multiplied in e4m3 and dO in e5m2 (arXiv 2609.04105), scores are those of
    the forward.
    """

    op: ClassVar[str] = "fp4_attention_bwd"
    dynamic_fields: ClassVar[tuple[str, ...]] = ("kv_len", "query_len", "batch")

    batch: int
    num_qo_heads: int
    num_kv_heads: int
    query_len: int
    kv_len: int
    head_dim: int
    products: str
    """How scores are recomputed. ``native``: FP4 tensor cores; ``emulated``: the same codes and
    scales in 16-bit products. All others are FP8."""
    is_causal: bool = True
    """Whether query i sees keys up to i + kv_len - query_len (bottom right)."""
    dtype: str = "bfloat16"
    """Of the output, its gradient and the gradients."""

    def __post_init__(self) -> None:
        self.check_sizes()
        self.check_one_of("products", PRODUCTS)
        self.check_one_of("dtype", OUT_DTYPE_BYTES)
        self.check_multiple("num_qo_heads", "num_kv_heads")

    @property
    def group_size(self) -> int:
        """Query heads that share a KV head."""
        return self.num_qo_heads // self.num_kv_heads

    @property
    def padded_rows(self) -> int:
        """Query rows that scratch memory is for."""
        return -(-self.query_len // KEY_PADDING) * KEY_PADDING

    @property
    def padded_keys(self) -> int:
        """Keys that V is stored for."""
        return -(-self.kv_len // KEY_PADDING) * KEY_PADDING

    @property
    def num_pairs(self) -> int:
        """Pairs of a query and a key that it sees, in one head."""
        if not self.is_causal:
            return self.query_len * self.kv_len
        rows = min(self.query_len, self.kv_len)
        return rows * self.kv_len - rows * (rows - 1) // 2

    @property
    def flops(self) -> int:
        """Five products over the pairs that are seen."""
        products = 2 * _NUM_PRODUCTS * self.head_dim
        return self.batch * self.num_qo_heads * products * self.num_pairs

    @property
    def bytes_moved(self) -> int:
        """Codes, V, the output and its gradient read once, the gradients written once."""
        queries = self.batch * self.num_qo_heads * self.query_len
        keys = self.batch * self.num_kv_heads * self.kv_len
        code_bits = int(NVFP4.bits_per_element * self.head_dim * (queries + keys))
        v_bytes = self.batch * self.num_kv_heads * self.padded_keys * self.head_dim
        rows = 3 * queries + 2 * keys  # out, its gradient and dQ; dK and dV
        values = rows * self.head_dim * OUT_DTYPE_BYTES[self.dtype]
        return code_bits // 8 + v_bytes + values + _FLOAT_BYTES * queries

    @property
    def compute_dtype(self) -> str:
        """Of four of the five products."""
        return "float8_e4m3fn"
