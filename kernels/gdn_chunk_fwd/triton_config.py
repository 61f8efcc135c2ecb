"""A config of the Triton template, typed: the algorithm, and the tiles of each of its parts."""

from __future__ import annotations

from dataclasses import dataclass

from ..base import Config
from .problem import GdnChunkProblem

__all__ = [
    "GATE",
    "INTRA",
    "NORM",
    "OUTPUT",
    "SCAN",
    "STITCH",
    "TRANSITION",
    "GdnChunkTritonConfig",
    "next_power_of_two",
]

GATE, NORM, INTRA = "gate", "norm", "intra"
TRANSITION, STITCH, SCAN, OUTPUT = "transition", "stitch", "scan", "output"


def next_power_of_two(value: int) -> int:
    """The least power of two that is not below ``value``."""
    return 1 << max(0, value - 1).bit_length()


@dataclass(frozen=True)
class GdnChunkTritonConfig:
    """One config of one problem.

    ``algorithm`` "separate": states at the starts of chunks go through memory and another kernel
    reads the output off them; "fused": the scan writes the output. ``segment`` chunks of a sequence
    are scanned in parallel and joined by their exact transitions; 0: sequences are not cut.
    """

    problem: GdnChunkProblem
    config: Config

    @property
    def algorithm(self) -> str:
        """``separate`` or ``fused``."""
        return self.word("algorithm")

    @property
    def chunk(self) -> int:
        """Tokens of a chunk."""
        return self.number("chunk")

    @property
    def form(self) -> str:
        """``wy``: w and u go through memory; ``inverse``: the inverse of the chunk does."""
        return self.word("form")

    @property
    def has_scores(self) -> bool:
        """Whether q k^T goes through memory."""
        return self.word("scores") == "stored"

    @property
    def has_intra_blocks(self) -> bool:
        """Whether the inverse is made in blocks of 16 rows, not of the chunk as one tile."""
        return self.config.get("intra_tile") == "blocks"

    @property
    def segment(self) -> int:
        """Chunks of a segment; 0: sequences are not cut."""
        return self.number("segment")

    @property
    def precision(self) -> str:
        """Of products of fp32 operands; 16-bit operands know only one."""
        return str(self.config.get("precision", "tf32"))

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts in launch order."""
        return (
            GATE,
            *([NORM] if self.problem.use_qk_l2norm else []),
            INTRA,
            *([TRANSITION, STITCH] if self.segment else []),
            SCAN,
            *([OUTPUT] if self.algorithm == "separate" else []),
        )

    @property
    def block_k(self) -> int:
        """head_dim_k, padded."""
        return next_power_of_two(self.problem.head_dim_k)

    def number(self, name: str) -> int:
        """The value of an integer parameter."""
        return int(self.config[name])

    def word(self, name: str) -> str:
        """The value of a parameter whose values are words."""
        return str(self.config[name])

    def max_chunks(self, num_tokens: int, num_sequences: int) -> int:
        """Upper bound of the chunks of any sequences of so many tokens."""
        return num_tokens // self.chunk + num_sequences

    def max_segments(self, num_tokens: int, num_sequences: int) -> int:
        """Upper bound of the segments: each is one program of the scan for a head."""
        if not self.segment:
            return num_sequences
        return num_tokens // (self.chunk * self.segment) + num_sequences
