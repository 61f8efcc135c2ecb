from __future__ import annotations

from datetime import UTC, datetime

from published_data import add_baseline
from report_data import DEFAULT, WIDE, Searched, add_study, failed, timed
from tilescout.tuner.records import Provenance
from tilescout.tuner.report import markdown
from tilescout.tuner.report.collected import collect
from toy_op import ToyProblem

NOW = datetime(2026, 11, 30, 12, tzinfo=UTC)


def text_of(store, **options) -> str:
    return markdown.report_markdown(collect([store], **options), generated_at=NOW)


def tables(text: str) -> dict[str, list[list[str]]]:
    """Cells by heading, the two lines of headings left out."""
    found: dict[str, list[list[str]]] = {}
    for section in text.split("\n## ")[1:]:
        title, *lines = section.splitlines()
        rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("|")]
        assert len({len(row) for row in rows}) == 1, title
        found[title] = rows[2:]
    return found


def test_the_tables_are_there_with_their_figures(filled, h200, b200):
    for device, time_us in ((h200, 15.0), (b200, 7.5)):
        add_baseline(filled, ToyProblem(1 << 20), device, time_us, provenance=Provenance.MEASURED)
    text = text_of(filled)
    assert text.startswith("# Tilescout report: h200, b200\n")
    assert "Generated 2026-11-30T12:00:00Z" in text
    found = tables(text)
    assert list(found) == [
        "Environment",
        "Summary",
        "Across SKUs",
        "Other libraries across SKUs",
        "Times side by side",
        "What changed in the winners",
        "What the winner of one SKU costs on another",
        "Results",
        "Other libraries against ours",
        "Failures",
    ]
    first = found["Results"][0]
    assert {"12.50", "1.60x", "rival fast", "1.20x"} <= set(first)
    assert "mixed: measured / predicted" in found["Across SKUs"][0]
    ours = next(row for row in found["Times side by side"] if "tilescout" in row)
    assert ours[-2:] == ["12.50", "8.000 (predicted)"]


def test_text_stays_in_its_cell(store, h200):
    searched = Searched(ToyProblem(64), h200)
    trials = [timed(searched, DEFAULT, 9.0), failed(searched, WIDE, "crashed", "a|b\n<b>c")]
    add_study(store, searched, trials, [DEFAULT])
    assert "a\\|b &lt;b>c (1)" in text_of(store)


def test_long_tables_are_cut_and_say_so(filled, monkeypatch):
    monkeypatch.setattr(markdown, "MAX_ROWS", 2)
    text = text_of(filled)
    assert len(tables(text)["Failures"]) == 2
    assert "The first 2 of 5 rows." in text


def test_an_empty_database_says_so(store):
    assert "No trials for no SKU in the databases given." in text_of(store)
    assert "No trials for b300 in" in text_of(store, gpus=["b300"])
