from __future__ import annotations

import re
from pathlib import Path

from tilescout.tuner.report.drawing import MAX_VECTOR_MARKS
from tilescout.tuner.report.evidence import NUM_BEST
from tilescout.tuner.report.frames import build_frames
from tilescout.tuner.report.html_report import MAX_ROWS
from tilescout.tuner.report.pictures import MAX_INLINE_BYTES
from tilescout.tuner.report.writer import NUM_PLOTS
from tilescout.tuner.search.importance import MAX_TIMES

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
    assert f"the first {MAX_ROWS} rows" in TEXT
    assert f"plot of their own ({NUM_PLOTS}," in TEXT.replace("\n", " ")
    assert f"at most {MAX_TIMES:,} times" in TEXT
    assert NUM_BEST == 10
    assert "the ten best configs" in TEXT
