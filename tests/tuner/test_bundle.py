"""A bundle holds winners and binaries: a fresh cache then needs no compiler; damage is loud."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import tilescout
from tilescout.errors import DeviceError, StoreError
from tilescout.kernels.device import DeviceSpec
from tilescout.tuner import bundle, catalog, dispatch, environment, locked_snapshot
from tilescout.tuner.records import Toolchain

WORKLOAD = """
name = "small"
description = "One small problem."
source = "made up"

[[problems]]
op = "paged_decode"
label = "small"
batch = 2
kv_len = 100
num_qo_heads = 4
num_kv_heads = 2
head_dim = 64
page_size = 16
dtype = "bfloat16"
"""
FRESH = """
import sys
import triton, tilescout
from triton.compiler import ASTSource
from triton.backends.nvidia.compiler import CUDABackend

def forbidden(*args, **kwargs):
    raise AssertionError("a compiler was called")

ASTSource.make_ir = CUDABackend.add_stages = forbidden
from tilescout.tuner.dispatch import find_device, current_snapshot
from tilescout.tuner.reach import reached_specs
from tilescout.kernels.paged_decode import PagedDecodeProblem

if sys.argv[1] != "none":
    used = tilescout.use_bundle(sys.argv[1])
    print(used.num_installed, used.num_kernels)
problem = PagedDecodeProblem(2, 128, 4, 2, 64, 16, "bfloat16", lengths="mixed")
result = current_snapshot().lookup(problem, find_device("h200"))
print(result.notes[0])
for spec in reached_specs(result):
    print(spec.name, len(spec.compile(90).cubin) > 1000)
"""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> bundle.WrittenBundle:
    folder = tmp_path_factory.mktemp("bundle")
    workload = folder / "small.toml"
    workload.write_text(WORKLOAD)
    dispatch.refresh()
    return bundle.write_bundle(str(workload), folder / "small.zip", gpu="h200", num_workers=2)


@pytest.fixture(autouse=True)
def _nothing_in_force(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    yield
    dispatch.use_lock(None)
    dispatch.refresh()


def fresh(argument: object, folder: Path) -> subprocess.CompletedProcess[str]:
    caches = {"TRITON_CACHE_DIR": str(folder / "t"), "XDG_CACHE_HOME": str(folder / "x")}
    return subprocess.run(
        [sys.executable, "-c", FRESH, str(argument)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **caches},
    )


@pytest.mark.slow
def test_a_fresh_process_compiles_nothing(written: bundle.WrittenBundle, tmp_path: Path) -> None:
    without = fresh("none", tmp_path / "without")
    assert "a compiler was called" in without.stderr
    first = fresh(written.path, tmp_path / "with")
    assert first.returncode == 0, first.stderr
    head, note, *kernels = first.stdout.strip().splitlines()
    assert head == f"{len(written.kernels)} {len(written.kernels)}"
    assert note == f"pinned by lock {written.lock_id}"
    assert len(kernels) >= 4
    assert all(line.endswith("True") for line in kernels)
    # The next process finds everything there.
    again = fresh(written.path, tmp_path / "with")
    assert again.stdout.splitlines()[0] == f"0 {len(written.kernels)}"


@pytest.mark.slow
def test_a_bundle_holds_the_bucket_of_calls_and_both_kinds_of_tables(
    written: bundle.WrittenBundle,
) -> None:
    problems = [result.problem for result in written.results]
    assert (problems[0].kv_len, problems[0].lengths) == (100, "equal")
    assert (128, "mixed") in [(p.kv_len, p.lengths) for p in problems]
    with zipfile.ZipFile(written.path) as archive:
        names = archive.namelist()
        manifest = json.loads(archive.read("manifest.json"))
    assert manifest["format"] == "tilescout-bundle"
    assert not [n for n in names if n.endswith((".ptx", ".ttir", ".llir", ".source"))]
    assert len([n for n in names if n.endswith(".cubin")]) == len(written.kernels)


@pytest.mark.slow
def test_another_gpu_at_hand_is_refused(
    written: bundle.WrittenBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "current_device", lambda: catalog.gpu("b200"))
    with pytest.raises(DeviceError, match=r"is for h200 .* this is b200"):
        tilescout.use_bundle(written.path)
    h200: DeviceSpec = replace(catalog.gpu("h200"), name="NVIDIA H200")
    monkeypatch.setattr(environment, "current_device", lambda: h200)
    assert tilescout.use_bundle(written.path).num_installed == len(written.kernels)


@pytest.mark.slow
def test_other_versions_are_refused(
    written: bundle.WrittenBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locked_snapshot, "current_toolchain", lambda: Toolchain(triton="9.9"))
    with pytest.raises(StoreError, match="written with triton"):
        tilescout.use_bundle(written.path)


def rewritten(source: Path, target: Path, change) -> Path:
    with zipfile.ZipFile(source) as old:
        members = {name: old.read(name) for name in old.namelist()}
    members = change(members)
    with zipfile.ZipFile(target, "w") as new:
        for name, content in members.items():
            new.writestr(name, content)
    return target


def a_cubin(members: dict[str, bytes]) -> str:
    return next(name for name in members if name.endswith(".cubin"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: m | {a_cubin(m): b"x"}, r"cubin does not have the hash"),
        (lambda m: m | {"../evil.py": b""}, "members are not those"),
        (lambda m: {k: v for k, v in m.items() if k != "lock.json"}, "members are not those"),
        (lambda m: {k: v for k, v in m.items() if k != "manifest.json"}, "is no bundle"),
        (lambda m: m | {"manifest.json": b'{"format": "tilescout-bundle"}'}, "has version None"),
    ],
    ids=["cubin", "stray member", "no lock", "no manifest", "version"],
)
def test_a_damaged_bundle_installs_nothing(
    written: bundle.WrittenBundle, tmp_path: Path, change, reason: str
) -> None:
    damaged = rewritten(written.path, tmp_path / "damaged.zip", change)
    with pytest.raises(StoreError, match=reason):
        tilescout.use_bundle(damaged)
    assert not (tmp_path / "triton").exists()


def test_what_is_no_bundle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.zip"
    with pytest.raises(StoreError, match="cannot be read"):
        tilescout.use_bundle(path)
    path.write_bytes(b"PK")
    with pytest.raises(StoreError, match="is damaged"):
        tilescout.use_bundle(path)
