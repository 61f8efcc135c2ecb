"""Writes docs/reports, the report of the shipped results.db: run by ``make report-example``.

The same database gives the same bytes: the page is dated by the last change in the data.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from tilescout.tuner.report import write_report
from tilescout.tuner.report.searches import load_searches
from tilescout.tuner.store import Store

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "reports"
SKUS = ("h200", "b200", "b300", "gb200", "rtx5090", "rtxpro6000")
"""Hopper, measured, first: what the others are compared with."""


def main() -> None:
    """Writes the folder anew and prints its page and size."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    with Store.open(ROOT / "results.db", read_only=True) as store:
        last_change = max(search.last_change for search in load_searches([store], SKUS))
        paths = write_report([store], FOLDER, gpus=SKUS, generated_at=last_change)
    files = (paths.index, *paths.tables, *paths.plots)
    num_bytes = sum(path.stat().st_size for path in files)
    print(f"{paths.index.relative_to(ROOT)}: {len(files)} files, {num_bytes / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
