"""Commands that prepare a deployment: ``warmup``, ``lock``, ``bundle``."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Annotated

import typer

from .cli_options import AllowOtherToolchain, FormatOption, Gpu, OverlaidDatabase, PolicyOption
from .rendering import Format, render_record, render_rows

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .precompile import PrecompiledKernel

__all__ = ["add_to"]

KERNEL_COLUMNS = ("op", "template", "kernel", "smem_bytes", "compile_s")

_Workload = Annotated[
    str, typer.Argument(metavar="WORKLOAD", help="Name of a workload, or path of a file.")
]
_Workers = Annotated[
    int | None, typer.Option("--workers", metavar="N", min=1, help="Processes that compile.")
]


def add_to(app: typer.Typer) -> None:
    """Adds the commands."""
    for command in (warmup, lock, bundle):
        app.command()(command)


def warmup(
    workload: _Workload = "quickstart",
    *,
    gpu: Gpu = None,
    workers: _Workers = None,
    form: FormatOption = Format.TABLE,
) -> None:
    """Compile what calls with a workload's problems reach, ahead of time.

    Needs no GPU: the kernels go into the on-disk caches of both compilers, for the SKU named.

    Example: tilescout warmup quickstart --gpu h200
    """
    from .precompile import precompile_workload

    _, kernels = precompile_workload(workload, gpu=gpu, num_workers=workers)
    typer.echo(render_rows(_kernel_rows(kernels), KERNEL_COLUMNS, form))


def lock(
    workload: _Workload = "quickstart",
    *,
    out: Annotated[
        str, typer.Option("--out", metavar="FILE", help="File to write.")
    ] = "tilescout.lock.json",
    gpu: Gpu = None,
    policy: PolicyOption = "nearest",
    allow_other_toolchain: AllowOtherToolchain = False,
    db: OverlaidDatabase = None,
    form: FormatOption = Format.TABLE,
) -> None:
    """Write the winners of a workload as a lock file, to be reviewed and put in force.

    In force (TILESCOUT_LOCK, tilescout.use_lock) it answers alone: every rank gets the same.

    Example: tilescout lock quickstart --gpu h200 --out tilescout.lock.json
    """
    from .locking import write_lock

    written = write_lock(
        workload,
        out,
        gpu=gpu,
        databases=[db] if db else None,
        policy=policy,
        allow_other_toolchain=allow_other_toolchain,
    )
    tiers = Counter(result.tier.value for result in written.results)
    record: dict[str, object] = {
        "path": str(written.path),
        "lock_id": written.lock_id,
        "num_winners": len(written.results),
        "tiers": dict(sorted(tiers.items())),
    }
    typer.echo(render_record(record, form))


def bundle(
    workload: _Workload = "quickstart",
    *,
    out: Annotated[
        str, typer.Option("--out", metavar="FILE", help="File to write.")
    ] = "tilescout.bundle.zip",
    gpu: Gpu = None,
    db: OverlaidDatabase = None,
    workers: _Workers = None,
    form: FormatOption = Format.TABLE,
) -> None:
    """Pack the winners of a workload with their compiled binaries for one SKU.

    A process that calls tilescout.use_bundle(FILE) neither tunes nor compiles what it holds.

    Example: tilescout bundle quickstart --gpu h200 --out quickstart.bundle.zip
    """
    from .bundle import write_bundle

    written = write_bundle(
        workload, out, gpu=gpu, databases=[db] if db else None, num_workers=workers
    )
    record: dict[str, object] = {
        "path": str(written.path),
        "lock_id": written.lock_id,
        "num_bytes": written.num_bytes,
        "num_winners": len(written.results),
        "num_kernels": len(written.kernels),
    }
    typer.echo(render_record(record, form))


def _kernel_rows(kernels: Iterable[PrecompiledKernel]) -> list[dict[str, object]]:
    return [{name: getattr(kernel, name) for name in KERNEL_COLUMNS} for kernel in kernels]
