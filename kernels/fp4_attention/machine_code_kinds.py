"""The matrix instructions that a binary holds, and specifications whose binaries must hold a kind.

``mma_kinds`` reads Triton's PTX. TileLang gives none, and what runs is the machine code: here it is
disassembled. That takes some 0.4 s, so what was found is kept on disk under the hash of the binary.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import platformdirs

from ...errors import DeviceError, UnsupportedError
from ..base import CompiledBinary, KernelSpec
from ..cuda_tools import cuda_tool_path
from .mma_kinds import CheckedTritonKernelSpec

__all__ = [
    "CodeCheckedSpec",
    "code_checked",
    "kinds_in_binary",
    "kinds_in_sass",
    "nvdisasm_path",
]

_READER_VERSION = 1
"""Part of the name under which a finding is kept: raise it when code is read differently."""
_TIMEOUT_S = 60.0
_INSTRUCTION = re.compile(
    r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(?P<opcode>\w+MMA)(?P<modifiers>[.\w]*)",
    re.MULTILINE,
)
# The same products have one opcode for a warp (Ampere on, sm_120), one for a warp group (Hopper)
# and one for tensor memory (sm_100, sm_103).
_KINDS = {
    **dict.fromkeys(("OMMA", "UTCOMMA"), "mxfp4"),
    **dict.fromkeys(("QMMA", "QGMMA", "UTCQMMA"), "fp8"),
    **dict.fromkeys(("HMMA", "HGMMA", "UTCHMMA"), "16-bit"),
}
_NVFP4_SCALES = frozenset({"UE4M3", "4X", "BLOCK16"})


@dataclass(frozen=True)
class CodeCheckedSpec:
    """A kernel whose machine code must multiply in the declared kinds, and in all of them."""

    spec: KernelSpec
    mma_kinds: frozenset[str]

    @property
    def name(self) -> str:
        """Name of the device function."""
        return self.spec.name

    def compile(self, arch: int) -> CompiledBinary:
        """Compiles for ``arch`` and reads the code.

        Raises:
            UnsupportedError: the code multiplies in other kinds.
            DeviceError: there is no nvdisasm, or it cannot read the code.
        """
        binary = self.spec.compile(arch)
        found = kinds_in_binary(binary.cubin)
        if found != self.mma_kinds:
            raise UnsupportedError(
                f"the machine code of {self.name} for sm_{arch} multiplies in {_listed(found)}, "
                f"its mode declares {_listed(self.mma_kinds)}: the compiler took another "
                "instruction for this tile; choose another config"
            )
        return binary


def code_checked(spec: KernelSpec) -> KernelSpec:
    """The specification with its machine code checked too, where it declares kinds."""
    if isinstance(spec, CheckedTritonKernelSpec):
        return CodeCheckedSpec(spec, spec.mma_kinds)
    return spec


def kinds_in_binary(cubin: bytes) -> frozenset[str]:
    """Kinds of all matrix instructions in the machine code, by the names of ``declared_kinds``."""
    path = _kept_at(cubin)
    with suppress(OSError):
        return frozenset(path.read_text().split())
    kinds = kinds_in_sass(_disassembled(cubin))
    with suppress(OSError):  # a folder that cannot be written only costs time
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(" ".join(sorted(kinds)))
        part.replace(path)
    return kinds


def kinds_in_sass(sass: str) -> frozenset[str]:
    """Kinds of all matrix instructions; one that is not known goes by its opcode."""
    return frozenset(_kinds(sass))


def _kinds(sass: str) -> Iterator[str]:
    for opcode, modifiers in set(_INSTRUCTION.findall(sass)):
        kind = _KINDS.get(opcode, opcode)
        words = set(modifiers.split("."))
        if kind == "mxfp4" and words & _NVFP4_SCALES:
            yield "nvfp4"
        elif kind == "16-bit" and "TF32" in words:
            yield "tf32"
        else:
            yield kind


def _disassembled(cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        # Branch targets, which take the longest to find, are not wanted.
        command = [str(nvdisasm_path()), "-c", "-ndf", file.name]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S
            )
        except subprocess.TimeoutExpired:
            raise DeviceError(f"{command[0]} took longer than {_TIMEOUT_S:g} s") from None
    if done.returncode != 0:
        reason = next((line for line in done.stderr.splitlines() if line.strip()), "no message")
        raise DeviceError(f"{command[0]} failed on a compiled kernel: {reason.strip()}")
    return done.stdout


@cache
def nvdisasm_path() -> Path:
    """The program.

    Raises:
        DeviceError: it is neither in the Triton wheel nor on the search path.
    """
    return cuda_tool_path("nvdisasm", "nobody can tell whether a kernel multiplies in FP4")


def _kept_at(cubin: bytes) -> Path:
    name = f"{hashlib.sha256(cubin).hexdigest()}-{_READER_VERSION}.txt"
    return platformdirs.user_cache_path("tilescout") / "mma_kinds" / name


def _listed(kinds: frozenset[str]) -> str:
    return ", ".join(sorted(kinds)) or "no matrix instruction"
