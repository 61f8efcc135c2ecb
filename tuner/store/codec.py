"""Between the tuner's records and the values of columns; decoding checks everything it reads.

A stored value that does not fit raises ``UsageError`` with the column and the value; ``reading``
turns it into a note, so that one bad row does not hide its neighbours.
"""

from __future__ import annotations

import hashlib
import math
import sys
import zlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from datetime import UTC, datetime
from typing import Any

from ...errors import UsageError
from ...kernels.base import Config, ParameterValue, Problem, canonical_json
from ...kernels.device import DeviceSpec
from ...kernels.registry import operation
from ..records import BinaryFacts, MeasurementPolicy, Timing
from .fields import Fields, decode_json, is_integer, is_number

__all__ = [
    "POLICIES",
    "content_digest",
    "decode_binary",
    "decode_config",
    "decode_device",
    "decode_mix",
    "decode_problem",
    "decode_samples",
    "decode_timing",
    "device_dict",
    "encode_binary",
    "encode_samples",
    "encode_timing",
    "from_milliseconds",
    "to_milliseconds",
]

POLICIES = {
    str(policy): policy
    for policy in (
        MeasurementPolicy(is_cuda_graph=graph, is_cold_l2=cold)
        for graph in (True, False)
        for cold in (True, False)
    )
}
_DEVICE_COLUMNS = ("sku", "compute_capability", "num_sms", "memory_bytes")


def content_digest(*parts: object) -> bytes:
    """Sixteen bytes that name a content: an index over them is smaller than one over the text."""
    return hashlib.sha256(canonical_json(parts).encode()).digest()[:16]


def to_milliseconds(moment: datetime) -> int:
    """Milliseconds since 1970, UTC."""
    return round(moment.timestamp() * 1000)


def from_milliseconds(where: str, value: object) -> datetime:
    """The moment of ``to_milliseconds``."""
    if not is_integer(value) or not 0 <= value < 253_402_300_800_000:
        raise UsageError(f"{where}={value!r} must be milliseconds since 1970")
    seconds, milliseconds = divmod(value, 1000)
    return datetime.fromtimestamp(seconds, UTC).replace(microsecond=1000 * milliseconds)


def decode_problem(where: str, op: str, values: object) -> Problem:
    """The problem with these field values; a field that did not exist then has its default."""
    read = Fields(where, values)
    try:
        problem_type = operation(op).problem_type
        return problem_type.from_dict({name: read.raw(name) for name in read.names()})
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None


def decode_config(where: str, template: str, values: object) -> Config:
    """The config of ``template`` with these values."""
    read = Fields(where, values)
    parsed: dict[str, ParameterValue] = {}
    for name in read.names():
        value = read.raw(name)
        if not (isinstance(value, bool | str) or is_integer(value)):
            raise read.refuse(name, "an integer, true, false or text")
        parsed[name] = value
    return Config.of(template, parsed)


def device_dict(device: DeviceSpec) -> dict[str, Any]:
    """JSON form of a device, every field under its own name."""
    values = asdict(device)
    values["compute_capability"] = device.compute_capability_text
    values["aliases"] = list(device.aliases)
    return values


def device_columns(device: DeviceSpec) -> dict[str, Any]:
    """Columns of ``devices``: what look-ups filter by, and the rest as JSON."""
    values = device_dict(device)
    columns = {name: values.pop(name) for name in _DEVICE_COLUMNS}
    return {**columns, "spec_json": canonical_json(values)}


def decode_device(read: Fields) -> DeviceSpec:
    """The device that ``device_dict`` wrote; what it left out has the field's default."""
    capability = read.text("compute_capability").split(".")
    if len(capability) != 2 or not all(part.isdecimal() for part in capability):
        raise read.refuse("compute_capability", "text such as '9.0'")
    peaks = read.nested("peak_tflops")
    sources = read.nested("sources") if read.has("sources") else None
    aliases = read.items("aliases") if read.has("aliases") else []
    device = DeviceSpec(
        sku=read.text("sku"),
        name=read.text("name"),
        architecture=read.text("architecture"),
        compute_capability=(int(capability[0]), int(capability[1])),
        num_sms=read.integer("num_sms", at_least=1),
        memory_bytes=read.integer("memory_bytes", at_least=1),
        l2_bytes=read.integer("l2_bytes", at_least=0),
        smem_per_block_bytes=read.integer("smem_per_block_bytes", at_least=0),
        smem_per_sm_bytes=read.integer("smem_per_sm_bytes", at_least=0),
        registers_per_sm=read.integer("registers_per_sm", at_least=0),
        max_threads_per_sm=read.integer("max_threads_per_sm", at_least=0),
        max_blocks_per_sm=read.integer("max_blocks_per_sm", at_least=0),
        bandwidth_gbps=read.number("bandwidth_gbps", at_least=0),
        peak_tflops={name: peaks.number(name, at_least=0) for name in peaks.names()},
        clock_mhz=read.number("clock_mhz", at_least=0),
        aliases=tuple(str(alias) for alias in aliases),
        sources={name: sources.text(name) for name in sources.names()} if sources else {},
    )
    read.finish()
    return device


def encode_binary(facts: BinaryFacts) -> dict[str, Any]:
    """Columns of ``binaries``."""
    values = {field.name: getattr(facts, field.name) for field in fields(facts)}
    mix = canonical_json(dict(values.pop("instruction_mix")))
    return {**values, "instruction_mix_json": mix}


def decode_mix(read: Fields) -> dict[str, int]:
    """Instruction counts by class."""
    return {name: read.integer(name, at_least=0) for name in read.names()}


def decode_binary(read: Fields, mix: Mapping[str, int]) -> BinaryFacts:
    """The facts of one kernel, the instruction mix apart."""
    return BinaryFacts(
        kernel=read.text("kernel"),
        threads_per_block=read.integer("threads_per_block", at_least=0),
        registers=read.integer("registers", at_least=0),
        spill_bytes=read.integer("spill_bytes", at_least=0),
        smem_bytes=read.integer("smem_bytes", at_least=0),
        tmem_columns=read.integer("tmem_columns", at_least=0),
        num_instructions=read.integer("num_instructions", at_least=0),
        mma_kind=read.text("mma_kind"),
        instruction_mix=mix,
        loop_instructions=read.integer("loop_instructions", at_least=0),
        loop_load_bytes=read.integer("loop_load_bytes", at_least=0),
    )


def encode_samples(samples_us: Sequence[float]) -> bytes | None:
    """Samples as compressed little-endian float32; None where there are none."""
    if not samples_us:
        return None
    packed = array("f", samples_us)
    if sys.byteorder == "big":
        packed.byteswap()
    return zlib.compress(packed.tobytes(), 9)


def decode_samples(where: str, data: object, num_samples: int) -> tuple[float, ...]:
    """The samples that ``encode_samples`` packed."""
    if data is None:
        return ()
    if not isinstance(data, bytes):
        raise UsageError(f"{where} must be binary, not {type(data).__name__}")
    unpacker = zlib.decompressobj()
    try:
        # Bounded, so that a forged blob cannot fill the memory.
        raw = unpacker.decompress(data, 4 * num_samples + 1)
    except zlib.error as error:
        raise UsageError(f"{where} cannot be unpacked: {error}") from None
    if len(raw) != 4 * num_samples:
        raise UsageError(f"{where} must hold num_samples={num_samples} values")
    packed = array("f", raw)
    if sys.byteorder == "big":
        packed.byteswap()
    if not all(map(math.isfinite, packed)):
        raise UsageError(f"{where} holds a value that is no finite number")
    return tuple(packed)


def encode_timing(timing: Timing | None, *, keep_samples: bool) -> dict[str, Any]:
    """The timing columns of a trial; spread columns stay empty where there is no spread."""
    names = ("median_us", "p10_us", "p90_us", "ci_low_us", "ci_high_us")
    columns: dict[str, Any] = dict.fromkeys((*names, "num_samples", "samples"))
    if timing is None:
        return columns
    values = {name: getattr(timing, name) for name in names}
    for name, value in values.items():
        if not is_number(value) or value < 0:
            raise UsageError(f"timing.{name}={value!r} must be a finite number of microseconds")
    if any(value != timing.median_us for value in values.values()):
        columns.update(values)
    columns["median_us"] = timing.median_us
    columns["num_samples"] = len(timing.samples_us) or timing.num_samples
    columns["samples"] = encode_samples(timing.samples_us) if keep_samples else None
    return columns


def decode_timing(row: Any) -> Timing | None:
    """The timing of a trial row, or None where it has none."""
    if row.median_us is None:
        return None
    spread = [row.p10_us, row.p90_us, row.ci_low_us, row.ci_high_us]
    values = [row.median_us, *(row.median_us if v is None else v for v in spread)]
    if not all(map(is_number, values)) or not is_integer(row.num_samples):
        raise UsageError(f"times {values} of {row.num_samples!r} samples must be numbers")
    median, p10, p90, low, high = map(float, values)
    samples = decode_samples("samples", row.samples, row.num_samples)
    return Timing(median, p10, p90, low, high, samples, row.num_samples)


def decode_device_row(where: str, row: Any) -> DeviceSpec:
    """The device of a row of ``devices``."""
    rest = Fields(where, decode_json(f"{where} spec_json", row.spec_json))
    columns = {name: getattr(row, name) for name in _DEVICE_COLUMNS}
    return decode_device(Fields(where, {**{n: rest.raw(n) for n in rest.names()}, **columns}))


def decode_binary_row(where: str, row: Any) -> BinaryFacts:
    """The facts of a row of ``binaries``."""
    place = f"{where} instruction_mix_json"
    mix = decode_mix(Fields(place, decode_json(place, row.instruction_mix_json)))
    return decode_binary(Fields(where, dict(row._mapping)), mix)
