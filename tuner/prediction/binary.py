"""Reads what a compiled kernel costs from its machine code, with NVIDIA's ``cuobjdump``.

Registers, stack and the instruction mix of a cubin, for any architecture, with no GPU. What was
read is kept on disk under the hash of the cubin, because a dump takes about 0.4 s and many configs
share a kernel.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import platformdirs

from ...errors import DeviceError
from ...kernels.base import CompiledBinary
from ...kernels.cuda_tools import cuda_tool_path
from ..records import BinaryFacts

__all__ = ["cuobjdump_path", "read_facts"]

_READER_VERSION = 2
"""Part of the cache key: raise it when the same cubin would be read differently."""

_DUMP_TIMEOUT_S = 60.0

_RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")
_INSTRUCTION = re.compile(
    r"^\s*/\*(?P<address>[0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?(?P<opcode>[A-Z][\w.]*)"
    r"(?P<operands>[^;]*);",
    re.MULTILINE,
)
_TARGET = re.compile(r"0x([0-9a-f]+)\s*$")

# First match wins; the opcode is the part of the mnemonic before the first dot.
_CLASSES: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (name, re.compile(pattern))
    for name, pattern in (
        ("mma", r"\w*MMA$"),
        ("async_copy", r"LDGSTS$|UTMA|UBLK"),
        ("tensor_memory", r"LDTM$|STTM$|UTCCP$|UTCATOMSWS$"),
        ("load_global", r"LDG$|LD$"),
        ("load_shared", r"LDS$|LDSM$"),
        ("load_local", r"LDL$"),
        ("load_constant", r"LDC$|ULDC$|LDCU$"),
        ("store_global", r"STG$|ST$"),
        ("store_shared", r"STS$|STSM$|STAS$"),
        ("store_local", r"STL$"),
        ("shuffle", r"SHFL$|REDUX$|CREDUX$|VOTEU?$|MATCH$|ELECT$"),
        ("atomic", r"ATOM|RED|SUATOM"),
        (
            "barrier",
            r"BAR$|SYNCS|DEPBAR$|LDGDEPBAR$|MEMBAR$|FENCE$|UTCBAR$|WARPGROUP$|WARPSYNC$|"
            r"ERRBAR$|CCTL|ARRIVES$|ACQBULK$|UCGABAR",
        ),
        ("branch", r"BRA$|BRX$|JM[PX]$|EXIT$|CALL$|RET$|BSSY$|BSYNC$|BREAK$|BMOV|YIELD$"),
        ("special", r"MUFU$"),
        ("convert", r"[FI]2|FRND$"),
        ("float", r"U?F(ADD|MUL|FMA|MNMX|SEL|SET|SETP|CHK|SWZADD)|[HD](ADD|MUL|FMA|MNMX|SET)"),
    )
)
_OTHER_CLASS = "integer"

_LOAD_CLASSES = {"load_global", "async_copy"}
_WIDTHS = {"256": 32, "128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}


@dataclass(frozen=True)
class _Instruction:
    address: int
    mnemonic: str
    kind: str
    branch_target: int | None


@cache
def cuobjdump_path() -> Path:
    """The program.

    Raises:
        DeviceError: it is neither in the Triton wheel nor on the search path.
    """
    return cuda_tool_path("cuobjdump", "nothing can be predicted")


def read_facts(binary: CompiledBinary) -> BinaryFacts:
    """What the binary says of itself; all zero but shared memory for one without device code.

    Raises:
        DeviceError: cuobjdump is missing or cannot read the binary.
    """
    if not binary.cubin:
        return _facts(binary, registers=0, spill_bytes=0, instructions=[])
    path = _cache_path(binary)
    with suppress(OSError, ValueError, TypeError):
        return BinaryFacts(**json.loads(path.read_text()))
    dump = _dump(binary.cubin)
    facts = parse_dump(binary, dump)
    _keep(path, facts)
    return facts


def parse_dump(binary: CompiledBinary, dump: str) -> BinaryFacts:
    """The facts in the text that ``cuobjdump --dump-resource-usage --dump-sass`` printed.

    Where the binary has device functions beside the kernel, instructions are summed and registers
    and stack are those of the greediest.
    """
    usage = [tuple(map(int, match)) for match in _RESOURCES.findall(dump)]
    instructions = list(_instructions(dump))
    if not usage or not instructions:
        raise DeviceError(
            f"cuobjdump found no code of kernel {binary.kernel!r} in its binary; the installed "
            "cuobjdump may be older than the compiler: upgrade it or set TRITON_CUOBJDUMP_PATH"
        )
    return _facts(
        binary,
        registers=max(registers for registers, _, _ in usage),
        spill_bytes=max(stack + local for _, stack, local in usage),
        instructions=instructions,
    )


def _facts(
    binary: CompiledBinary, *, registers: int, spill_bytes: int, instructions: list[_Instruction]
) -> BinaryFacts:
    mma = Counter(i.mnemonic for i in instructions if i.kind == "mma")
    loop = _streaming_loop(instructions)
    return BinaryFacts(
        kernel=binary.kernel,
        threads_per_block=binary.threads_per_block,
        registers=registers,
        spill_bytes=spill_bytes,
        smem_bytes=binary.smem_bytes,
        tmem_columns=binary.tmem_columns,
        num_instructions=len(instructions),
        mma_kind=min(mma, key=lambda name: (-mma[name], name)) if mma else "none",
        instruction_mix=dict(sorted(Counter(i.kind for i in instructions).items())),
        loop_instructions=len(loop),
        loop_load_bytes=sum(_load_bytes(i) for i in loop),
    )


def _instructions(dump: str) -> Iterator[_Instruction]:
    """Every instruction in order; the padding behind the code is left out."""
    for match in _INSTRUCTION.finditer(dump):
        mnemonic = match["opcode"]
        opcode = mnemonic.partition(".")[0]
        if opcode == "NOP":
            continue
        target = _TARGET.search(match["operands"]) if opcode == "BRA" else None
        yield _Instruction(
            address=int(match["address"], 16),
            mnemonic=mnemonic,
            kind=_classify(opcode),
            branch_target=int(target[1], 16) if target else None,
        )


@cache
def _classify(opcode: str) -> str:
    return next((name for name, pattern in _CLASSES if pattern.match(opcode)), _OTHER_CLASS)


def _streaming_loop(instructions: list[_Instruction]) -> list[_Instruction]:
    """The body of the innermost loop that asks for most bytes of global memory; empty if none.

    One with matrix instructions comes before all without: a kernel that merges partial results in
    its last block has a second loop, which may ask for more in a pass. A loop is what a backward
    branch jumps over. The branch to itself behind the code is none.
    """
    bodies = [
        [i for i in instructions if branch.branch_target <= i.address <= branch.address]
        for branch in instructions
        if branch.branch_target is not None and branch.branch_target < branch.address
    ]
    streaming = [body for body in bodies if sum(map(_load_bytes, body)) > 0]
    innermost = [
        body for body in streaming if not any(_is_inside(other, body) for other in streaming)
    ]
    return max(innermost, key=_streaming_rank, default=[])


def _streaming_rank(body: list[_Instruction]) -> tuple[bool, int]:
    return any(i.kind == "mma" for i in body), sum(map(_load_bytes, body))


def _is_inside(inner: list[_Instruction], outer: list[_Instruction]) -> bool:
    starts, ends = outer[0].address <= inner[0].address, inner[-1].address <= outer[-1].address
    return starts and ends and len(inner) < len(outer)


def _load_bytes(instruction: _Instruction) -> int:
    """Bytes one thread asks of global memory; 0 where the width is not in the mnemonic (TMA)."""
    parts = instruction.mnemonic.split(".")
    if instruction.kind not in _LOAD_CLASSES or parts[0].startswith("U"):
        return 0
    return next((_WIDTHS[part] for part in parts if part in _WIDTHS), 4)


def _dump(cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(cuobjdump_path()), "--dump-resource-usage", "--dump-sass", file.name]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=_DUMP_TIMEOUT_S
            )
        except subprocess.TimeoutExpired:
            raise DeviceError(f"{command[0]} took longer than {_DUMP_TIMEOUT_S:g} s") from None
    if done.returncode != 0:
        reason = next((line for line in done.stderr.splitlines() if line.strip()), "no message")
        raise DeviceError(f"{command[0]} failed on a compiled kernel: {reason.strip()}")
    return done.stdout


def _cache_path(binary: CompiledBinary) -> Path:
    parts = (
        _READER_VERSION,
        binary.kernel,
        binary.threads_per_block,
        binary.smem_bytes,
        binary.tmem_columns,
        hashlib.sha256(binary.cubin).hexdigest(),
    )
    digest = hashlib.sha256(repr(parts).encode()).hexdigest()
    return platformdirs.user_cache_path("tilescout") / "binary_facts" / f"{digest}.json"


def _keep(path: Path, facts: BinaryFacts) -> None:
    """Writes the entry in one step; a folder that cannot be written only costs time."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(asdict(facts)))
        part.replace(path)
