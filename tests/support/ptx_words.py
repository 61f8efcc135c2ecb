"""Runs straight-line inline PTX on 32-bit words with numpy: the few instructions that codecs use.

What an instruction does is taken from the PTX ISA. Anything else raises, so that no line of an
assembly text is passed over.
"""

from __future__ import annotations

import re

import numpy as np

E2M1_HALVES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float16)


def run_ptx(text: str, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Registers after the text has run; ``$0``, ``$1`` ... are registers too."""
    registers = {name: value.astype(np.uint32) for name, value in inputs.items()}
    for line in re.split(r"[;\n]", text.replace("{ .reg", ".reg").strip()):
        statement = line.strip()
        if statement in ("", "{", "}") or statement.startswith(".reg"):
            continue
        opcode, _, operands = statement.partition(" ")
        _execute(opcode, _operands(operands), registers)
    return registers


def _operands(text: str) -> list[str]:
    """Operands, a braced vector as one."""
    return [part.strip() for part in re.findall(r"\{[^}]*\}|[^,\s][^,]*", text)]


def _execute(opcode: str, operands: list[str], registers: dict[str, np.ndarray]) -> None:
    target, *sources = operands
    if opcode == "mov.b32" and target.startswith("{"):
        names = [name.strip() for name in target.strip("{}").split(",")]
        bits = 32 // len(names)
        for index, name in enumerate(names):
            part = registers[sources[0]] >> np.uint32(bits * index)
            registers[name] = part & np.uint32(2**bits - 1)
        return
    values = [
        registers[source] if source in registers else np.uint32(int(source, 0))
        for source in sources
    ]
    registers[target] = _result(opcode, values)


def _result(opcode: str, values: list[np.ndarray]) -> np.ndarray:
    with np.errstate(over="ignore"):
        if opcode == "mov.b32":
            return values[0]
        if opcode == "and.b32":
            return values[0] & values[1]
        if opcode == "shl.b32":
            return values[0] << values[1]
        if opcode == "shr.u32":
            return values[0] >> values[1]
        if opcode == "mad.lo.u32":
            return values[0] * values[1] + values[2]
        if opcode == "lop3.b32":
            return _lop3(*values)
        if opcode == "prmt.b32":
            return _prmt(*values)
        if opcode == "cvt.rn.f16x2.e2m1x2":
            return _halves(values[0] & np.uint32(15)) | (_halves(values[0] >> 4) << np.uint32(16))
    raise AssertionError(f"no such instruction here: {opcode}")


def _lop3(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Every bit of the result by the table of 8 bits, index (a, b, c)."""
    result = np.uint32(0)
    for index in range(8):
        if int(table) >> index & 1:
            x = a if index & 4 else ~a
            y = b if index & 2 else ~b
            z = c if index & 1 else ~c
            result = result | (x & y & z)
    return result


def _prmt(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """Four of the eight bytes of (b, a); selectors here never replicate signs."""
    result = np.uint32(0)
    for place in range(4):
        index = int(selector) >> (4 * place) & 15
        assert index < 8
        source = a if index < 4 else b
        byte = (source >> np.uint32(8 * (index % 4))) & np.uint32(255)
        result = result | (byte << np.uint32(8 * place))
    return result


def _halves(codes: np.ndarray) -> np.ndarray:
    """Bits of the fp16 of e2m1 codes."""
    bits = E2M1_HALVES[codes & 7].view(np.uint16).astype(np.uint32)
    return bits | ((codes & np.uint32(8)) << np.uint32(12))
