"""The committed example is the report of the committed database; its sentences have its figures."""

from __future__ import annotations

import re
import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "reports"
AGAIN = "run 'make report-example' and commit docs/reports"


@pytest.fixture(scope="module")
def page() -> str:
    return (FOLDER / "index.html").read_text(encoding="utf-8")


@pytest.fixture
def tools(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    yield
    for name in ("report_example", "report_findings"):
        sys.modules.pop(name, None)


def test_it_is_of_the_committed_database(page, tools):
    from report_example import SKUS

    query = (
        "SELECT count(*) FROM trials JOIN studies ON studies.id = trials.study_id "
        "JOIN devices ON devices.id = studies.device_id "
        f"WHERE devices.sku IN ({', '.join('?' * len(SKUS))}) AND studies.part = '' "
        "AND studies.id NOT IN (SELECT study_id FROM study_templates JOIN templates "
        "ON templates.id = template_id WHERE templates.name = 'baseline')"
    )
    with closing(sqlite3.connect(f"file:{ROOT / 'results.db'}?mode=ro", uri=True)) as connection:
        (in_database,) = connection.execute(query, SKUS).fetchone()
    (told,) = re.findall(r"from ([\d,]+) trials\s+and", page)
    assert told == f"{in_database:,}", AGAIN


def test_its_links_land_and_it_is_small(page):
    for link in re.findall(r'href="([^"#][^"]*)"', page):
        assert link == "data:," or (FOLDER / link).is_file(), f"{link}: {AGAIN}"
    for document in (FOLDER / "README.md", ROOT / "README.md"):
        for link in re.findall(r"\]\(([^):#]+)\)", document.read_text(encoding="utf-8")):
            assert (document.parent / link).is_file(), f"{link} of {document.name}: {AGAIN}"
    assert len(page.encode()) < 5_000_000


def test_its_sentences_have_the_figures_of_its_tables(tools):
    from report_findings import findings

    frames = SimpleNamespace(**{path.stem: pd.read_csv(path) for path in FOLDER.glob("*.csv")})
    told = findings(frames)
    text = " ".join((FOLDER / "README.md").read_text(encoding="utf-8").split())
    assert len(told) == 5
    assert [sentence for sentence in told if sentence not in text] == [], AGAIN


def test_a_sentence_without_figures_is_left_out(tools):
    from report_findings import findings
    from tilescout.tuner.report.frames import build_frames

    assert findings(build_frames([])) == []
