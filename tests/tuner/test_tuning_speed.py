"""The benchmark's dry run: whatever of it needs no GPU still fits the kernel and the search."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tilescout

SCRIPT = Path(tilescout.__file__).parent / "benchmarks" / "tuning_speed.py"


@pytest.mark.slow
def test_a_dry_run_does_what_needs_no_gpu(tmp_path: Path) -> None:
    report_path = tmp_path / "speed.json"
    options = ["--dry-run", "--configs", "60", "--subset", "1", "--json", str(report_path)]
    ended = subprocess.run(
        [sys.executable, str(SCRIPT), *options], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert "DRY RUN" in ended.stdout
    report = json.loads(report_path.read_text())
    assert report["is_dry_run"]
    assert report["throughput"]["statuses"] == {"ok": 1}
    assert 0 < report["against_autotune"]["ours_num_trials"] <= 60
    # The made-up optimum: 64 tokens and 3 stages.
    winner = report["against_autotune"]["ours_winner"]
    assert winner["num_stages"] in {2, 3, 4}
