"""The FP4 attention forward problem: quantised Q, K and V, and the numerics of P."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ...errors import UsageError
from ..base import Problem
from ..quantization.formats import MXFP4, NVFP4, BlockFormat

__all__ = [
    "HEAD_DIMS",
    "KEY_PADDING",
    "MODES",
    "OUT_DTYPE_BYTES",
    "PRODUCTS",
    "P_MAPS",
    "P_SCALES",
    "Q_BLOCK_ROWS",
    "Q_MEANS",
    "Fp4AttentionFwdProblem",
]

HEAD_DIMS = (64, 128)
"""What templates serve; others are padded with zeros by the caller."""
MODES = ("nvfp4", "direct", "fp8_p")
PRODUCTS = ("native", "emulated")
P_SCALES = ("ceil", "floor")
P_MAPS = {"exact": None, "affine": (1.5, 1.2), "affine_wan": (1.6, 0.95)}
"""Slope and intercept of the affine maps (arXiv 2609.04105)."""
Q_MEANS = ("none", "block", "sequence")
OUT_DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
KEY_PADDING = 128
"""V is stored for a multiple of so many keys; zeros past the last."""
Q_BLOCK_ROWS = 128
"""Query rows that share a mean."""


@dataclass(frozen=True)
class Fp4AttentionFwdProblem(Problem):
    """softmax(Q K^T sm_scale) V with Q and K in NVFP4, P and V in what ``mode`` says.

    ``nvfp4``: P and V in NVFP4, P on two levels. ``direct``: P and V in MXFP4 (Direct-P).
    ``fp8_p``: P and V in e4m3.
    """

    op: ClassVar[str] = "fp4_attention_fwd"
    dynamic_fields: ClassVar[tuple[str, ...]] = ("kv_len", "query_len", "batch")

    batch: int
    num_qo_heads: int
    num_kv_heads: int
    query_len: int
    kv_len: int
    head_dim: int
    mode: str
    """Numerics of P and V: ``nvfp4``, ``direct`` or ``fp8_p``."""
    products: str
    """``native``: FP4 tensor cores; ``emulated``: the same codes and scales, dequantised exactly
    and multiplied in 16 bits (FP8 P and V stay in FP8)."""
    is_causal: bool = False
    """Whether query i sees keys up to i + kv_len - query_len (bottom right)."""
    out_dtype: str = "bfloat16"
    p_scale: str = "ceil"
    """``direct`` only: which power of two next to a block's largest P is its scale."""
    p_map: str = "exact"
    """``direct`` only: how log2 P becomes a code."""
    q_mean: str = "none"
    """Rows over which a mean was taken off Q, whose product with K is added to the logits."""

    def __post_init__(self) -> None:
        self.check_sizes()
        self.check_one_of("mode", MODES)
        self.check_one_of("products", PRODUCTS)
        self.check_one_of("out_dtype", OUT_DTYPE_BYTES)
        self.check_one_of("p_scale", P_SCALES)
        self.check_one_of("p_map", P_MAPS)
        self.check_one_of("q_mean", Q_MEANS)
        self.check_multiple("num_qo_heads", "num_kv_heads")
        if self.mode != "direct" and (self.p_scale, self.p_map) != ("ceil", "exact"):
            raise UsageError(
                f"p_scale={self.p_scale!r}, p_map={self.p_map!r} of a {self.op} problem in "
                f"mode={self.mode!r}: only mode='direct' has them; leave them out"
            )

    @property
    def group_size(self) -> int:
        """Query heads that share a KV head."""
        return self.num_qo_heads // self.num_kv_heads

    @property
    def padded_keys(self) -> int:
        """Keys that V is stored for."""
        return -(-self.kv_len // KEY_PADDING) * KEY_PADDING

    @property
    def v_format(self) -> BlockFormat | None:
        """Block format of P and V; None where they are e4m3 without blocks."""
        return {"nvfp4": NVFP4, "direct": MXFP4, "fp8_p": None}[self.mode]

    @property
    def num_q_means(self) -> int:
        """Means of one head."""
        return -(-self.query_len // Q_BLOCK_ROWS) if self.q_mean == "block" else 1

    @property
    def num_pairs(self) -> int:
        """Pairs of a query and a key that it sees, in one head."""
        if not self.is_causal:
            return self.query_len * self.kv_len
        rows = min(self.query_len, self.kv_len)
        return rows * self.kv_len - rows * (rows - 1) // 2

    @property
    def flops(self) -> int:
        """Two products over the pairs that are seen."""
        return 4 * self.batch * self.num_qo_heads * self.head_dim * self.num_pairs

    @property
    def bytes_moved(self) -> int:
        """Codes and scales of Q, K and V read once, the output written once."""
        qk_bits = NVFP4.bits_per_element
        v_bits = 8.0 if self.v_format is None else self.v_format.bits_per_element
        queries = self.batch * self.num_qo_heads * self.query_len * self.head_dim
        keys = self.batch * self.num_kv_heads * self.head_dim
        bits = queries * qk_bits + keys * (self.kv_len * qk_bits + self.padded_keys * v_bits)
        bits += 8 * queries * OUT_DTYPE_BYTES[self.out_dtype]
        if self.q_mean != "none":
            bits += 32 * self.batch * self.num_qo_heads * self.num_q_means * self.kv_len
        return int(bits) // 8

    @property
    def compute_dtype(self) -> str:
        """Of the faster of the two products."""
        if self.products == "native":
            return "float4_e2m1fn_x2"
        return "float8_e4m3fn" if self.mode == "fp8_p" else "bfloat16"
