"""The covering run: sizes of its sample, its jobs in the interpreter, and how it is resumed."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from tilescout.kernels.base import Config
from tilescout.kernels.paged_decode import PagedDecodeProblem

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def covering(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return import_module("covering")


@pytest.fixture
def jobs(covering):
    return import_module("covering_jobs")


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, FOLDER / "covering.py", *map(str, arguments)],
        capture_output=True,
        check=False,
        text=True,
        timeout=280,
    )


@pytest.mark.slow
def test_the_sample_has_a_thousand_configs_two_hundred_of_them_tilelang() -> None:
    ended = run("--dry-run")
    assert ended.returncode == 0, ended.stderr
    sizes = {"triton": 0, "tilelang": 0}
    for line in ended.stderr.splitlines():
        words = line[26:].split()
        assert int(words[1]) >= int(words[5])  # the pairs of every space that is sampled
        sizes[words[0].split("_")[0]] += int(words[1])
    assert sizes["triton"] + sizes["tilelang"] >= 1000
    assert sizes["tilelang"] >= 200
    assert ended.stdout == f"{sum(sizes.values())} configs\n"


CONFIG = Config.of(
    "triton",
    {
        "block_n": 32,
        "block_m": 4,
        "num_warps": 4,
        "num_stages": 2,
        "prefetch_pages": True,
        "swap_ab": False,
        "kv_eviction": "evict_normal",
        "split_rule": "size",
        "split_tokens": 64,
        "merge": "last_block",
    },
)


@pytest.mark.interpreter
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="set TRITON_INTERPRET=1")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_right_config_is_ok_and_a_wrong_kernel_is_not(jobs, monkeypatch) -> None:
    import interpreter_shim
    from tilescout.kernels.paged_decode import triton_launcher

    interpreter_shim.install()
    problem = PagedDecodeProblem(jobs.BATCH, 96, 4, 1, 64, 16, "float16")
    assert jobs.check_config(problem, CONFIG, "cpu") == ("ok", "")
    launch = triton_launcher.PagedDecodeTritonLauncher.launch

    def zeros(self, inputs, outputs) -> None:
        launch(self, inputs, outputs)
        outputs.out.zero_()

    monkeypatch.setattr(triton_launcher.PagedDecodeTritonLauncher, "launch", zeros)
    status, reason = jobs.check_config(problem, CONFIG, "cpu")
    assert status == "incorrect"
    assert "RMS" in reason
    assert "(full)" in reason


def test_results_of_other_configs_or_sources_are_not_taken_over(
    covering, tmp_path, monkeypatch
) -> None:
    items = [covering.Item("llama", CONFIG), covering.Item("fp8, window", CONFIG)]
    other = covering.Item("llama", CONFIG.replace(block_n=64))
    path = tmp_path / "covering.json"
    results = [
        covering.Result(item.key, item.family, "triton", CONFIG.as_dict(), "ok", "")
        for item in (items[0], other)
    ]
    covering.write_results(path, import_module("devices").H200, results, 3)
    assert covering.earlier_results(path, items) == [results[0]]
    assert covering.earlier_results(tmp_path / "none.json", items) == []
    monkeypatch.setattr(covering.Item, "key", property(lambda self: "another source"))
    assert covering.earlier_results(path, items) == []


def test_counts_name_every_status_and_the_faults(covering, capsys) -> None:
    rows = [("ok", ""), ("ok", ""), ("out_of_resources", "smem"), ("incorrect", "RMS 1 (full)")]
    covering.print_counts(
        [
            covering.Result("k", "llama", "triton", {"block_n": 32}, status, reason)
            for status, reason in rows
        ],
        5,
    )
    printed = capsys.readouterr().out
    assert "4 of 5 configs, 2 ok" in printed
    assert "incorrect triton [llama] block_n=32: RMS 1 (full)" in printed
    assert printed.split("\n")[0].split() == [
        "template",
        "ok",
        "incorrect",
        "out_of_resources",
        "all",
    ]
