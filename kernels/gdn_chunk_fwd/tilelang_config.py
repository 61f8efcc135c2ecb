"""A config of the TileLang template, typed: Triton's preparation, and the scan in TileLang."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .triton_config import SCAN, GdnChunkTritonConfig

__all__ = [
    "CONSUMER_ROWS",
    "DECAY_PADDING",
    "DECAY_STEP",
    "OUTPUT_THREADS",
    "PRODUCERS",
    "PRODUCER_THREADS",
    "GdnChunkTileLangConfig",
    "group_registers",
]

CONSUMER_ROWS = 16
"""Columns of the state that a warp owns, the rows of its matrix tiles (``mma`` and ``wgmma``)."""
PRODUCERS = ("shared", "own_warp", "own_group")
"""Who issues copies: a thread of the computing warps, a warp of its own, or a warp group that hands
its registers to the computing ones."""
PRODUCER_THREADS = {"shared": 0, "own_warp": 32, "own_group": 128}
"""Threads beside the computing ones."""
OUTPUT_THREADS = {"joint": 0, "split": 128}
"""Threads that have the output for their role, by ``scan_roles``: ``joint`` has the threads of the
state write it."""
DECAY_STEP = 4
"""Tokens whose decay is 16 bytes. On the innermost axis a box of TMA may begin at multiples of 16
bytes only: an H200 calls the copy an illegal instruction elsewhere, and a sequence begins where it
begins. So boxes of decay begin up to three tokens early and are as much longer."""
DECAY_PADDING = 32
"""What a slot of decay has beside a chunk: room for those, and slots begin at multiples of 128
bytes."""
_PRODUCER_REGISTERS = 24


def group_registers(block_v: int, roles: str) -> tuple[int, int, int]:
    """Registers of a thread of the state, of the output and of the producer's group.

    Where the producer is a group, these move to the groups that compute: one or two carry the state
    of 64 or 128 columns, and where roles are split one more writes the output.
    """
    if roles == "joint":
        return (240, 0, _PRODUCER_REGISTERS)
    return (240, 240, _PRODUCER_REGISTERS) if block_v == 64 else (192, 96, _PRODUCER_REGISTERS)


@dataclass(frozen=True)
class GdnChunkTileLangConfig(GdnChunkTritonConfig):
    """One config of one problem; what prepares the chunks is as in the Triton template.

    The scan writes the output. Scores that do not go through memory are made by the threads whose
    role is the output.
    """

    is_scan_counted: bool = False
    """Whether ``parts`` ends with the scan: for those who need no kernel of it."""

    @property
    def algorithm(self) -> str:
        """The scan is fused."""
        return "fused"

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
