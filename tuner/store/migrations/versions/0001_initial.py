"""The first schema: shared facts, studies, trials, winners and the view that dispatch reads."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

# Whoever reads the view joins names and values: where schemas are not trusted, SQLite 3.40 refuses
# its own JSON functions in a view.
_DISPATCH_WINNERS = """
CREATE VIEW dispatch_winners AS
SELECT
    trials.id AS trial_id,
    problems.op AS op,
    problems.problem_json AS problem,
    devices.sku AS sku,
    devices.compute_capability AS compute_capability,
    devices.num_sms AS num_sms,
    devices.memory_bytes AS memory_bytes,
    studies.policy AS policy,
    config_shapes.template AS template,
    templates.source_hash AS template_hash,
    config_shapes.parameters_json AS parameters,
    configs.values_json AS config_values,
    studies.provenance AS provenance,
    trials.median_ns / 1000.0 AS time_us,
    toolchains.triton AS triton,
    toolchains.tilelang AS tilelang,
    toolchains.torch AS torch,
    toolchains.cuda AS cuda,
    toolchains.driver AS driver,
    {decided_at} AS decided_at
FROM winners
JOIN trials ON trials.id = winners.trial_id
JOIN studies ON studies.id = winners.study_id
JOIN problems ON problems.id = studies.problem_id
JOIN devices ON devices.id = studies.device_id
JOIN toolchains ON toolchains.id = studies.toolchain_id
JOIN configs ON configs.id = trials.config_id
JOIN config_shapes ON config_shapes.id = configs.shape_id
JOIN study_templates ON study_templates.study_id = studies.id
JOIN templates ON templates.id = study_templates.template_id
    AND templates.name = config_shapes.template
"""
_ISO_TIME = {
    "sqlite": "strftime('%Y-%m-%dT%H:%M:%fZ', winners.decided_ms / 1000.0, 'unixepoch')",
    "postgresql": "to_char(to_timestamp(winners.decided_ms / 1000.0) AT TIME ZONE 'UTC', "
    '\'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"\')',
}


def upgrade() -> None:
    """Creates all tables and the view."""
    _create_shared_facts()
    _create_binaries()
    _create_studies()
    _create_trials()
    dialect = op.get_bind().dialect.name
    # The driver's own call: a colon of the time format is no parameter of ours.
    op.get_bind().exec_driver_sql(_DISPATCH_WINNERS.format(decided_at=_ISO_TIME[dialect]))


def _key() -> sa.Column[int]:
    return sa.Column("id", sa.Integer, primary_key=True)


def _text(*names: str) -> list[sa.Column[str]]:
    return [sa.Column(name, sa.Text, nullable=False) for name in names]


def _integer(*names: str) -> list[sa.Column[int]]:
    return [sa.Column(name, sa.Integer, nullable=False) for name in names]


def _long(name: str, *, nullable: bool = False) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger, nullable=nullable)


def _real(*names: str) -> list[sa.Column[float]]:
    return [sa.Column(name, sa.Double) for name in names]


def _digest() -> sa.Column[bytes]:
    return sa.Column("digest", sa.LargeBinary, nullable=False, unique=True)


def _reference(
    name: str, target: str, *, nullable: bool = False, primary_key: bool = False
) -> sa.Column[int]:
    return sa.Column(
        name,
        sa.Integer,
        sa.ForeignKey(f"{target}.id"),
        nullable=nullable,
        primary_key=primary_key,
    )


def _create_shared_facts() -> None:
    op.create_table("problems", _key(), *_text("op", "problem_json"), _digest())
    op.create_table(
        "devices",
        _key(),
        *_text("sku", "compute_capability"),
        *_integer("num_sms"),
        _long("memory_bytes"),
        *_text("spec_json"),
        _digest(),
    )
    versions = ("triton", "tilelang", "torch", "cuda", "driver")
    op.create_table("toolchains", _key(), *_text(*versions), sa.UniqueConstraint(*versions))
    template = ("op", "name", "source_hash")
    op.create_table("templates", _key(), *_text(*template), sa.UniqueConstraint(*template))
    shape = ("template", "parameters_json")
    op.create_table("config_shapes", _key(), *_text(*shape), sa.UniqueConstraint(*shape))
    op.create_table(
        "configs", _key(), _reference("shape_id", "config_shapes"), *_text("values_json"), _digest()
    )
    op.create_table("reasons", _key(), *_text("reason"), _digest())


def _create_binaries() -> None:
    kernel = ("kernel", "mma_kind", "instruction_classes_json")
    op.create_table("kernels", _key(), *_text(*kernel), sa.UniqueConstraint(*kernel))
    op.create_table(
        "binaries",
        _key(),
        _reference("kernel_id", "kernels"),
        *_integer("threads_per_block", "registers", "spill_bytes"),
        *_integer("smem_bytes", "tmem_columns", "num_instructions"),
        *_text("instruction_counts_json"),
        *_integer("loop_instructions", "loop_load_bytes"),
        _digest(),
    )


def _create_studies() -> None:
    op.create_table(
        "studies",
        _key(),
        sa.Column("digest", sa.Text, nullable=False, unique=True),
        _reference("problem_id", "problems"),
        _reference("device_id", "devices"),
        _reference("toolchain_id", "toolchains"),
        *_text("provenance", "policy", "space_fingerprint"),
        _long("seed"),
        _long("created_ms"),
    )
    op.create_table(
        "study_templates",
        _reference("study_id", "studies", primary_key=True),
        _reference("template_id", "templates", primary_key=True),
        sqlite_with_rowid=False,
    )


def _create_trials() -> None:
    times = ("median_ns", "p10_ns", "p90_ns", "ci_low_ns", "ci_high_ns")
    op.create_table(
        "trials",
        _key(),
        _reference("study_id", "studies"),
        *_integer("number"),
        _reference("config_id", "configs"),
        sa.Column("binary_ids", sa.Text),
        sa.Column("final_rank", sa.Integer),
        *_text("status"),
        _reference("reason_id", "reasons", nullable=True),
        *(_long(name, nullable=True) for name in times),
        sa.Column("num_samples", sa.Integer),
        sa.Column("samples", sa.LargeBinary),
        *_real("max_abs_error", "relative_rms_error"),
        *map(_long, ("compile_ms", "measure_ms", "created_ms")),
        sa.UniqueConstraint("study_id", "config_id"),
    )
    op.create_table(
        "winners",
        _key(),
        sa.Column("study_id", sa.Integer, sa.ForeignKey("studies.id"), nullable=False, unique=True),
        _reference("trial_id", "trials"),
        _long("decided_ms"),
    )
