"""Commands that only read: ``lookup``, ``explain``, ``spaces``, ``env``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from .cli_options import (
    AllowOtherToolchain,
    Assignments,
    FormatOption,
    Gpu,
    OpArgument,
    OverlaidDatabase,
    PolicyOption,
    parse_problem,
)
from .rendering import Format, Section, render_record, render_rows, render_sections

if TYPE_CHECKING:
    from .explain import Explanation
    from .space_description import SpaceDescription

__all__ = ["add_to"]

TIER_COLUMNS = ("tier", "outcome", "detail", "passed_over")
DATABASE_COLUMNS = ("database", "role", "present", "winners", "of_this_op")
SKIPPED_COLUMNS = ("database", "trial_id", "reason")
SIZE_COLUMNS = ("template", "product_size", "valid_size")
PARAMETER_COLUMNS = ("template", "parameter", "kind", "values", "condition")
REFUSAL_COLUMNS = ("template", "constraint", "refuses")
FIRST_COLUMNS = ("template", "first", "config")


def add_to(app: typer.Typer) -> None:
    """Adds the commands."""
    for command in (lookup, explain, spaces, env):
        app.command()(command)


def lookup(
    op: OpArgument,
    assignments: Assignments = None,
    *,
    gpu: Gpu = None,
    policy: PolicyOption = "nearest",
    allow_other_toolchain: AllowOtherToolchain = False,
    db: OverlaidDatabase = None,
    form: FormatOption = Format.TABLE,
) -> None:
    """Print the config for a problem and where it comes from.

    Example: tilescout lookup paged_decode --gpu h200 batch=16 kv_len=8192 num_qo_heads=32
    num_kv_heads=8 head_dim=128 page_size=16 dtype=bfloat16
    """
    from .dispatch import lookup as look_up

    result = look_up(
        parse_problem(op, assignments or ()),
        gpu=gpu,
        policy=policy,
        databases=[db] if db else None,
        allow_other_toolchain=allow_other_toolchain,
    )
    record = result.as_dict()
    if form is Format.TABLE:
        record |= {"database": result.database, "notes": "; ".join(result.notes)}
    typer.echo(render_record(record, form))


def explain(
    op: OpArgument,
    assignments: Assignments = None,
    *,
    gpu: Gpu = None,
    policy: PolicyOption = "nearest",
    allow_other_toolchain: AllowOtherToolchain = False,
    db: OverlaidDatabase = None,
    form: FormatOption = Format.TABLE,
) -> None:
    """Say why lookup gives what it gives.

    Shows every tier that was tried, every database that was read, every row set aside.

    Example: tilescout explain paged_decode --gpu h200 batch=16 kv_len=8192 num_qo_heads=32
    num_kv_heads=8 head_dim=128 page_size=16 dtype=bfloat16
    """
    from .dispatch import explain as explain_lookup

    explanation = explain_lookup(
        parse_problem(op, assignments or ()),
        gpu=gpu,
        policy=policy,
        databases=[db] if db else None,
        allow_other_toolchain=allow_other_toolchain,
    )
    if form is Format.CSV:
        typer.echo(render_rows(explanation.tier_rows(), TIER_COLUMNS, form))
    elif form is Format.JSON:
        typer.echo(render_record(explanation.as_dict(), form))
    else:
        typer.echo(_explanation_text(explanation))


def _explanation_text(explanation: Explanation) -> str:
    result = explanation.result
    head: dict[str, object] = {
        "problem": f"{explanation.problem.op} {explanation.problem}",
        "gpu": explanation.gpu,
        "policy": explanation.policy,
        "tier": result.tier.value if result else None,
        "config": result.config.as_dict() if result else None,
        "notes": "; ".join(result.notes) if result else explanation.failure,
    }
    if explanation.other_policy:
        head["other policies"] = f"{explanation.other_policy} winners, not considered"
    sections = [
        Section("Tiers, in order", explanation.tier_rows(), TIER_COLUMNS),
        Section("Databases, later over earlier", explanation.database_rows(), DATABASE_COLUMNS),
        Section("Rows set aside", explanation.skipped_rows(), SKIPPED_COLUMNS),
    ]
    return f"{render_record(head, Format.TABLE)}\n\n{render_sections(sections)}"


def spaces(
    op: OpArgument,
    assignments: Assignments = None,
    *,
    gpu: Gpu = None,
    form: FormatOption = Format.TABLE,
) -> None:
    """Print the search spaces of a problem.

    Shows parameters, constraints with what they refuse, sizes, and what is tried first. Fields
    left out come from the operation's first workload problem.

    Example: tilescout spaces paged_decode --gpu b200 batch=1 kv_len=32768
    """
    from .dispatch import find_device
    from .space_description import describe_spaces

    problem = parse_problem(op, assignments or (), complete=True)
    description = describe_spaces(problem, find_device(gpu))
    if form is Format.JSON:
        typer.echo(render_record(description.as_dict(), form))
    elif form is Format.CSV:
        rows = [row for space in description.spaces for row in space.parameter_rows()]
        typer.echo(render_rows(rows, PARAMETER_COLUMNS, form))
    else:
        typer.echo(_spaces_text(description))


def _spaces_text(description: SpaceDescription) -> str:
    spaces = description.spaces
    head = {"problem": f"{description.problem.op} {description.problem}", "gpu": description.gpu}
    sections = [
        Section("Sizes", description.size_rows(), SIZE_COLUMNS),
        Section("Parameters", [r for s in spaces for r in s.parameter_rows()], PARAMETER_COLUMNS),
        Section("Constraints", [r for s in spaces for r in s.constraint_rows()], REFUSAL_COLUMNS),
        Section("Tried first", [r for s in spaces for r in s.config_rows()], FIRST_COLUMNS),
    ]
    return f"{render_record(head, Format.TABLE)}\n\n{render_sections(sections)}"


def env(form: FormatOption = Format.TABLE) -> None:
    """Print the GPU, the driver and the versions that shape a kernel.

    Example: tilescout env --format json
    """
    from .environment import describe

    typer.echo(render_record(describe(), form))
