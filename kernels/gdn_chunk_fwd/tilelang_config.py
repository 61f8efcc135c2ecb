"""A config of the TileLang template, typed: Triton's preparation, and the scan in TileLang."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .triton_config import SCAN, GdnChunkTritonConfig

__all__ = ["CONSUMER_ROWS", "GdnChunkTileLangConfig"]

CONSUMER_ROWS = 16
"""Columns of the state that a warp owns."""


@dataclass(frozen=True)
class GdnChunkTileLangConfig(GdnChunkTritonConfig):
    """One config of one problem; what prepares the chunks is as in the Triton template.

    The scan writes the output and reads what the preparation left of q k^T.
    """

    is_scan_counted: bool = False
    """Whether ``parts`` ends with the scan: for those who need no kernel of it."""

    @property
    def algorithm(self) -> str:
        """The scan is fused."""
        return "fused"

    @property
    def has_scores(self) -> bool:
        """Scores go through memory."""
        return True

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts that Triton's kernels are, in launch order."""
        parts = super().parts
        return parts if self.is_scan_counted else parts[: parts.index(SCAN)]

    @property
    def with_scan(self) -> GdnChunkTileLangConfig:
        """The same with the scan among the parts."""
        return replace(self, is_scan_counted=True)

    @property
    def block_v(self) -> int:
        """Columns of the state that a block of the scan owns."""
        return self.number("scan_block_v")

    @property
    def v_blocks(self) -> int:
        """Blocks of the scan for each head and segment."""
        return self.problem.head_dim_v // self.block_v
