"""The tables of the database; ``docs/database.md`` describes them for readers.

What many trials share (problem, device, toolchain, template, config, binary, reason) is one row
each, found by its content, so that a trial is a few numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isnan
from typing import Any, ClassVar

from sqlalchemy import BigInteger, Dialect, ForeignKey, LargeBinary, Text, UniqueConstraint
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import UserDefinedType

__all__ = [
    "Base",
    "BinaryRow",
    "ConfigRow",
    "ConfigShapeRow",
    "DeviceRow",
    "KernelRow",
    "ProblemRow",
    "Real",
    "ReasonRow",
    "StudyRow",
    "StudyTemplateRow",
    "TemplateRow",
    "ToolchainRow",
    "TrialRow",
    "WinnerRow",
]


class Real(UserDefinedType[float]):
    """A double that keeps NaN: SQLite would turn it into NULL, so there it is the text ``nan``."""

    cache_ok = True

    def get_col_spec(self, **_: Any) -> str:
        """The name that SQLite and PostgreSQL both know."""
        return "DOUBLE PRECISION"

    def bind_processor(self, dialect: Dialect) -> Callable[[float | None], object] | None:
        """Writes NaN as text where the database has none."""
        if dialect.name != "sqlite":
            return None
        return lambda value: "nan" if value is not None and isnan(value) else value


class Base(DeclarativeBase):
    """Registry of all tables."""

    type_annotation_map: ClassVar[dict[Any, Any]] = {
        str: Text(),
        float: Real(),
        bytes: LargeBinary(),
    }


class ProblemRow(Base):
    """An operation with its shapes, dtypes and flags."""

    __tablename__ = "problems"

    id: Mapped[int] = mapped_column(primary_key=True)
    op: Mapped[str]
    problem_json: Mapped[str]
    digest: Mapped[bytes] = mapped_column(unique=True)


class DeviceRow(Base):
    """A GPU as it was known when it was tuned."""

    __tablename__ = "devices"

    id: Mapped[int] = mapped_column(primary_key=True)
    sku: Mapped[str]
    compute_capability: Mapped[str]
    num_sms: Mapped[int]
    memory_bytes: Mapped[int] = mapped_column(BigInteger)
    spec_json: Mapped[str]
    """The other fields of ``DeviceSpec``."""
    digest: Mapped[bytes] = mapped_column(unique=True)


class ToolchainRow(Base):
    """Versions of compilers and driver; empty where there is none."""

    __tablename__ = "toolchains"
    __table_args__ = (UniqueConstraint("triton", "tilelang", "torch", "cuda", "driver"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    triton: Mapped[str]
    tilelang: Mapped[str]
    torch: Mapped[str]
    cuda: Mapped[str]
    driver: Mapped[str]


class TemplateRow(Base):
    """A template at one state of its source."""

    __tablename__ = "templates"
    __table_args__ = (UniqueConstraint("op", "name", "source_hash"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    op: Mapped[str]
    name: Mapped[str]
    source_hash: Mapped[str]


class ConfigShapeRow(Base):
    """A template and which of its parameters are active; the configs hold only the values."""

    __tablename__ = "config_shapes"
    __table_args__ = (UniqueConstraint("template", "parameters_json"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    template: Mapped[str]
    parameters_json: Mapped[str]
    """Names, in the order of the values."""


class ConfigRow(Base):
    """Parameter values of a template."""

    __tablename__ = "configs"

    id: Mapped[int] = mapped_column(primary_key=True)
    shape_id: Mapped[int] = mapped_column(ForeignKey("config_shapes.id"))
    values_json: Mapped[str]
    digest: Mapped[bytes] = mapped_column(unique=True)


class KernelRow(Base):
    """What many binaries say in the same words."""

    __tablename__ = "kernels"
    __table_args__ = (UniqueConstraint("kernel", "mma_kind", "instruction_classes_json"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    kernel: Mapped[str]
    mma_kind: Mapped[str]
    instruction_classes_json: Mapped[str]
    """Names, in the order of the counts."""


class BinaryRow(Base):
    """Facts of one compiled kernel."""

    __tablename__ = "binaries"

    id: Mapped[int] = mapped_column(primary_key=True)
    kernel_id: Mapped[int] = mapped_column(ForeignKey("kernels.id"))
    threads_per_block: Mapped[int]
    registers: Mapped[int]
    spill_bytes: Mapped[int]
    smem_bytes: Mapped[int]
    tmem_columns: Mapped[int]
    num_instructions: Mapped[int]
    instruction_counts_json: Mapped[str]
    loop_instructions: Mapped[int]
    loop_load_bytes: Mapped[int]
    digest: Mapped[bytes] = mapped_column(unique=True)


class ReasonRow(Base):
    """Why a trial was not ok; compilers say the same of many configs."""

    __tablename__ = "reasons"

    id: Mapped[int] = mapped_column(primary_key=True)
    reason: Mapped[str]
    digest: Mapped[bytes] = mapped_column(unique=True)


class StudyRow(Base):
    """One search: everything that must be equal for its trials to be compared."""

    __tablename__ = "studies"

    id: Mapped[int] = mapped_column(primary_key=True)
    digest: Mapped[str] = mapped_column(unique=True)
    """``StudyKey.digest``."""
    problem_id: Mapped[int] = mapped_column(ForeignKey("problems.id"))
    device_id: Mapped[int] = mapped_column(ForeignKey("devices.id"))
    toolchain_id: Mapped[int] = mapped_column(ForeignKey("toolchains.id"))
    provenance: Mapped[str]
    policy: Mapped[str]
    space_fingerprint: Mapped[str]
    part: Mapped[str] = mapped_column(server_default="")
    """``StudyKey.part``; such a study is never decided."""
    seed: Mapped[int] = mapped_column(BigInteger)
    created_ms: Mapped[int] = mapped_column(BigInteger)
    """Milliseconds since 1970, UTC; so everywhere: six bytes instead of a text's twenty."""


class StudyTemplateRow(Base):
    """The templates that took part in a study."""

    __tablename__ = "study_templates"
    __table_args__ = ({"sqlite_with_rowid": False},)

    study_id: Mapped[int] = mapped_column(ForeignKey("studies.id"), primary_key=True)
    template_id: Mapped[int] = mapped_column(ForeignKey("templates.id"), primary_key=True)


class TrialRow(Base):
    """One evaluated config. The only truth: everything decided can be rebuilt from here.

    Times are whole nanoseconds and milliseconds: SQLite keeps an integer in one to four bytes, a
    float in eight. ``number`` is unique in a study without an index, which would cost 13 bytes a
    trial: it is given inside the write transaction.
    """

    __tablename__ = "trials"
    __table_args__ = (UniqueConstraint("study_id", "config_id"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    study_id: Mapped[int] = mapped_column(ForeignKey("studies.id"))
    number: Mapped[int]
    config_id: Mapped[int] = mapped_column(ForeignKey("configs.id"))
    binary_ids: Mapped[str | None]
    """JSON list of ``binaries.id`` in launch order."""
    final_rank: Mapped[int | None]
    """Place in the study's finals, from 1; NULL for a trial that took no part."""
    status: Mapped[str]
    reason_id: Mapped[int | None] = mapped_column(ForeignKey("reasons.id"))
    median_ns: Mapped[int | None] = mapped_column(BigInteger)
    p10_ns: Mapped[int | None] = mapped_column(BigInteger)
    """This and the next three are NULL where all equal the median, as in a prediction."""
    p90_ns: Mapped[int | None] = mapped_column(BigInteger)
    ci_low_ns: Mapped[int | None] = mapped_column(BigInteger)
    ci_high_ns: Mapped[int | None] = mapped_column(BigInteger)
    num_samples: Mapped[int | None]
    samples: Mapped[bytes | None]
    """zlib of little-endian float32, microseconds; finalists only."""
    max_abs_error: Mapped[float | None]
    relative_rms_error: Mapped[float | None]
    compile_ms: Mapped[int] = mapped_column(BigInteger)
    measure_ms: Mapped[int] = mapped_column(BigInteger)
    created_ms: Mapped[int] = mapped_column(BigInteger)


class WinnerRow(Base):
    """The decision of a study; rebuilt from ``trials.final_rank`` where it is lost."""

    __tablename__ = "winners"

    id: Mapped[int] = mapped_column(primary_key=True)
    study_id: Mapped[int] = mapped_column(ForeignKey("studies.id"), unique=True)
    trial_id: Mapped[int] = mapped_column(ForeignKey("trials.id"))
    decided_ms: Mapped[int] = mapped_column(BigInteger)
