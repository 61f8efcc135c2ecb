"""Which matrix instructions a mode must compile to, and the check that it did.

``tl.dot_scaled`` falls back to 16-bit products without a word where a tile does not suit the
hardware (64 rows on sm_100, say). A kernel that shows other kinds than its mode declares is not
the kernel that was asked for, however fast: compiling it fails, with both named.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ...errors import UnsupportedError
from ..triton_spec import TritonKernelSpec
from .problem import Fp4AttentionFwdProblem

__all__ = ["CheckedTritonKernelSpec", "declared_kinds", "kinds_in_ptx"]

_INSTRUCTION = re.compile(r"\b(?:wgmma\.mma_async|tcgen05\.mma|mma\.sync)[\w.:]*")
_NVFP4_SCALES = (".block16", "scale_vec::4X", "ue4m3")
_FP8_OPERANDS = re.compile(r"\.e[45]m[23]\.e[45]m[23]")


def declared_kinds(problem: Fp4AttentionFwdProblem) -> frozenset[str]:
    """Kinds of the products of Q with K and of P with V."""
    if problem.products == "emulated":
        return frozenset({"16-bit", "fp8"} if problem.mode == "fp8_p" else {"16-bit"})
    return frozenset({"nvfp4", {"nvfp4": "nvfp4", "direct": "mxfp4", "fp8_p": "fp8"}[problem.mode]})


def kinds_in_ptx(ptx: str) -> frozenset[str]:
    """Kinds of all matrix instructions in the code: ``nvfp4``, ``mxfp4``, ``fp8``, ``16-bit``."""
    return frozenset(_kinds(ptx))


def _kinds(ptx: str) -> Iterator[str]:
    for instruction in set(_INSTRUCTION.findall(ptx)):
        if "kind::mxf4" in instruction:
            is_nvfp4 = any(mark in instruction for mark in _NVFP4_SCALES)
            yield "nvfp4" if is_nvfp4 else "mxfp4"
        elif "f8f6f4" in instruction or _FP8_OPERANDS.search(instruction):
            yield "fp8"
        else:
            yield "16-bit"


@dataclass(frozen=True)
class CheckedTritonKernelSpec(TritonKernelSpec):
    """A kernel whose matrix instructions must be of declared kinds, on every architecture."""

    mma_kinds: frozenset[str] = frozenset()
    """All that the code must show, and nothing else."""

    def _compile(self, arch: int) -> Any:
        compiled = super()._compile(arch)
        found = kinds_in_ptx(compiled.asm["ptx"])
        if found != self.mma_kinds:
            raise UnsupportedError(
                f"{self.name} for sm_{arch} multiplies in {_listed(found)}, its mode declares "
                f"{_listed(self.mma_kinds)}: the compiler took another instruction for this tile; "
                "choose another config"
            )
        return compiled


def _listed(kinds: frozenset[str]) -> str:
    return ", ".join(sorted(kinds)) or "no matrix instruction"
