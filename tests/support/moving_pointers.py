"""Accesses of shared memory, in the main loop of a kernel's SASS, through the wrong pointer.

Where a ring has a number of slots that is no power of two, nvcc keeps a pointer that moves by a
tile each iteration, and takes off the ring's size once a round. What goes through the pointer and
takes nothing off, or the reverse, is another place with every iteration.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

__all__ = ["disassembled", "misplaced_accesses"]

_LABEL = re.compile(r"^(\.L_x_\d+):")
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,5}\*/\s+(.*?) ;")
_BRANCH = re.compile(r"BRA `\((\.L_x_\d+)\)")
_STEP = re.compile(r"(?:VIADD|U?IADD3) (U?R\d+), (U?R\d+)(?:\.reuse)?, 0x([0-9a-f]+)\b")
_ACCESS = re.compile(r"\b(?:LDSM?|STSM?)\b\S*\s.*?\[(R\d+)(?:\.\w+)?(?:\+(UR\d+))?")
_REGISTER = re.compile(r"\bU?R\d+")
_PREDICATE = re.compile(r"^!?U?P(?:\d|T)$")
_WITHOUT_RESULT = ("ST", "LDGSTS", "BRA", "BAR", "SYNCS.ARRIVE")
_TWO_REGISTERS = re.compile(r"IMAD\.WIDE|CS2R|LDC\.64")


def disassembled(cubin: bytes) -> str:
    """SASS with labels, by nvdisasm."""
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        command = [knobs.nvidia.nvdisasm.path, "-c", path]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def misplaced_accesses(sass: str, tile_bytes: int, num_slots: int) -> tuple[list[str], int]:
    """The misplaced ones of the main loop, and how many go through a moving pointer."""
    body = _main_loop(sass)
    steps = {
        found[1]
        for found in map(_STEP.match, body)
        if found and found[1] == found[2] and int(found[3], 16) == tile_bytes
    }
    ring_bytes = tile_bytes * num_slots
    round_trip = re.compile(rf"-0x{ring_bytes:x}\b|0x{2**32 - ring_bytes:x}\b")
    misplaced, num_moving = [], 0
    for at, text in enumerate(body):
        found = _ACCESS.search(text)
        if found is None:
            continue
        registers, sources = _slice(body, at, [name for name in found.groups() if name])
        moves = bool(registers & steps)
        num_moving += moves
        if moves != any(round_trip.search(source) for source in sources):
            misplaced.append(text)
    return misplaced, num_moving


def _main_loop(sass: str) -> list[str]:
    """The instructions of the loop with most matrix products."""
    labels: dict[str, int] = {}
    instructions: list[str] = []
    for line in sass.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif instruction := _INSTRUCTION.search(line):
            instructions.append(instruction[1].strip())
    loops = []
    for at, text in enumerate(instructions):
        branch = _BRANCH.search(text)
        if branch and labels.get(branch[1], at + 1) <= at:
            loops.append(instructions[labels[branch[1]] : at + 1])
    return max(loops, key=lambda body: sum("MMA" in text for text in body))


def _slice(body: list[str], at: int, wanted: list[str]) -> tuple[set[str], list[str]]:
    """Registers that come from before the loop's turn, and instructions, of what is wanted."""
    outer, sources = set(), []
    work, seen = [(name, at) for name in wanted], set()
    while work:
        name, before = work.pop()
        for i in range(before - 1, -1, -1):
            results, operands = _result_and_operands(body[i])
            if name not in results:
                continue
            if i not in seen:
                seen.add(i)
                sources.append(body[i])
                work += [(operand, i) for operand in operands]
            if not body[i].startswith("@"):
                break
        else:
            outer.add(name)
    return outer, sources


def _result_and_operands(text: str) -> tuple[list[str], list[str]]:
    name, _, rest = re.sub(r"^@!?U?P\w+\s+", "", text).partition(" ")
    if name.startswith(_WITHOUT_RESULT):
        return [], []
    operands = [part.strip() for part in rest.split(",")]
    operands = [part for part in operands if not _PREDICATE.match(part)]
    result = _REGISTER.match(operands[0]) if operands else None
    if result is None:
        return [], []
    results = [result[0]]
    if _TWO_REGISTERS.search(name):
        bank, number = re.match(r"(U?R)(\d+)", result[0]).groups()
        results.append(f"{bank}{int(number) + 1}")
    return results, _REGISTER.findall(" , ".join(operands[1:]))
