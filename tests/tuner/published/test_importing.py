from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest
from tilescout.errors import UsageError
from tilescout.tuner.published import import_published
from tilescout.tuner.records import MeasurementPolicy, Provenance
from tilescout.tuner.store import Store, export_json, import_json

HEAD = "gpu,op,shape,library,library_version,mode,us"
PAGED = "batch=1 kv=8192 Hq=32 Hkv=8 D=128 page=16 NHD bf16"
GRAPH = "graph replay; cold L2"
GOOD = f"NVIDIA H200,paged_decode,{PAGED},flashinfer:fa2,0.6.18,{GRAPH},29.58"
OTHER = GOOD.replace("fa2", "xqa").replace("29.58", "20.5")
RTX = GOOD.replace("NVIDIA H200", "NVIDIA RTX PRO 6000 Blackwell Server Edition")
DATE = datetime(2026, 8, 11, tzinfo=UTC)


@pytest.fixture
def store(tmp_path):
    with Store.open(tmp_path / "some.db") as opened:
        yield opened


@pytest.fixture
def table(tmp_path):
    def write(*lines: str, head: str = HEAD) -> Path:
        path = tmp_path / "table.csv"
        path.write_text("\n".join([head, *lines]) + "\n", encoding="utf-8")
        return path

    return write


def add(store: Store, path: Path, **options):
    return import_published(store, path, **{"source": "a paper", "date": DATE, **options})


def trials(store: Store):
    return [t for study in store.baselines() for t in store.trials(study.study_id)]


def test_a_row_becomes_a_baseline_with_its_library_source_and_date(store, table):
    summary = add(store, table(GOOD, OTHER, RTX))
    assert (summary.num_rows, summary.num_added, summary.num_refused) == (3, 3, 0)
    h200, rtx = store.baselines()
    assert (h200.key.device.sku, rtx.key.device.sku) == ("h200", "rtxpro6000")
    assert h200.key.provenance is Provenance.PUBLISHED
    assert str(h200.key.policy) == "cuda_graph/cold_l2"
    assert h200.key.template_hashes == (("baseline", "a paper"),)
    first, second = store.trials(h200.study_id)
    assert first.evaluation.config.as_dict() == {
        "library": "flashinfer",
        "variant": "fa2",
        "version": "0.6.18",
        "conditions": GRAPH,
    }
    assert (first.evaluation.time_us, second.evaluation.time_us) == (29.58, 20.5)
    assert first.created_at == DATE


def test_baselines_are_no_searches_and_never_win(store, table):
    add(store, table(GOOD), provenance=Provenance.MEASURED)
    assert store.studies() == []
    assert store.winners() == []
    (study,) = store.baselines(op="paged_decode", skus=["h200"])
    assert store.baselines(skus=["b200"]) == store.baselines(op="gdn_decode") == []
    evaluation = store.trials(study.study_id)[0].evaluation
    with pytest.raises(UsageError, match="holds baselines"):
        store.decide(study.study_id, [evaluation])


def test_the_same_table_twice_adds_nothing(store, table):
    add(store, table(GOOD, OTHER))
    summary = add(store, table(GOOD, OTHER, RTX))
    assert (summary.num_added, summary.num_present) == (1, 2)
    assert len(trials(store)) == 3


def test_export_and_import_keep_baselines(store, table, tmp_path):
    add(store, table(GOOD, OTHER))
    data = export_json(store)
    with Store.open(tmp_path / "copy.db") as copy:
        import_json(copy, data)
        assert copy.studies() == []
        assert [t.evaluation for t in trials(copy)] == [t.evaluation for t in trials(store)]


def test_rows_that_no_problem_expresses_are_counted_with_their_reason(store, table):
    odd = GOOD.replace("kv=8192", "kv=8192 lengths=uniform 1..kv")
    unknown = GOOD.replace("paged_decode", "matmul")
    gpu = GOOD.replace("NVIDIA H200", "NVIDIA H900")
    summary = add(store, table(GOOD, odd, OTHER, odd.replace("fa2", "xqa"), unknown, gpu))
    assert (summary.num_added, summary.num_refused) == (2, 4)
    first, *rest = summary.refusals
    assert (first.num_rows, first.first_line) == (2, 3)
    assert "drawn at random" in first.reason
    assert {r.first_line for r in rest} == {6, 7}
    assert any("unknown GPU 'NVIDIA H900'" in r.reason for r in rest)


@pytest.mark.parametrize(
    ("mode", "otherwise", "policy"),
    [
        ("CUDA graph, warm L2", None, "cuda_graph/warm_l2"),
        ("eager; cold L2", MeasurementPolicy(), "eager/cold_l2"),
        ("graph replay", MeasurementPolicy(True, False), "cuda_graph/warm_l2"),
        ("", MeasurementPolicy(False, True), "eager/cold_l2"),
        ("graph replay (batch 1 and 4 fit in L2)", None, "cuda_graph/warm_l2"),
        ("graph replay (batch 4 and 16 fit in L2)", None, "cuda_graph/cold_l2"),
    ],
)
def test_the_words_of_a_table_make_the_policy(store, table, mode, otherwise, policy):
    add(store, table(GOOD.replace(GRAPH, f'"{mode}"')), policy=otherwise)
    assert [str(study.key.policy) for study in store.baselines()] == [policy]


def test_rows_that_do_not_say_how_they_were_timed_are_refused(store, table):
    summary = add(store, table(GOOD.replace(GRAPH, "quickly")))
    assert summary.num_added == 0
    assert "give --policy" in summary.refusals[0].reason


BAD = [
    pytest.param([GOOD], HEAD.replace("gpu,", ""), "column 'gpu' is missing", id="no gpu"),
    pytest.param([GOOD], HEAD.replace("us", "time"), "named by its unit", id="no unit"),
    pytest.param([GOOD + ",1"], HEAD + ",ms", "columns us, ms", id="two times"),
    pytest.param([GOOD + ",x"], HEAD + ",gpu", "'gpu' is there twice", id="a column twice"),
    pytest.param([], HEAD, "no rows", id="headings only"),
    pytest.param([GOOD, GOOD[:-5] + "fast"], HEAD, "line 3: us='fast'", id="no number"),
    pytest.param([GOOD[:-5] + "-3"], HEAD, "line 2: us='-3'", id="negative"),
    pytest.param([GOOD[:-5] + "nan"], HEAD, "us='nan'", id="not a number"),
    pytest.param([GOOD[:-5] + "1.2.3"], HEAD, r"us='1\.2\.3'", id="two points"),
    pytest.param([GOOD[:-5]], HEAD, "column 'us' is empty", id="empty time"),
    pytest.param([OTHER, GOOD + ",7"], HEAD, "line 3 has 8 columns", id="a row too long"),
    pytest.param([GOOD, OTHER, GOOD], HEAD, "line 4 repeats line 2", id="a row twice"),
    pytest.param([GOOD[:-5] + "0.02958"], HEAD, "is the unit of the column right", id="ms as us"),
    pytest.param([GOOD[:-5] + "29580"], HEAD, "times as long as the peaks", id="ns as us"),
]


@pytest.mark.parametrize(("lines", "head", "message"), BAD)
def test_a_wrong_table_is_refused_whole(store, table, lines, head, message):
    with pytest.raises(UsageError, match=message):
        add(store, table(*lines, head=head))
    assert store.baselines() == []


def test_another_time_from_the_same_source_is_refused(store, table):
    add(store, table(GOOD))
    with pytest.raises(UsageError, match=r"line 3: 31 us, but the database has 29\.58 us"):
        add(store, table(OTHER, GOOD.replace("29.58", "31")))
    assert len(trials(store)) == 1
    add(store, table(GOOD.replace("29.58", "31")), source="a later paper")
    assert len(trials(store)) == 2


@pytest.mark.parametrize("unit", ["ns", "ms", "s"])
def test_units(store, table, unit):
    factor = {"ns": 1e3, "ms": 1e-3, "s": 1e-6}[unit]
    add(store, table(GOOD.replace("29.58", f"{29.58 * factor:.8g}"), head=HEAD[:-2] + unit))
    assert [t.evaluation.time_us for t in trials(store)] == [29.58]


def test_a_file_that_is_not_there(store, tmp_path):
    with pytest.raises(UsageError, match="check the path"):
        add(store, tmp_path / "none.csv")


def test_a_file_that_is_no_text(store, tmp_path):
    path = tmp_path / "binary.csv"
    path.write_bytes(b"\xff\xfe\x00gpu")
    with pytest.raises(UsageError, match="not UTF-8"):
        add(store, path)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"source": " "}, "where the figures"), ({"provenance": Provenance.PREDICTED}, "'predicted'")],
)
def test_wrong_arguments(store, table, options, message):
    with pytest.raises(UsageError, match=message):
        add(store, table(GOOD), **options)


def test_an_export_with_a_decided_baseline_is_refused(store, table):
    add(store, table(GOOD))
    data = export_json(store)
    (row,) = data["trials"]
    names = ("op", "gpu", "problem", "config", "template", "provenance", "policy", "toolchain")
    said = {name: row[name] for name in (*names, "time_us", "trial_id")}
    winner = {**said, "finals": [row["trial_id"]], "decided_at": "2026-01-01T00:00:00.000Z"}
    with pytest.raises(UsageError, match="a trial of a search, not a baseline"):
        import_json(store, {**data, "winners": [winner]})


def test_a_replay_of_an_export_leaves_baselines_out(store, table):
    from tilescout.tuner.replay.export_file import read_export

    add(store, table(GOOD))
    with pytest.raises(UsageError, match="needs recorded configs"):
        read_export("export", export_json(store))
