"""What the tuner's parts pass to each other: statuses, measurements, trials, look-up keys.

Leaf module: plain frozen dataclasses and enums, no I/O, no third-party import.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum

from ..kernels.base import Config, Problem, canonical_json
from ..kernels.device import DeviceSpec

__all__ = [
    "BASELINE_TEMPLATE",
    "OLDEST_READ_SCHEMA",
    "SCHEMA_VERSION",
    "BinaryFacts",
    "Evaluation",
    "MeasurementPolicy",
    "Provenance",
    "StudyKey",
    "Timing",
    "Toolchain",
    "TrialStatus",
]

SCHEMA_VERSION = 2
"""Number of the database schema this version writes; ``PRAGMA user_version`` of the file."""
OLDEST_READ_SCHEMA = 1
"""Oldest schema that is read as it stands; writing migrates it."""
BASELINE_TEMPLATE = "baseline"
"""Template name of what others' kernels did; its source hash says where the figures are from."""


class TrialStatus(StrEnum):
    """How a trial ended."""

    OK = "ok"
    INVALID = "invalid"
    """Refused after it was asked for, e.g. because it spills or an MMA was downgraded."""
    COMPILE_ERROR = "compile_error"
    OUT_OF_RESOURCES = "out_of_resources"
    """Needs more registers, shared or tensor memory than the device has."""
    RUNTIME_ERROR = "runtime_error"
    INCORRECT = "incorrect"
    UNREPEATABLE = "unrepeatable"
    """Two runs on equal inputs differed although the template claims equal bits."""
    TIMEOUT = "timeout"
    CRASHED = "crashed"
    """The process that ran it died."""
    PRUNED = "pruned"
    """Right, but cut short because it was clearly slower than the best."""


class Provenance(StrEnum):
    """Where a time comes from; never mixed."""

    MEASURED = "measured"
    PREDICTED = "predicted"
    PUBLISHED = "published"
    DEFAULT = "default"


@dataclass(frozen=True)
class Toolchain:
    """Versions that shape a compiled kernel or its time; empty where a part is not installed."""

    triton: str = ""
    tilelang: str = ""
    torch: str = ""
    cuda: str = ""
    """CUDA version that torch was built for."""
    driver: str = ""
    """NVIDIA driver; empty for a prediction."""

    def as_dict(self) -> dict[str, str]:
        """Version by part."""
        return asdict(self)


@dataclass(frozen=True)
class MeasurementPolicy:
    """How a kernel was or would be run; winners of different policies are not compared."""

    is_cuda_graph: bool = True
    is_cold_l2: bool = True

    def __str__(self) -> str:
        launch = "cuda_graph" if self.is_cuda_graph else "eager"
        return f"{launch}/{'cold_l2' if self.is_cold_l2 else 'warm_l2'}"


@dataclass(frozen=True)
class BinaryFacts:
    """What the binary of one kernel says of itself."""

    kernel: str
    threads_per_block: int
    registers: int
    """Registers of one thread."""
    spill_bytes: int
    """Local memory of one thread: stack frame and spills."""
    smem_bytes: int
    tmem_columns: int
    num_instructions: int
    mma_kind: str
    """SASS name of the matrix instruction (``HMMA.16816.F32.BF16``, ``HGMMA...``), or ``none``."""
    instruction_mix: Mapping[str, int] = field(default_factory=dict, hash=False)
    """Instruction count by class: ``mma load_global load_shared store async_copy ...``."""
    loop_instructions: int = 0
    """Instructions in one pass of the loop that streams global memory; 0 without such a loop."""
    loop_load_bytes: int = 0
    """Bytes one thread asks of global memory in one pass; 0 where the code does not say (TMA)."""


@dataclass(frozen=True)
class Timing:
    """Time of one config, microseconds a call."""

    median_us: float
    p10_us: float
    p90_us: float
    ci_low_us: float
    ci_high_us: float
    """95% confidence interval of the median."""
    samples_us: tuple[float, ...] = ()
    """Raw samples where they are kept; empty otherwise."""
    num_samples: int = 0


@dataclass(frozen=True)
class Evaluation:
    """The fate of one config: what an evaluator returns and the store keeps as a trial."""

    config: Config
    status: TrialStatus
    provenance: Provenance
    reason: str = ""
    """Why it was not ok; one short line."""
    timing: Timing | None = None
    """Set where status is ok or pruned; a predicted time has no spread."""
    facts: tuple[BinaryFacts, ...] = ()
    max_abs_error: float | None = None
    relative_rms_error: float | None = None
    compile_s: float = 0.0
    measure_s: float = 0.0
    """Time the GPU was held for this trial."""

    @property
    def time_us(self) -> float | None:
        """Median time where there is one."""
        return self.timing.median_us if self.timing else None


@dataclass(frozen=True)
class StudyKey:
    """What must be equal for trials to belong to one search and be resumed."""

    problem: Problem
    device: DeviceSpec
    toolchain: Toolchain
    provenance: Provenance
    policy: MeasurementPolicy
    space_fingerprint: str
    template_hashes: tuple[tuple[str, str], ...]
    """(template name, source hash), sorted."""
    part: str = ""
    """What alone its trials timed, an algorithm and one of its parts; empty for the operation."""

    @property
    def is_baseline(self) -> bool:
        """Whether its trials are times of other libraries: nothing was searched or is decided."""
        return any(name == BASELINE_TEMPLATE for name, _ in self.template_hashes)

    @property
    def digest(self) -> str:
        """Hex identity of the study."""
        parts: dict[str, object] = {
            "op": self.problem.op,
            "problem": self.problem.as_dict(),
            "sku": self.device.sku,
            "compute_capability": self.device.compute_capability_text,
            "num_sms": self.device.num_sms,
            "toolchain": self.toolchain.as_dict(),
            "provenance": self.provenance.value,
            "policy": str(self.policy),
            "space": self.space_fingerprint,
            "templates": [list(pair) for pair in self.template_hashes],
        }
        if self.part:
            parts["part"] = self.part
        return hashlib.sha256(canonical_json(parts).encode()).hexdigest()
