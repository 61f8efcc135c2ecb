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
from datetime import UTC, datetime, timedelta
from typing import Any

from ...errors import UsageError
from ...kernels.base import Config, ParameterValue, Problem, canonical_json
from ...kernels.device import DeviceSpec
from ...kernels.registry import operation
from ..records import BinaryFacts, MeasurementPolicy, Timing
from .fields import Fields, decode_json, is_integer, is_number

__all__ = [
    "LARGEST_DURATION_S",
    "LARGEST_TIME_US",
    "POLICIES",
    "TIMING_COLUMNS",
    "content_digest",
    "decode_binary",
    "decode_binary_ids",
    "decode_binary_row",
    "decode_config",
    "decode_config_row",
    "decode_device",
    "decode_device_row",
    "decode_mix",
    "decode_problem",
    "decode_samples",
    "decode_seconds",
    "decode_timing",
    "device_columns",
    "device_dict",
    "encode_binary",
    "encode_samples",
    "encode_seconds",
    "encode_timing",
    "from_milliseconds",
    "named_values",
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
LARGEST_TIME_US = 1e12
"""Eleven days: far above any kernel, far below what 64 bits of nanoseconds hold."""
LARGEST_DURATION_S = 1e9
_TIME_COLUMNS = {
    f"{name}_us": f"{name}_ns" for name in ("median", "p10", "p90", "ci_low", "ci_high")
}
TIMING_COLUMNS = (*_TIME_COLUMNS.values(), "num_samples", "samples")
"""Of a trial, in the order that ``decode_timing`` takes them."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_DEVICE_COLUMNS = ("sku", "compute_capability", "num_sms", "memory_bytes")


def content_digest(*parts: object) -> bytes:
    """Ten bytes that name a content: an index over them is smaller than one over the text.

    Among a million contents two share a digest with a chance below 1e-12.
    """
    return hashlib.sha256(canonical_json(parts).encode()).digest()[:10]


def named_values(values: Mapping[str, Any]) -> tuple[str, str]:
    """A JSON object as two lists, names and values: many objects share the first."""
    names = sorted(values)
    return canonical_json(names), canonical_json([values[name] for name in names])


def _joined(where: str, names: tuple[str, object], values: tuple[str, object]) -> dict[str, Any]:
    """The object that ``named_values`` took apart; each list comes with the name of its column."""
    keys, items = (decode_json(f"{where} {column}", text) for column, text in (names, values))
    if not isinstance(keys, list) or not isinstance(items, list) or len(keys) != len(items):
        raise UsageError(
            f"{where}: {values[0]}={values[1]!r} must be a list with a value for each of "
            f"{names[0]}={names[1]!r}"
        )
    return dict(zip(map(str, keys), items, strict=True))


def to_milliseconds(moment: datetime) -> int:
    """Milliseconds since 1970, UTC."""
    return round(moment.timestamp() * 1000)


def from_milliseconds(where: str, value: object) -> datetime:
    """The moment of ``to_milliseconds``."""
    if type(value) is not int or not 0 <= value < 253_402_300_800_000:
        raise UsageError(f"{where}={value!r} must be milliseconds since 1970")
    return _EPOCH + timedelta(milliseconds=value)


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


def decode_config_row(where: str, row: Any) -> Config:
    """The config of a row of ``configs`` beside its row of ``config_shapes``."""
    names = ("parameters_json", row.parameters_json)
    values = _joined(where, names, ("values_json", row.values_json))
    return decode_config(where, str(row.template), values)


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
        bandwidth_gbps=read.positive("bandwidth_gbps"),
        peak_tflops={name: peaks.positive(name) for name in peaks.names()},
        clock_mhz=read.number("clock_mhz", at_least=0),
        aliases=tuple(str(alias) for alias in aliases),
        sources={name: sources.text(name) for name in sources.names()} if sources else {},
    )
    read.finish()
    return device


def encode_binary(facts: BinaryFacts) -> tuple[dict[str, str], dict[str, Any]]:
    """Columns of ``kernels`` and of ``binaries``."""
    values = {field.name: getattr(facts, field.name) for field in fields(facts)}
    classes, counts = named_values(values.pop("instruction_mix"))
    kernel = {name: values.pop(name) for name in ("kernel", "mma_kind")}
    return (
        {**kernel, "instruction_classes_json": classes},
        {**values, "instruction_counts_json": counts},
    )


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
    columns: dict[str, Any] = dict.fromkeys(TIMING_COLUMNS)
    if timing is None:
        return columns
    times = {
        column: _nanoseconds(f"timing.{name}", getattr(timing, name))
        for name, column in _TIME_COLUMNS.items()
    }
    if any(value != times["median_ns"] for value in times.values()):
        columns.update(times)
    columns["median_ns"] = times["median_ns"]
    columns["num_samples"] = len(timing.samples_us) or timing.num_samples
    columns["samples"] = encode_samples(timing.samples_us) if keep_samples else None
    return columns


def _nanoseconds(where: str, time_us: object) -> int:
    if not is_number(time_us) or not 0 <= time_us <= LARGEST_TIME_US:
        raise UsageError(
            f"{where}={time_us!r} must be a number of microseconds from 0 to {LARGEST_TIME_US:g}"
        )
    return round(time_us * 1000)


def decode_timing(columns: Sequence[Any]) -> Timing | None:
    """The timing of a trial by its ``TIMING_COLUMNS``, or None where it has none.

    The last column may be missing: then the timing has the number of its samples only.
    """
    median_ns, p10, p90, low, high, num_samples, *samples = columns
    if median_ns is None:
        return None
    p10, p90, low, high = [median_ns if ns is None else ns for ns in (p10, p90, low, high)]
    # A hundred thousand trials come this way: one comparison of types for all of a row.
    if {type(median_ns), type(p10), type(p90), type(low), type(high), type(num_samples)} != {int}:
        values = [median_ns, p10, p90, low, high]
        raise UsageError(f"times {values} of {num_samples!r} samples must be integers")
    unpacked = decode_samples("samples", samples[0], num_samples) if samples else ()
    return Timing(
        median_ns / 1000, p10 / 1000, p90 / 1000, low / 1000, high / 1000, unpacked, num_samples
    )


def encode_seconds(where: str, seconds: float) -> int:
    """A duration in whole milliseconds."""
    if not is_number(seconds) or not 0 <= seconds <= LARGEST_DURATION_S:
        raise UsageError(
            f"{where}={seconds!r} must be a number of seconds from 0 to {LARGEST_DURATION_S:g}"
        )
    return round(seconds * 1000)


def decode_seconds(where: str, milliseconds: object) -> float:
    """The duration that ``encode_seconds`` wrote."""
    if not is_integer(milliseconds):
        raise UsageError(f"{where}={milliseconds!r} must be an integer")
    return milliseconds / 1000


def decode_device_row(where: str, row: Any) -> DeviceSpec:
    """The device of a row of ``devices``."""
    rest = Fields(where, decode_json(f"{where} spec_json", row.spec_json))
    columns = {name: getattr(row, name) for name in _DEVICE_COLUMNS}
    return decode_device(Fields(where, {**{n: rest.raw(n) for n in rest.names()}, **columns}))


def decode_binary_ids(text: object) -> tuple[int, ...]:
    """Ids of the binaries that a trial launches, in order."""
    if text is None:
        return ()
    ids = decode_json("binary_ids", text)
    if not isinstance(ids, list) or not all(map(is_integer, ids)):
        raise UsageError(f"binary_ids={text!r} must be a list of integers")
    return tuple(ids)


def decode_binary_row(where: str, row: Any) -> BinaryFacts:
    """The facts of a row of ``binaries`` beside its row of ``kernels``."""
    counts = _joined(
        where,
        ("instruction_classes_json", row.instruction_classes_json),
        ("instruction_counts_json", row.instruction_counts_json),
    )
    mix = decode_mix(Fields(f"{where} instruction_counts_json", counts))
    return decode_binary(Fields(where, dict(row._mapping)), mix)
