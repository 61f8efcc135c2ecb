from __future__ import annotations

import re
from pathlib import Path

from tilescout.tuner.report.frames import build_frames
from tilescout.tuner.report.plots import MAX_VECTOR_MARKS
from tilescout.tuner.report.writer import MAX_INLINE_BYTES

TEXT = (Path(__file__).parents[3] / "docs" / "reports.md").read_text(encoding="utf-8")


def test_every_file_of_a_report_is_told_in_the_order_of_the_page():
    told = re.findall(r"^\| `(\w+)\.csv`", TEXT, re.MULTILINE)
    assert told == [name for name, _ in build_frames([]).named()]


def test_the_example_runs_on_an_empty_database(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    exec(compile(code, "reports.md", "exec"), {})
    assert Path(capsys.readouterr().out.strip()).is_file()


def test_the_limits_told_are_those_in_force():
    assert f"SVG beyond {MAX_INLINE_BYTES / 1e6:g} MB" in TEXT
    assert f"more\nthan {MAX_VECTOR_MARKS} marks" in TEXT
