"""Writes docs/reports, the report of the shipped results.db: run by ``make report-example``.

The same database gives the same bytes: the page is dated by the last change in the data.
"""

from __future__ import annotations

import shutil
import sys
import textwrap
from pathlib import Path

from report_findings import findings
from tilescout.tuner.report import write_report
from tilescout.tuner.report.collected import Collected, collect
from tilescout.tuner.report.wording import iso_time
from tilescout.tuner.store import Store

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "reports"
SKUS = ("h200", "b200", "b300", "gb200", "rtx5090", "rtxpro6000")
"""Hopper, measured, first: what the others are compared with."""
MAIN_FIGURE = f"plots/ratios-{SKUS[0]}.png"


def main() -> None:
    """Writes the folder anew and prints its page and size."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    with Store.open(ROOT / "results.db", read_only=True) as store:
        collected = collect([store], SKUS)
        last_change = max(search.last_change for search in collected.searches)
        paths = write_report([store], FOLDER, gpus=SKUS, generated_at=last_change)
    readme = FOLDER / "README.md"
    readme.write_text(_readme(collected, iso_time(last_change)), encoding="utf-8")
    files = (readme, paths.index, *paths.tables, *paths.plots)
    num_bytes = sum(path.stat().st_size for path in files)
    index = paths.index.relative_to(ROOT)
    sys.stdout.write(f"{index}: {len(files)} files, {num_bytes / 1e6:.1f} MB\n")


def _readme(collected: Collected, date: str) -> str:
    told = (textwrap.fill(f, 100, break_on_hyphens=False) for f in findings(collected.frames))
    sentences = "\n\n".join(told)
    return f"""# The report of the shipped results.db

`make report-example` writes this folder from `results.db`, which last changed {date}.
The page is [index.html](index.html), its tables are the CSV files beside it;
[reports](../reports.md) says how to read them.

![How many times as fast each problem runs on each SKU as on the first]({MAIN_FIGURE})

## Hopper against Blackwell

{sentences}
"""


if __name__ == "__main__":
    main()
