"""The covering run: its sample, its jobs in the interpreter, how it ends and how it is resumed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

import pytest
from tilescout.kernels.base import Config
from tilescout.kernels.gdn_decode import GdnDecodeProblem
from tilescout.kernels.paged_decode import PagedDecodeProblem
from tilescout.search_spaces.covering import pairs_of

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def covering(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return import_module("covering")


@pytest.fixture
def jobs(covering):
    return import_module("covering_jobs")


@pytest.fixture
def problems(covering):
    return import_module("covering_problems")


@pytest.fixture
def samples(covering):
    return import_module("covering_sample")


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, FOLDER / "covering.py", *map(str, arguments)],
        capture_output=True,
        check=False,
        text=True,
        timeout=280,
    )


@pytest.mark.slow
@pytest.mark.parametrize("op", ["paged_decode", "gdn_decode"])
def test_a_sample_has_as_many_configs_as_wanted_and_every_pair(samples, op, tmp_path) -> None:
    # The whole of it takes minutes; every space is sampled in the same way.
    wanted = {"triton": 150, "tilelang": 60}
    path = tmp_path / "sample.json"
    counts = [x for backend, n in wanted.items() for x in (f"--{backend}", n)]
    ended = run("--op", op, "--dry-run", "--sample", path, *counts)
    assert ended.returncode == 0, ended.stderr
    groups = samples.load_sample(path, import_module("devices").H200)
    sizes = dict.fromkeys(wanted, 0)
    for group in groups:
        sizes[group.backend] += len(group.configs)
        assert len(set(group.configs)) == len(group.configs)
        covering = group.configs[: group.num_covering]
        pairs = set().union(*map(pairs_of, covering))
        assert len(pairs) == group.num_pairs
    assert all(sizes[backend] >= n for backend, n in wanted.items())
    num_configs, to_check, num_kernels = (int(w) for w in ended.stdout.split() if w.isdigit())
    assert num_configs == to_check == sum(sizes.values())
    assert num_kernels < 2 * num_configs


def test_families_that_are_not_sampled_have_the_default_and_the_seeds(
    covering, samples, problems, tmp_path, capsys
) -> None:
    import devices
    from tilescout.search_spaces.registry import joint_space

    path = tmp_path / "sample.json"
    samples.write_sample(path, samples.sample(["gdn_decode"], devices.H200, {"tilelang": 0}, []))
    groups = samples.load_sample(path, devices.H200)
    assert {group.family for group in groups} == set(problems.FAMILIES["gdn_decode"])
    for group in groups:
        problem = problems.problem_of(group.op, group.family)
        space = joint_space(problem, devices.H200, ["tilelang"]).of("tilelang")
        assert set(group.configs) == {space.default, *space.valid_seeds()}
        assert "the default and the seeds" in str(group)
    covering.print_pairs(covering.pair_counts(groups, []))
    assert capsys.readouterr().out == ""  # they promise no pairs


def test_a_thousand_configs_two_hundred_of_them_tilelang_are_wanted(covering, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["covering.py"])
    arguments = covering.parse_arguments()
    assert arguments.triton + arguments.tilelang >= 1000
    assert arguments.tilelang >= 200


VALUES = {
    "block_n": 32,
    "block_m": 4,
    "num_warps": 4,
    "num_stages": 2,
    "prefetch_pages": True,
    "swap_ab": False,
    "kv_eviction": "evict_normal",
    "launch_pdl": False,
    "split_rule": "size",
    "split_tokens": 128,
    "merge": "last_block",
}
CONFIG = Config.of("triton", VALUES)
GDN_CONFIG = Config.of("triton", {"block_v": 16, "num_warps": 1, "state_eviction": "evict_normal"})
interpreted = [
    pytest.mark.interpreter,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="set TRITON_INTERPRET=1"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


@pytest.mark.parametrize(
    ("problem", "config", "launcher"),
    [
        pytest.param(
            PagedDecodeProblem(6, 96, 4, 1, 64, 16, "float16"),
            CONFIG,
            "paged_decode.triton_launcher:PagedDecodeTritonLauncher",
            id="paged_decode",
            marks=interpreted,
        ),
        pytest.param(
            GdnDecodeProblem(2, 1, 1, 2, 64, 64, "float16"),
            GDN_CONFIG,
            "gdn_decode.triton_template:GdnDecodeTritonLauncher",
            id="gdn_decode",
            marks=interpreted,
        ),
    ],
)
def test_a_right_config_is_ok_and_a_wrong_kernel_is_not(
    jobs, monkeypatch, problem, config, launcher
) -> None:
    import interpreter_shim

    interpreter_shim.install()
    status, reason, seconds = jobs.check_config(problem, config, "cpu")
    assert (status, reason) == ("ok", "")
    assert seconds > 0.0
    module, name = launcher.split(":")
    found = getattr(import_module(f"tilescout.kernels.{module}"), name)
    launch = found.launch
    calls = []

    def zeros_in_the_last_case(self, inputs, outputs) -> None:
        calls.append(inputs)
        launch(self, inputs, outputs)
        if len(calls) > len(jobs.cases(problem, "cpu")):
            outputs.out.zero_()

    monkeypatch.setattr(found, "launch", zeros_in_the_last_case)
    status, reason, _ = jobs.check_config(problem, config, "cpu")
    assert status == "incorrect"
    assert "RMS" in reason or "must be" in reason


def test_every_problem_of_the_grid_finds_its_kernels_compiled(problems, samples) -> None:
    import devices
    from tilescout.kernels.registry import template
    from tilescout.search_spaces.registry import joint_space

    for op, families in problems.FAMILIES.items():
        for family in families:
            problem = problems.problem_of(op, family)
            grid = problems.grid_problems(problem)
            assert problem in grid.values()  # that of the inputs as they are timed
            for config in joint_space(problem, devices.H200).valid_seeds():
                own = samples.Item(op, family, config).specs
                for changed in grid.values():
                    assert template(op, config.template).supports(changed, devices.H200) is None
                    specs = template(op, config.template).kernel_specs(changed, config)
                    assert set(map(samples.kernel_key, specs)) <= set(own)


def test_kernels_are_told_apart_by_all_that_is_compiled_in(samples) -> None:
    item = samples.Item("paged_decode", "llama", CONFIG)
    keys = {
        key
        for config in (CONFIG, CONFIG.replace(split_tokens=512), CONFIG.replace(num_warps=8))
        for key in samples.Item(item.op, item.family, config).specs
    }
    assert len(keys) == 2  # the size of a piece is an argument
    merged = CONFIG.replace(merge="kernel")
    assert len(samples.Item(item.op, item.family, merged).specs) == 2


def test_a_run_ends_at_its_deadline(covering, samples) -> None:
    items = [samples.Item("paged_decode", "llama", CONFIG)]
    start = time.monotonic()
    short = covering.Run(
        import_module("devices").H200, num_compilers=1, num_checkers=1, deadline=start + 0.2
    )
    assert list(short.results(items)) == []
    assert time.monotonic() - start < 30.0


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="compiles")
def test_a_kernel_is_compiled_once_for_all_configs_that_have_it(covering, samples) -> None:
    family = "bf16 state, given gate"
    items = [samples.Item("gdn_decode", family, GDN_CONFIG)] * 2
    items.append(samples.Item("gdn_decode", family, GDN_CONFIG.replace(num_warps=2)))
    compiling = covering.Run(
        import_module("devices").H200,
        num_compilers=1,
        num_checkers=0,
        deadline=time.monotonic() + 300.0,
    )
    results = list(compiling.results(items))
    assert [r.status for r in results] == ["ok"] * 3
    assert compiling.num_kernels == 2
    assert all(r.compile_s > 0.0 for r in results)


def group_of(samples, family: str, *configs: Config, num_covering: int = 1):
    return samples.Group(
        "paged_decode", family, "triton", "fingerprint", num_covering, 55, 0, configs
    )


def test_groups_come_equally_far_wherever_a_run_is_cut(samples) -> None:
    many = [CONFIG.replace(split_tokens=128 << i) for i in range(6)]
    long = group_of(samples, "llama", *many)
    short = group_of(samples, "group 8, page 1", *many[:2])
    order = samples.in_turn([long, short], frozenset())
    assert len(order) == 8
    assert [i.config for i in order if i.family == "llama"] == many
    half = [item.family for item in order[:4]]
    assert half.count("llama") == 3
    done = frozenset(item.key for item in long.items[:4])
    assert len(samples.in_turn([long, short], done)) == 4


def result(covering, family: str, config: Config, status: str = "ok", reason: str = ""):
    item = covering.Item("paged_decode", family, config)
    return covering.Result(
        item.key, "paged_decode", family, "triton", config.as_dict(), status, reason
    )


def test_results_of_other_operations_or_sources_are_not_taken_over(
    covering, samples, tmp_path, monkeypatch
) -> None:
    results = [result(covering, "llama", CONFIG), result(covering, "fp8, window", CONFIG)]
    path = tmp_path / "covering.json"
    group = group_of(samples, "llama", CONFIG)
    covering.write_results(path, import_module("devices").H200, [group], results, num_wanted=3)
    assert covering.earlier_results(path, ["paged_decode"]) == results
    assert covering.earlier_results(path, ["gdn_decode"]) == []
    assert covering.earlier_results(tmp_path / "none.json", ["paged_decode"]) == []
    assert f'"num_pairs_ok": {len(VALUES) * (len(VALUES) - 1) // 2}' in path.read_text()
    monkeypatch.setattr(samples.Item, "key", property(lambda self: "another source"))
    assert covering.earlier_results(path, ["paged_decode"]) == []


def test_a_sample_of_another_space_is_refused(samples, tmp_path) -> None:
    path = tmp_path / "sample.json"
    samples.write_sample(path, [group_of(samples, "llama", CONFIG)])
    with pytest.raises(SystemExit, match="another space of paged_decode/triton"):
        samples.load_sample(path, import_module("devices").H200)


def test_counts_name_every_status_and_the_faults(covering, capsys) -> None:
    rows = [("ok", ""), ("ok", ""), ("out_of_resources", "smem"), ("incorrect", "RMS 1 (full)")]
    covering.print_counts([result(covering, "llama", CONFIG, *row) for row in rows], 5)
    printed = capsys.readouterr().out
    assert "4 of 5 configs, 2 ok" in printed
    assert "incorrect paged_decode/triton [llama] block_m=4 block_n=32" in printed
    assert "RMS 1 (full)" in printed
    assert printed.split("\n")[0].split() == [
        "operation",
        "template",
        "ok",
        "incorrect",
        "out_of_resources",
        "all",
    ]
