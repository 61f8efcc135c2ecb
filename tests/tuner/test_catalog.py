"""GPUs, workloads and budgets: what ships is complete, and a wrong file says what is wrong."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
from tilescout.errors import UnknownNameError, UsageError
from tilescout.kernels.device import DeviceSpec
from tilescout.tuner import catalog

SKUS = ("b200", "b300", "gb200", "h100", "h200", "rtx5090", "rtxpro6000")
FIGURES = {f.name for f in fields(DeviceSpec)} - {
    "sku",
    "name",
    "architecture",
    "aliases",
    "sources",
}


def test_gpu_names_are_the_seven_skus():
    assert catalog.gpu_names() == SKUS


@pytest.mark.parametrize("sku", SKUS)
def test_every_figure_has_a_source_and_a_sane_value(sku):
    spec = catalog.gpu(sku)
    assert spec.sku == sku
    assert set(spec.sources) == FIGURES
    assert all(len(text) > 20 for text in spec.sources.values())
    assert spec.smem_per_block_bytes == spec.smem_per_sm_bytes - 1024
    assert spec.registers_per_sm == 65536
    assert {"bfloat16", "float16", "float8_e4m3fn", "float32"} <= set(spec.peak_tflops)
    assert ("float4_e2m1fn_x2" in spec.peak_tflops) == (spec.architecture == "blackwell")
    # An FP32 fused multiply-add a lane and clock, on 128 lanes: the data sheet's figure to 4%.
    lanes_tflops = 2 * 128 * spec.num_sms * spec.clock_mhz * 1e-6
    assert spec.peak_tflops["float32"] == pytest.approx(lanes_tflops, rel=0.04)


@pytest.mark.parametrize(
    ("spelling", "sku"),
    [
        ("H200", "h200"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA GeForce RTX 5090", "rtx5090"),
        ("RTX-5090", "rtx5090"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtxpro6000"),
        ("NVIDIA B300 SXM6 AC", "b300"),
    ],
)
def test_gpu_answers_to_the_names_that_drivers_and_tables_print(spelling, sku):
    assert catalog.gpu(spelling).sku == sku


def test_no_two_skus_share_a_spelling():
    spellings = [
        {catalog._spelling(name) for name in (spec.sku, spec.name, *spec.aliases)}
        for spec in map(catalog.gpu, SKUS)
    ]
    assert sum(map(len, spellings)) == len(set().union(*spellings))


def test_unknown_gpu_lists_the_skus():
    with pytest.raises(UnknownNameError, match=r"unknown GPU .mi300x.: known are b200, b300"):
        catalog.gpu("mi300x")


@pytest.mark.parametrize("sku", SKUS)
def test_match_gpu_finds_each_sku_by_its_own_values_whatever_the_name(sku):
    spec = catalog.gpu(sku)
    for name in (spec.name, "NVIDIA Engineering Sample"):
        found = catalog.match_gpu(
            name,
            compute_capability=spec.compute_capability,
            num_sms=spec.num_sms,
            memory_bytes=round(0.96 * spec.memory_bytes),
        )
        assert found is spec


@pytest.mark.parametrize(
    "change",
    [
        {"num_sms": 114},
        {"compute_capability": (9, 1)},
        {"memory_bytes": 97871 * 2**20},
    ],
    ids=["H100 PCIe has fewer SMs", "another architecture", "GH200 has 96 GB"],
)
def test_match_gpu_refuses_a_device_that_performs_otherwise(change):
    spec = catalog.gpu("h100")
    facts = {
        "compute_capability": spec.compute_capability,
        "num_sms": spec.num_sms,
        "memory_bytes": spec.memory_bytes,
    }
    assert catalog.match_gpu("NVIDIA H100", **facts) is spec
    assert catalog.match_gpu("NVIDIA H100", **{**facts, **change}) is None


@pytest.mark.parametrize("name", catalog.workload_names())
def test_shipped_workloads_are_valid_and_name_their_source(name):
    found = catalog.workload(name)
    assert found.name == name
    assert found.description
    assert found.source
    assert all(entry.weight > 0 for entry in found.problems)


def test_measured_grid_is_the_twelve_cells():
    problems = [entry.problem.as_dict() for entry in catalog.workload("paged_decode_grid").problems]
    assert {(p.pop("batch"), p.pop("kv_len")) for p in problems} == {
        (batch, kv_len) for batch in (1, 16, 64, 128) for kv_len in (1024, 8192, 32768)
    }
    assert len(problems) == 12
    for problem in problems:
        assert problem["num_qo_heads"] == 32
        assert problem["num_kv_heads"] == 8
        assert problem["head_dim"] == 128
        assert problem["page_size"] == 16
        assert problem["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("name", "heads"),
    [
        ("llama_3_1_8b", [(32, 8), (16, 4), (8, 2), (4, 1)]),
        ("llama_3_1_70b", [(64, 8), (32, 4), (16, 2), (8, 1)]),
        ("qwen3_8b", [(32, 8), (16, 4), (8, 2), (4, 1)]),
        ("qwen3_30b_a3b", [(32, 4), (16, 2), (8, 1), (4, 1)]),
    ],
)
def test_model_workloads_split_their_heads_over_the_ranks(name, heads):
    by_rank: dict[str, set[tuple[int, int]]] = {}
    for entry in catalog.workload(name).problems:
        problem = entry.problem.as_dict()
        rank = entry.label.split()[1]
        by_rank.setdefault(rank, set()).add((problem["num_qo_heads"], problem["num_kv_heads"]))
    assert by_rank == {
        f"tp{ranks}": {pair} for ranks, pair in zip((1, 2, 4, 8), heads, strict=True)
    }


def test_quickstart_is_small_and_part_of_the_grid():
    grid = {entry.problem for entry in catalog.workload("paged_decode_grid").problems}
    quick = [entry.problem for entry in catalog.workload("quickstart").problems]
    assert 1 <= len(quick) <= 2
    assert grid.issuperset(quick)
    assert catalog.first_problem("paged_decode") == quick[0]


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_lists_and_weights_multiply_out(toy, tmp_path):
    path = write(
        tmp_path,
        """
        name = "mine"
        [defaults]
        op = "toy"
        dtype = "float32"
        [[problems]]
        label = "n{size}"
        size = [16, 32]
        weights.size = [3, 1]
        weight = 0.5
        [[problems]]
        label = "big"
        size = 4096
        """,
    )
    found = [
        (entry.label, entry.problem, entry.weight) for entry in catalog.workload(path).problems
    ]
    assert found == [
        ("n16", toy.ToyProblem(16), 1.5),
        ("n32", toy.ToyProblem(32), 0.5),
        ("big", toy.ToyProblem(4096), 1.0),
    ]


ENTRY = 'name = "mine"\n[[problems]]\nop = "toy"\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name = ", "is not valid TOML"),
        ('name = "mine"', "no problems"),
        ('[[problems]]\nop = "toy"\nlabel = "a"', "name is missing"),
        ("name = 3", "name=3 must be text"),
        ('nmae = "mine"', "'nmae': known are defaults, description, name, problems, source"),
        ('name = "mine"\nproblems = [4]', "problem entry 1: 4 must be"),
        (ENTRY + "size = 4", "problem entry 1: label is missing"),
        (ENTRY + 'label = " "\nsize = 4', "label=' ' must be text that is not empty"),
        (ENTRY + 'label = "a"\nsize = "many"', "problem entry 1: size='many' of a toy problem"),
        (ENTRY + 'label = "a"\nsize = 0', "problem entry 1: size=0 of a toy problem"),
        (ENTRY + 'label = "a"\nsize = []', r"problem entry 1: size=\[\] must hold"),
        (ENTRY + 'label = "a"', "problem entry 1: a toy problem needs size"),
        (
            ENTRY + 'label = "a"\nsze = 4',
            "field of toy in .*mine.toml, problem entry 1 'sze': known are dtype, size",
        ),
        (ENTRY + 'label = "a"\nsize = [4, 8]', "label 'a' is already used by .*problem entry 1"),
        (ENTRY + 'label = "{siz}"\nsize = 4', "label='{siz}' may only name size in braces"),
        (ENTRY + 'label = "a"\nsize = 4\nweight = -1', "weight=-1 must be a positive number"),
        (
            ENTRY + 'label = "{size}"\nsize = [4, 8]\nweights.size = [1]',
            r"weights.size=\[1\] must be a list of 2",
        ),
        (
            ENTRY + 'label = "a"\nsize = 4\nweights.dtype = [1]',
            "weights.dtype has no list dtype",
        ),
        (ENTRY + 'label = "a"\nsize = 4\nweights = 2', "weights=2 must be a table"),
        ('name = "mine"\n[[problems]]\nop = "nop"\nlabel = "a"', "unknown operation 'nop'"),
    ],
)
@pytest.mark.usefixtures("toy")
def test_a_wrong_workload_file_says_where_and_what(tmp_path, text, message):
    with pytest.raises(UsageError, match=message):
        catalog.workload(write(tmp_path, text))


def test_a_missing_file_and_an_unknown_name_differ(tmp_path):
    with pytest.raises(UsageError, match=r"cannot be read: .*No such file"):
        catalog.workload(str(tmp_path / "gone.toml"))
    with pytest.raises(UnknownNameError, match=r"unknown workload .nope.: known are .*quickstart"):
        catalog.workload("nope")
    with pytest.raises(UsageError, match="cannot be read"):
        catalog.workload(str(tmp_path) + "/x/../y.toml")


@pytest.mark.usefixtures("toy")
def test_first_problem_of_an_operation_without_workload():
    with pytest.raises(UsageError, match="no workload has a problem of 'toy'"):
        catalog.first_problem("toy")
    with pytest.raises(UnknownNameError, match="unknown operation 'nop'"):
        catalog.first_problem("nop")


def test_budgets_grow_and_name_themselves():
    quick, full = catalog.budget("quick"), catalog.budget("full")
    assert catalog.budget_names() == ("full", "quick")
    assert quick.num_trials < full.num_trials
    assert 2 <= quick.num_finalists <= full.num_finalists
    with pytest.raises(UnknownNameError, match="unknown budget 'huge': known are full, quick"):
        catalog.budget("huge")
