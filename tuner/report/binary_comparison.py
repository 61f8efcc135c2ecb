"""What the compiler made of the winners of two SKUs, side by side: no GPU was needed for it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ..records import BinaryFacts
from .baselines import mixture
from .comparison import compared_pairs
from .rows import Origin, origin
from .searches import Search

__all__ = ["BinaryComparisonRow", "binary_comparison_rows"]


@dataclass(frozen=True, kw_only=True)
class BinaryComparisonRow(Origin):
    """The binaries of one problem's winners on two SKUs; of several kernels as each field says."""

    op: str
    problem: str
    base_sku: str
    compared: str
    """Provenance of the two searches whose winners these are."""
    base_num_kernels: int
    num_kernels: int
    base_registers: int
    """Of the kernel that needs most, as for shared and tensor memory."""
    registers: int
    base_spill_bytes: int
    """Of all kernels together, as for instructions."""
    spill_bytes: int
    base_smem_bytes: int
    smem_bytes: int
    base_tmem_columns: int
    tmem_columns: int
    base_mma_kind: str
    mma_kind: str
    base_num_instructions: int
    num_instructions: int
    base_config: str
    config: str


def binary_comparison_rows(
    searches: Iterable[Search], skus: Sequence[str]
) -> Iterator[BinaryComparisonRow]:
    """Every compared pair of which both binaries are known."""
    for base, other in compared_pairs(searches, skus):
        assert base.best is not None
        assert other.best is not None
        before, after = base.best.evaluation, other.best.evaluation
        if not before.facts or not after.facts:
            continue
        yield BinaryComparisonRow(
            **origin(other),
            op=other.key.problem.op,
            problem=str(other.key.problem),
            base_sku=base.sku,
            compared=mixture(base.key.provenance, other.key.provenance),
            base_num_kernels=len(before.facts),
            num_kernels=len(after.facts),
            base_registers=max(facts.registers for facts in before.facts),
            registers=max(facts.registers for facts in after.facts),
            base_spill_bytes=sum(facts.spill_bytes for facts in before.facts),
            spill_bytes=sum(facts.spill_bytes for facts in after.facts),
            base_smem_bytes=max(facts.smem_bytes for facts in before.facts),
            smem_bytes=max(facts.smem_bytes for facts in after.facts),
            base_tmem_columns=max(facts.tmem_columns for facts in before.facts),
            tmem_columns=max(facts.tmem_columns for facts in after.facts),
            base_mma_kind=_mma_kinds(before.facts),
            mma_kind=_mma_kinds(after.facts),
            base_num_instructions=sum(facts.num_instructions for facts in before.facts),
            num_instructions=sum(facts.num_instructions for facts in after.facts),
            base_config=str(before.config),
            config=str(after.config),
        )


def _mma_kinds(kernels: Sequence[BinaryFacts]) -> str:
    kinds = dict.fromkeys(facts.mma_kind for facts in kernels)
    return ", ".join(kind for kind in kinds if kind not in ("", "none")) or "none"
