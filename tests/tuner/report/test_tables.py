from __future__ import annotations

from dataclasses import dataclass

import pandas as pd
import pytest
from tilescout.tuner.report.columns import NOT_LISTED, columns_of
from tilescout.tuner.report.frames import build_frames, frame_of
from tilescout.tuner.report.tables import Column, make_table, written


@dataclass(frozen=True)
class Row:
    name: str
    count: int | None
    low_us: float | None
    high_us: float | None
    is_shown: bool = True


COLUMNS_HERE = (
    Column("name", "name", is_identity=True),
    Column("count", "count", "count"),
    Column("low_us", "range (us)", "range", upper="high_us"),
    Column("is_shown", "shown"),
)


@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [
        (0.012345, "time", "0.0123"),
        (1.23456, "time", "1.235"),
        (12.3456, "time", "12.35"),
        (123.456, "time", "123.5"),
        (12345.6, "time", "12,346"),
        (0.8731, "percent", "87.3%"),
        (1.3456, "ratio", "1.35x"),
        (141e9, "gigabytes", "141"),
        (65536, "count", "65,536"),
        (41, "text", "41"),
        (True, "text", "yes"),
        ("", "text", "-"),
        (None, "time", "-"),
    ],
)
def test_how_values_are_written(value, kind, text):
    assert written(value, kind) == text


def table_of(*rows):
    frame = frame_of(Row, rows)
    return make_table(frame, COLUMNS_HERE, table_id="t", caption="c", csv="t.csv")


def test_cells_show_rounded_and_sort_by_more_digits():
    table = table_of(Row("a", 1234, 10.123456, 11.0), Row("b", None, None, None))
    first, second = table.rows
    assert [cell.text for cell in first] == ["a", "1,234", "10.12 to 11.00", "yes"]
    assert [cell.sort_value for cell in first] == ["a", "1234", "10.12346", "True"]
    assert [cell.text for cell in second] == ["b", "-", "-", "yes"]
    assert second[1].sort_value == ""


def test_what_is_alike_in_all_rows_is_told_once_on_paper_but_never_what_a_row_is_about():
    table = table_of(Row("a", 1, 1.0, 2.0), Row("a", 2, 1.0, 2.0))
    assert table.constants_text == "shown: yes"
    assert table.css_class(COLUMNS_HERE[0]) == ""
    assert table.css_class(COLUMNS_HERE[2]) == "number"
    assert table.css_class(COLUMNS_HERE[3]) == "screen"


def test_columns_of_the_page_exist_in_the_frames():
    for name, frame in build_frames([]).named():
        columns = () if name in NOT_LISTED else columns_of(name, frame)
        known = set(frame.columns)
        assert {c.name for c in columns} <= known
        assert {c.upper for c in columns if c.upper} <= known


def test_every_table_of_the_page_says_provenance_versions_device_and_date():
    for name, frame in build_frames([]).named():
        # A column a SKU: every cell has its provenance, the tables by problem have the rest.
        if name not in (*NOT_LISTED, "times", "transfer_matrix"):
            shown = {column.name for column in columns_of(name, frame)}
            assert {"provenance", "versions", "date", "device"} <= shown, name


def test_a_figure_that_was_not_measured_says_so_in_its_cell():
    frame = pd.DataFrame({"h200": [1.5, 2.5], "word": ["measured", "predicted"]})
    columns = [Column("h200", "h200 (us)", "time", mark="word")]
    table = make_table(frame, columns, table_id="t", caption="c", csv="t.csv")
    assert [row[0].text for row in table.rows] == ["1.500", "2.500 (predicted)"]
    assert [row[0].sort_value for row in table.rows] == ["1.5", "2.5"]


def test_frames_keep_integers_with_gaps_as_integers():
    frame = frame_of(Row, [Row("a", 7, 1.0, None), Row("b", None, None, None)])
    assert frame.to_csv(index=False).splitlines()[1] == "a,7,1.0,,True"
    assert list(frame_of(Row, []).columns) == ["name", "count", "low_us", "high_us", "is_shown"]
