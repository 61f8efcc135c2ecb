"""The compile pool over real processes: every fate of a compile is a status with a reason."""

from __future__ import annotations

import re

import pytest
from tilescout.errors import DeviceError
from tilescout.kernels.base import CompiledBinary, Config
from tilescout.tuner.compile_pool import CompilePool, compile_config, short_reason
from tilescout.tuner.records import TrialStatus


@pytest.fixture(scope="module")
def pool():
    with CompilePool(1, timeout_s=3.0) as workers:
        yield workers


def toy_config(behaviour: str) -> Config:
    values = {"block_n": 16, "num_stages": 2, "split_rule": "none", "behaviour": behaviour}
    return Config.of("triton", values)


def compile_toy(pool, toy, behaviour):
    problem = toy.ToyProblem(size=64)
    return pool.submit("toy", toy.MODULE, "triton", problem, toy_config(behaviour), 90)


def test_compiled_config_has_facts_of_each_kernel(pool, toy):
    result = compile_toy(pool, toy, "ok").result()
    assert result.status is TrialStatus.OK
    assert result.reason == ""
    assert [(f.kernel, f.smem_bytes, f.threads_per_block) for f in result.facts] == [
        ("toy_kernel", 2048, 128)
    ]


@pytest.mark.parametrize(
    ("behaviour", "status", "reason"),
    [
        ("compile_error", TrialStatus.COMPILE_ERROR, "RuntimeError: toy compiler: no such instr"),
        ("compile_crash", TrialStatus.CRASHED, "exit code 11"),
        ("compile_hang", TrialStatus.TIMEOUT, "compiling took longer than 3 s"),
    ],
)
def test_failure_costs_one_config(pool, toy, behaviour, status, reason):
    failing = compile_toy(pool, toy, behaviour)
    after = compile_toy(pool, toy, "ok")
    result = failing.result()
    assert result.status is status
    assert reason in result.reason
    assert len(result.reason) <= 200
    assert result.facts == ()
    assert result.compile_s >= 0
    assert after.result().status is TrialStatus.OK


def test_a_compiler_that_eats_memory_is_killed(toy):
    with CompilePool(1, timeout_s=60.0, memory_limit_bytes=2**30) as pool:
        eaten = compile_toy(pool, toy, "compile_eat_memory").result()
        assert compile_toy(pool, toy, "ok").result().status is TrialStatus.OK
    assert eaten.status is TrialStatus.OUT_OF_RESOURCES
    assert re.fullmatch(r"compiling took 1\.\d GiB of memory, above 1\.0 GiB", eaten.reason)
    assert eaten.facts == ()


def test_fault_that_is_not_the_configs_surfaces(pool, toy):
    future = pool.submit("toy2", "no_such_module", "triton", None, toy_config("ok"), 90)
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        future.result()


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RuntimeError("out of resource: shared memory, Required: 1, Hardware limit: 0"), "out"),
        (RuntimeError("ptxas error   : Entry function 'k' uses too much shared data"), "out"),
        (RuntimeError("Tensor memory: required 640, exceeds tensor memory of 512"), "out"),
        (AssertionError(), "compile"),
    ],
    ids=["triton", "ptxas", "tensor-memory", "assertion"],
)
def test_out_of_resources_is_told_from_an_error(toy, monkeypatch, error, status):
    def fail(self, arch):
        raise error

    monkeypatch.setattr(toy.ToySpec, "compile", fail)
    problem = toy.ToyProblem(size=64)
    result = compile_config("toy", toy.MODULE, "triton", problem, toy_config("ok"), 90)
    expected = {"out": TrialStatus.OUT_OF_RESOURCES, "compile": TrialStatus.COMPILE_ERROR}
    assert result.status is expected[status]
    assert result.reason


def test_missing_cuobjdump_is_no_fault_of_the_config(toy, monkeypatch):
    def fail(binary):
        raise DeviceError("cuobjdump is missing")

    monkeypatch.setattr("tilescout.tuner.compile_pool.read_facts", fail)
    with pytest.raises(DeviceError):
        compile_config("toy", toy.MODULE, "triton", toy.ToyProblem(size=64), toy_config("ok"), 90)


def test_reason_is_the_line_that_says_most():
    text = (
        "PTXAS error: `ptxas` failed with error code 255\n"
        "`ptxas` stderr:\nptxas /tmp/x.ptx, line 9; error   : Unknown symbol 'foo'\n"
        "Repro command: ptxas --gpu-name=sm_90a\n"
    )
    reason = short_reason(RuntimeError(text))
    assert reason.startswith("RuntimeError: ")
    assert "error" in reason
    assert "\n" not in reason
    assert len(short_reason(RuntimeError("x" * 1000))) == 200
    assert short_reason(AssertionError()) == "AssertionError"


def test_digest_is_of_code_and_resources(toy, monkeypatch):
    made = {"a": (b"code", 128), "b": (b"code", 128), "c": (b"code", 256), "d": (b"", 128)}

    def compile_made(self, arch):
        cubin, threads = made[self.config["behaviour"]]
        return CompiledBinary(self.name, cubin, threads, 0, 0)

    monkeypatch.setattr(toy.ToySpec, "compile", compile_made)
    monkeypatch.setattr("tilescout.tuner.compile_pool.read_facts", lambda binary: None)
    problem = toy.ToyProblem(size=64)
    digests = {
        name: compile_config("toy", toy.MODULE, "triton", problem, toy_config(name), 90).digest
        for name in made
    }
    assert digests["a"] == digests["b"] != digests["c"]
    assert digests["d"] is None
