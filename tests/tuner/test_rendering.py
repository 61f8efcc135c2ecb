"""Tables round and align; CSV and JSON keep every value."""

from __future__ import annotations

import csv
import io
import json

from tilescout.tuner.rendering import Format, Section, render_record, render_rows, render_sections

ROWS = [
    {"name": "a", "time_us": 12.3456789, "count": 2, "config": {"x": True, "y": 8}, "note": None},
    {"name": "b, [c]", "time_us": 1234.5, "count": 10, "config": {}, "note": ["p", "q"]},
]
COLUMNS = ("name", "time_us", "count", "config", "note")


def test_a_table_is_aligned_and_rounded() -> None:
    assert render_rows(ROWS, COLUMNS, Format.TABLE).splitlines()[:1] + render_rows(
        ROWS, COLUMNS, Format.TABLE
    ).splitlines()[2:] == [
        "name     time_us   count   config       note",
        "a          12.35       2   x=true y=8   -",
        "b, [c]      1234      10   -            p, q",
    ]


def test_a_table_without_rows_keeps_its_heading() -> None:
    assert render_rows([], COLUMNS, Format.TABLE).split()[:5] == list(COLUMNS)


def test_csv_keeps_every_value() -> None:
    text = render_rows(ROWS, COLUMNS, Format.CSV)
    first, second = csv.DictReader(io.StringIO(text))
    assert first["time_us"] == "12.3456789"
    assert (json.loads(first["config"]), first["note"]) == ({"x": True, "y": 8}, "")
    assert (second["name"], json.loads(second["note"])) == ("b, [c]", ["p", "q"])


def test_json_keeps_every_value() -> None:
    assert json.loads(render_rows(ROWS, COLUMNS, Format.JSON)) == ROWS
    assert json.loads(render_record(ROWS[0], Format.JSON)) == ROWS[0]


def test_a_record_is_a_line_a_field() -> None:
    assert render_record(ROWS[0], Format.TABLE).splitlines() == [
        "name     a",
        "time_us  12.35",
        "count    2",
        "config   x=true y=8",
        "note     -",
    ]


def test_sections_without_rows_are_left_out() -> None:
    text = render_sections([Section("Some", ROWS, ("name",)), Section("None", [], ("name",))])
    assert text.splitlines()[0] == "Some"
    assert "None" not in text
