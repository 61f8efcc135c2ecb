from __future__ import annotations

import csv
import re
import subprocess
import sys
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path

import pytest
from report_data import (
    DEFAULT,
    SPLIT,
    WIDE,
    Searched,
    add_study,
    failed,
    timed,
    typical_trials,
)
from tilescout.errors import UnknownNameError, UsageError
from tilescout.tuner.records import Provenance
from tilescout.tuner.report import pictures, write_report
from tilescout.tuner.report.drawing import Plot
from tilescout.tuner.store import Store
from toy_op import ToyProblem

GOLDEN = Path(__file__).parents[2] / "golden"
MATRICES = ("times", "transfer_matrix")
"""Tables with a column for each SKU: a cell has its provenance, no row has versions or a date."""
PROVENANCES = ("measured", "predicted", "mixed: measured / predicted")
NOW = datetime(2026, 11, 30, 12, 0, tzinfo=UTC)


class Page(HTMLParser):
    """What a test asks of a page: ids, headings, links, sources and rows by table."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.text = path.read_text(encoding="utf-8")
        self.ids: list[str] = []
        self.outline: list[str] = []
        self.links: list[str] = []
        self.sources: list[str] = []
        self.tags: list[str] = []
        self.rows: dict[str, list[dict[str, str]]] = {}
        self._table = ""
        self._columns: list[str] = []
        self._open: list[str] | None = None
        self.feed(self.text)

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.tags.append(tag)
        if values.get("id"):
            self.ids.append(values["id"])
        if tag == "section":
            self.outline.append(f"section #{values['id']}")
        if tag == "table":
            self._table, self._columns = values["id"], []
            self.rows[self._table] = []
        if tag == "tr" and self._table:
            self.rows[self._table].append({})
        if tag in ("h1", "h2", "h3", "th", "td"):
            self._open = []
        if tag == "th":
            self._columns.append(values["data-column"])
        self.links += [values["href"]] if "href" in values else []
        self.sources += [values["src"]] if "src" in values else []

    def handle_data(self, data):
        if self._open is not None:
            self._open.append(data)

    def handle_endtag(self, tag):
        if tag == "table":
            self.outline.append(f"table #{self._table}, {len(self.rows[self._table]) - 1} rows")
            self.rows[self._table].pop(0)
            self._table = ""
        if self._open is None or tag not in ("h1", "h2", "h3", "th", "td"):
            return
        text, self._open = " ".join("".join(self._open).split()), None
        if tag == "td":
            row = self.rows[self._table][-1]
            row[self._columns[len(row)]] = text
        else:
            self.outline.append(f"{tag} {text}")


def written(stores, out, **options):
    paths = write_report(stores, out, generated_at=NOW, **options)
    return paths, Page(paths.index)


def read_csv(paths, name):
    path = next(path for path in paths.tables if path.stem == name)
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def check_golden(name: str, text: str, request: pytest.FixtureRequest) -> None:
    path = GOLDEN / name
    if request.config.getoption("--update-golden"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


def test_csv_headers(filled, tmp_path, request):
    paths, _ = written([filled], tmp_path)
    headers = [f"{p.name}: {p.read_text().splitlines()[0]}" for p in paths.tables]
    check_golden("report_csv_headers.txt", "\n".join(headers) + "\n", request)


def test_structure_of_the_page(filled, tmp_path, request):
    _, page = written([filled], tmp_path)
    check_golden("report_page.txt", "\n".join(page.outline) + "\n", request)


def test_the_date_and_the_devices_come_first(filled, tmp_path):
    _, page = written([filled], tmp_path)
    assert page.text.index("2026-11-30T12:00:00Z") < page.text.index("<table")
    assert next(iter(page.rows)) == "table-devices"
    assert [row["versions"] for row in page.rows["table-devices"]] == [
        "triton 3.7.1, torch 2.13.0, cuda 13.0, driver 580.95",
        "triton 3.7.1, torch 2.13.0, cuda 13.0",
    ]


def test_figures_of_page_and_csv_are_those_of_the_store(filled, tmp_path):
    paths, page = written([filled], tmp_path)
    winners = {(w.study.key.device.sku, str(w.study.key.problem)): w for w in filled.winners()}
    results = read_csv(paths, "results")
    assert len(results) == len(winners) == 3
    for row in results:
        trial = winners[row["sku"], row["problem"]].trial
        assert float(row["time_us"]) == trial.evaluation.time_us
        assert int(row["trial_id"]) == trial.trial_id
        assert row["config"] == str(trial.evaluation.config)
    shown = page.rows["table-results-h200"][0]
    assert (shown["time_us"], shown["default_time_us"]) == ("12.50", "20.00")
    assert shown["gain_over_default"] == "1.60x"
    assert shown["config"] == str(SPLIT)
    trials = {(r["study_digest"], int(r["number"])): r for r in read_csv(paths, "progress")}
    for study in filled.studies():
        for trial in filled.trials(study.study_id):
            row = trials[study.key.digest, trial.number]
            assert row["status"] == trial.evaluation.status.value
            assert row["time_us"] == str(trial.evaluation.time_us or "")


def test_every_row_says_provenance_versions_date_and_device(filled, h200, b200, tmp_path):
    from published_data import add_baseline

    for device in (h200, b200):
        add_baseline(filled, ToyProblem(1 << 20), device, 15.0, provenance=Provenance.MEASURED)
    paths, page = written([filled], tmp_path)
    for path in paths.tables:
        rows = read_csv(paths, path.stem)
        if path.stem in MATRICES:
            continue
        # Three trials are too few to say which parameter mattered.
        assert rows or path.stem == "importance", path.name
        for row in rows:
            assert row["provenance"] in PROVENANCES
            assert row["versions"].startswith(("triton 3.7.1", "torch 2.12.1"))
            assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", row["date"])
            assert row["sku"] in ("h200", "b200")
    for name, rows in page.rows.items():
        for row in rows if name.removeprefix("table-") not in MATRICES else ():
            assert row["provenance"] in PROVENANCES, name
            assert row["versions"].startswith(("triton 3.7.1", "torch 2.12.1")), name
    assert {r["provenance"] for r in page.rows["table-results-b200"]} == {"predicted"}


def test_a_mixed_ratio_says_so(filled, tmp_path):
    _, page = written([filled], tmp_path)
    (row,) = page.rows["table-comparison"]
    assert row["speedup"] == "1.56x"
    assert row["speedup_provenance"] == "mixed: measured / predicted"
    assert row["bandwidth_ratio"] == "1.67x"


def test_the_page_needs_nothing_from_elsewhere_and_its_links_land(filled, tmp_path):
    paths, page = written([filled], tmp_path)
    assert all(source.startswith("data:image/svg+xml;base64,") for source in page.sources)
    # Ratios and times across SKUs, a roofline and an overview for each SKU, one for each search.
    assert len(page.sources) == len(paths.plots) == 2 + 2 * 2 + 3
    assert len(page.ids) == len(set(page.ids))
    for link in page.links:
        if link.startswith("#"):
            assert link[1:] in page.ids
        elif not link.startswith("data:"):
            assert (tmp_path / link).is_file(), link
    assert not re.search(r"(https?:)?//[a-z]", page.text.replace("// ", ""))
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in paths.plots)


def test_plots_have_axes_with_units_a_legend_and_the_default_as_a_line(filled, tmp_path):
    import base64

    _, page = written([filled], tmp_path)
    svgs = [base64.b64decode(s.partition(",")[2]).decode() for s in page.sources]
    progress = [svg for svg in svgs if "winner: " in svg]
    assert len(progress) == 3
    measured = next(svg for svg in progress if "default: 20 us" in svg)
    for text in ("time (us a call, measured)", "trial (number", "winner: 12.5 us", "failed (2)"):
        assert text in measured
    assert "time the GPU was held (s)" in measured
    others = [svg for svg in svgs if svg not in progress]
    for texts in (
        ("h200 measured", "b200 predicted", "time (us a call"),
        ("toy: measured (2)", "rate reached (TFLOP/s)", "bandwidth: 4,800 GB/s"),
        ("best so far / best (measured)", "one search (of 2)", "time the GPU was held (s)"),
    ):
        assert sum(all(text in svg for text in texts) for svg in others) == 1, texts


def test_every_plot_has_axes_with_units_and_a_legend(filled, h200, b200, tmp_path, monkeypatch):
    from published_data import add_baseline

    drawn = []
    draw = Plot.drawn
    monkeypatch.setattr(Plot, "drawn", lambda plot: (drawn.append(plot), draw(plot))[1])
    for device in (h200, b200):
        add_baseline(filled, ToyProblem(1 << 20), device, 15.0)
    written([filled], tmp_path)
    kinds = {plot.name.partition("-")[0] for plot in drawn}
    assert kinds == {"ratios", "times", "roofline", "searches", "progress"}
    for plot in drawn:
        axes = plot.figure.axes
        legends = [*plot.figure.legends, *filter(None, (a.get_legend() for a in axes))]
        assert any(legend.get_texts() for legend in legends), plot.name
        for panel in axes:
            assert re.search(r"\(.+\)", panel.get_xlabel()), plot.name
            # Beside another panel, its labels are on the one it shares the axis with.
            alone = panel is axes[0] or not panel.get_shared_y_axes().joined(panel, axes[0])
            assert panel.get_ylabel() or not alone, plot.name
        units = r"\((us|TFLOP/s|ratio|number|measured|predicted|provenance)|problem"
        assert re.search(units, axes[0].get_ylabel()), plot.name


def test_hostile_text_stays_text(store, h200, tmp_path):
    evil = '<script>alert(1)</script> & "quotes" $\\frac$ \' {{ 7*7 }}'
    from dataclasses import replace

    device = replace(h200, name=evil)
    searched = Searched(ToyProblem(64, "float32"), device)
    odd = Searched(ToyProblem(64, evil), device)
    trials = [timed(searched, DEFAULT, 9.0), failed(searched, WIDE, "crashed", evil)]
    add_study(store, searched, trials, [DEFAULT])
    add_study(store, odd, [timed(odd, SPLIT, 5.0)], [SPLIT])
    paths, page = written([store], tmp_path / "out")
    assert page.tags.count("script") == 1
    assert "<script>alert" not in page.text
    reasons = {row["reasons"] for row in page.rows["table-failures"]}
    assert reasons == {f"{evil} (1)"}
    assert evil in {row["device"] for row in page.rows["table-devices"]}
    assert {row["reasons"] for row in read_csv(paths, "failures")} == {f"{evil} (1)"}
    assert all(path.parent == tmp_path / "out" / "plots" for path in paths.plots)


def test_an_empty_database_makes_a_page_that_says_so(store, tmp_path):
    paths, page = written([store], tmp_path / "out")
    assert "No trials in the databases given" in " ".join(page.text.split())
    assert page.rows == {}
    assert paths.plots == ()
    assert all(len(path.read_text().splitlines()) == 1 for path in paths.tables)


def test_a_known_sku_without_trials_is_named(filled, tmp_path):
    _, page = written([filled], tmp_path, gpus=["h200", "b300"])
    assert "No trials for b300 in the databases given" in page.text
    assert "table-results-h200" in page.rows
    assert "table-results-b200" not in page.rows
    assert "no problem in common" in page.text


def test_one_sku_has_nothing_to_compare(filled, tmp_path):
    _, page = written([filled], tmp_path, gpus=["h200"])
    assert "One SKU only (h200): nothing to compare" in page.text
    assert "table-comparison" not in page.rows


def test_skus_without_a_common_problem(store, h200, b200, tmp_path):
    for size, device in ((64, h200), (128, b200)):
        searched = Searched(ToyProblem(size), device)
        add_study(store, searched, typical_trials(searched), [SPLIT])
    _, page = written([store], tmp_path / "out")
    assert "h200, b200 have no problem in common" in page.text


def test_a_search_of_failures_only_is_drawn_and_listed(store, h200, tmp_path):
    searched = Searched(ToyProblem(64), h200)
    add_study(store, searched, [failed(searched, DEFAULT, "crashed", "signal 11")])
    paths, page = written([store], tmp_path / "out")
    (row,) = page.rows["table-results-h200"]
    assert (row["state"], row["time_us"]) == ("nothing worked", "-")
    assert [path.name[:13] for path in paths.plots] == ["progress-toy-"]
    assert page.rows["table-failures"][0]["reasons"] == "signal 11 (1)"


def test_a_study_without_trials_is_listed(store, h200, tmp_path):
    add_study(store, Searched(ToyProblem(64), h200), [])
    paths, page = written([store], tmp_path / "out")
    assert page.rows["table-searches"][0]["trials_by_status"] == "no trials"
    assert "No trial has ended yet" in page.text
    assert paths.plots == ()


def test_a_search_superseded_is_listed_but_not_shown(store, h200, tmp_path):
    from tilescout.tuner.records import Toolchain

    for version in ("3.7.1", "3.8.0"):
        searched = Searched(ToyProblem(64), h200, toolchain=Toolchain(triton=version))
        add_study(store, searched, typical_trials(searched), [SPLIT])
    _, page = written([store], tmp_path / "out")
    shown = {row["versions"]: row["is_shown"] for row in page.rows["table-searches"]}
    assert shown == {"triton 3.7.1": "no", "triton 3.8.0": "yes"}
    assert [row["versions"] for row in page.rows["table-results-h200"]] == ["triton 3.8.0"]


def test_rows_that_cannot_be_read_are_named(filled, tmp_path):
    import sqlite3
    from contextlib import closing

    with closing(sqlite3.connect(tmp_path / "first.db")) as connection, connection:
        connection.execute("UPDATE studies SET seed = 'oops' WHERE id = 1")
    with Store.open(tmp_path / "first.db", read_only=True) as store:
        _, page = written([store], tmp_path / "out")
    assert "database 1, study 1:" in page.text
    assert len(page.rows["table-searches"]) == 2


def test_plots_beyond_the_room_of_the_page_are_linked(filled, tmp_path, monkeypatch):
    monkeypatch.setattr(pictures, "MAX_INLINE_BYTES", 1)
    paths, page = written([filled], tmp_path)
    assert page.sources == []
    assert len(paths.plots) == 9
    assert {f"plots/{path.name}" for path in paths.plots} <= set(page.links)


def test_a_plot_of_many_searches_has_some_of_them_and_says_so(filled, tmp_path, monkeypatch):
    from tilescout.tuner.report import progress_plots

    monkeypatch.setattr(progress_plots, "MAX_WAYS", 1)
    _, page = written([filled], tmp_path)
    assert "h200, measured: the way of each of 1 searches to its best, of 2 in all" in page.text
    assert "b200, predicted: the way of each of 1 searches to its best." in page.text


def test_numbers_and_quoted_text_are_written_as_the_csv_module_does(tmp_path):
    import io

    import pandas as pd
    from tilescout.tuner.report.csv_report import _cells

    values = [0.1, 1e-7, None, 12345678.25, 1e22]
    texts = ["plain", 'a "b", c', "", "two\nlines", None]
    for column in (pd.Series(values, dtype="float64"), pd.Series(texts, dtype="object")):
        plain = column.astype(object).where(column.notna(), None)
        expected = io.StringIO()
        csv.writer(expected, lineterminator=";").writerows([value, "."] for value in plain)
        assert ";".join(f"{cell},." for cell in _cells(column)) + ";" == expected.getvalue()


def test_many_trials_do_not_blow_up_a_plot(store, h200, monkeypatch):
    import pandas as pd
    from tilescout.tuner.report import drawing, progress_plots
    from tilescout.tuner.report.frames import build_frames
    from tilescout.tuner.report.searches import load_searches

    searched = Searched(ToyProblem(64), h200)
    add_study(store, searched, typical_trials(searched), [SPLIT])
    searches = load_searches([store], None)
    few = build_frames(searches).progress
    many = pd.concat([few] * 2000, ignore_index=True)
    many = many.assign(number=range(len(many)), best_us=many["best_us"].cummin())
    assert len(progress_plots.progress_plot(searches[0], many).svg()) < 120_000
    monkeypatch.setattr(drawing, "MAX_VECTOR_MARKS", len(many))
    assert len(progress_plots.progress_plot(searches[0], many).svg()) > 500_000


def test_writing_again_replaces_the_page_and_gives_the_same_bytes(filled, tmp_path):
    first, _ = written([filled], tmp_path)
    before = {path: path.read_bytes() for path in (first.index, *first.tables, *first.plots)}
    second, _ = written([filled], tmp_path)
    assert {path: path.read_bytes() for path in before} == before
    assert second == first


def test_no_store_is_refused(tmp_path):
    with pytest.raises(UsageError, match="at least one database"):
        write_report([], tmp_path)


def test_an_unknown_sku_is_refused_before_anything_is_written(filled, tmp_path):
    with pytest.raises(UnknownNameError, match="unknown GPU 'h900'"):
        write_report([filled], tmp_path / "out", gpus=["h900"])
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_made_is_refused(filled, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UsageError, match=r"cannot write the report to .*file"):
        write_report([filled], tmp_path / "file")


def test_matplotlib_is_loaded_late_and_pyplot_never():
    code = (
        "import sys, tilescout.tuner.report as r\n"
        "assert 'matplotlib' not in sys.modules\n"
        "from tilescout.tuner.report.drawing import Plot, new_figure\n"
        "assert Plot('n', 'c', new_figure(2, 2)).png().startswith(b'\\x89PNG')\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_only_so_many_searches_have_a_plot_of_their_own(filled, tmp_path):
    paths, page = written([filled], tmp_path, num_plots=1)
    progress = [path for path in paths.plots if path.name.startswith("progress")]
    assert ["h200-measured" in path.name for path in progress] == [True]
    assert "2 more searches have no plot of their own" in page.text
    for link in page.links:
        assert not link.startswith("#") or link[1:] in page.ids


def test_a_page_of_other_libraries_only(store, h200, b200, tmp_path):
    from published_data import add_baseline

    for device, time_us in ((h200, 20.0), (b200, 10.0)):
        add_baseline(store, ToyProblem(64), device, time_us)
    paths, page = written([store], tmp_path / "out")
    assert "No trials of ours for h200, b200, only times of other libraries" in page.text
    (row,) = page.rows["table-libraries_summary"]
    assert (row["base_sku"], row["sku"], row["geomean_ratio"]) == ("h200", "b200", "2.00x")
    assert {path.stem for path in paths.plots} == {
        "ratios-h200",
        "roofline-h200",
        "roofline-b200",
    }


def test_long_tables_are_cut_and_say_so(filled, tmp_path, monkeypatch):
    from tilescout.tuner.report import html_report

    monkeypatch.setattr(html_report, "MAX_ROWS", 2)
    paths, page = written([filled], tmp_path)
    assert len(page.rows["table-failures"]) == 2 < len(read_csv(paths, "failures"))
    assert "The first 2 of 5 rows." in page.text
