"""Packs the winners of a workload with their compiled binaries for one SKU, and unpacks them.

A bundle is a zip file: a lock, the files of both compilers' caches, and a manifest with a hash of
each. A process that uses one neither tunes nor compiles what the bundle holds. Reading one executes
nothing from it but the kernels.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs

from ..errors import StoreError
from ..kernels.device import DeviceSpec
from .dispatch import find_device, put_in_force
from .explain import LookupResult
from .lock_file import lock_text, parse_lock
from .locked_snapshot import LockedSnapshot
from .locking import resolve_workload
from .precompile import PrecompiledKernel, cache_folders, precompile
from .snapshot import current_toolchain

__all__ = ["UsedBundle", "WrittenBundle", "use_bundle", "write_bundle"]

FORMAT, VERSION = "tilescout-bundle", 1
_MANIFEST, _LOCK = "manifest.json", "lock.json"
_MEMBER = re.compile(r"(triton|tilelang)/([A-Za-z0-9_=-]+)/([A-Za-z0-9_.-]+)")
_TRITON_GROUP = "__grp__"
_KEPT_OF_TRITON = (".cubin", ".json")
"""What a launch needs; intermediate languages are left out."""
_EPOCH = (1980, 1, 1, 0, 0, 0)
"""Of every member: equal contents give equal bundles."""


@dataclass(frozen=True)
class WrittenBundle:
    """A bundle as it was written."""

    path: Path
    lock_id: str
    num_bytes: int
    results: tuple[LookupResult, ...]
    kernels: tuple[PrecompiledKernel, ...]


@dataclass(frozen=True)
class UsedBundle:
    """What a bundle put in place."""

    lock_id: str
    num_installed: int
    """Kernels that were not in the caches before."""
    num_kernels: int


def write_bundle(
    workload: str,
    path: str | Path,
    *,
    gpu: str | DeviceSpec | None = None,
    databases: Sequence[str | Path] | None = None,
    num_workers: int | None = None,
) -> WrittenBundle:
    """Compiles what calls with the problems of a workload reach on a SKU, and packs it.

    Args:
        workload: Name of a workload, or path of a workload file.
        path: File to write; replaced in one step.
        gpu: SKU name or spec; None: the GPU at hand. None need be there.
        databases: Files to lay over the shipped and the user's database.
        num_workers: Processes that compile; None: the cores at hand.

    Raises:
        UnsupportedError: no template serves any of the problems, or a kernel does not compile.
        StoreError: a database cannot be read, or the file cannot be written.
    """
    device = find_device(gpu)
    target = Path(path).expanduser()
    results = resolve_workload(workload, device, databases=databases)
    lock = lock_text(results, device, current_toolchain())
    with tempfile.TemporaryDirectory(prefix="tilescout-bundle-") as scratch:
        folder = Path(scratch)
        kernels = precompile(results, device, folder=folder, num_workers=num_workers)
        members = dict(_compiled_files(folder)) | {_LOCK: lock.encode()}
    try:
        _write(target, members)
    except OSError as error:
        raise StoreError(
            f"bundle {str(target)!r} cannot be written ({error.strerror}): check that its folder "
            "exists and may be written"
        ) from error
    lock_id = parse_lock(lock, target).lock_id
    return WrittenBundle(target, lock_id, target.stat().st_size, results, kernels)


def use_bundle(path: str | Path, *, allow_other_toolchain: bool = False) -> UsedBundle:
    """Puts the binaries into this user's caches and the winners in force, as ``use_lock`` does.

    What is in the caches already is left alone, so any number of processes may use one bundle.

    Args:
        path: The file that ``tilescout bundle`` wrote.
        allow_other_toolchain: Takes the winners although other versions are installed; their
            binaries are of no use then, and calls compile.

    Raises:
        DeviceError: the GPU at hand is not the bundle's SKU.
        StoreError: the file is no bundle, is damaged, or was written with other versions.
    """
    from .environment import current_device

    source = Path(path).expanduser()
    members = _read(source)
    lock = parse_lock(members[_LOCK].decode("utf-8", "replace"), source)
    snapshot = LockedSnapshot(lock, allow_other_toolchain=allow_other_toolchain)
    device = current_device()
    if device is not None:
        snapshot.require_gpu(device)
    entries: dict[tuple[str, str], dict[str, bytes]] = {}
    for member, content in members.items():
        found = _MEMBER.fullmatch(member)
        if found is not None:
            entries.setdefault((found[1], found[2]), {})[found[3]] = content
    try:
        num_installed = sum(_install(*entry, files) for entry, files in entries.items())
    except OSError as error:
        raise StoreError(
            f"bundle {str(source)!r} cannot be unpacked ({error}): the compilers' caches must be "
            "writable; set TRITON_CACHE_DIR and XDG_CACHE_HOME"
        ) from error
    put_in_force(snapshot)
    return UsedBundle(lock.lock_id, num_installed, len(entries))


def _compiled_files(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Names and contents of what the compilers left below a fresh folder."""
    environment = cache_folders(folder)
    triton = Path(environment["TRITON_CACHE_DIR"])
    for file in sorted(triton.glob("*/*")):
        is_group = file.name.startswith(_TRITON_GROUP)
        if file.suffix in _KEPT_OF_TRITON and not is_group and _is_of_a_kernel(file):
            yield f"triton/{file.parent.name}/{file.name}", file.read_bytes()
    tilelang = Path(environment["XDG_CACHE_HOME"]) / "tilescout" / "tilelang"
    for file in sorted(tilelang.glob("*/*")):
        yield f"tilelang/{file.parent.name}/{file.name}", file.read_bytes()


def _is_of_a_kernel(file: Path) -> bool:
    """Whether the folder holds a kernel: Triton also keeps its launcher and driver there."""
    return any(file.parent.glob(f"{_TRITON_GROUP}*")) and any(file.parent.glob("*.cubin"))


def _write(target: Path, members: dict[str, bytes]) -> None:
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "sha256": {name: hashlib.sha256(members[name]).hexdigest() for name in sorted(members)},
    }
    part = target.with_name(f".{target.name}.part")
    with zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED) as archive:
        head = json.dumps(manifest, indent=1, sort_keys=True).encode()
        for name, content in ((_MANIFEST, head), *sorted(members.items())):
            archive.writestr(zipfile.ZipInfo(name, _EPOCH), content, zipfile.ZIP_DEFLATED)
    part.replace(target)


def _read(path: Path) -> dict[str, bytes]:
    """All members but the manifest, each with the hash that the manifest says."""
    try:
        with zipfile.ZipFile(path) as archive:
            contents = {name: archive.read(name) for name in archive.namelist()}
    except OSError as error:
        raise StoreError(
            f"bundle {str(path)!r} cannot be read ({error}): check the path"
        ) from error
    except (zipfile.BadZipFile, zipfile.LargeZipFile, NotImplementedError) as error:
        raise _damaged(path, str(error)) from error
    manifest = _manifest(path, contents.pop(_MANIFEST, b""))
    hashes = manifest.get("sha256")
    if not isinstance(hashes, dict) or set(hashes) != set(contents) or _LOCK not in contents:
        raise _damaged(path, "its members are not those that its manifest lists")
    for name, content in contents.items():
        if name != _LOCK and _MEMBER.fullmatch(name) is None:
            raise _damaged(path, f"a member named {name!r}")
        if hashlib.sha256(content).hexdigest() != hashes[name]:
            raise _damaged(path, f"{name} does not have the hash that its manifest says")
    return contents


def _manifest(path: Path, text: bytes) -> dict[str, Any]:
    try:
        manifest = json.loads(text)
    except ValueError:
        manifest = None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise StoreError(f"{str(path)!r} is no bundle: write one with `tilescout bundle`")
    if manifest.get("version") != VERSION:
        raise StoreError(
            f"bundle {str(path)!r} has version {manifest.get('version')!r}, this Tilescout reads "
            f"{VERSION}: write it again with `tilescout bundle`"
        )
    return manifest


def _damaged(path: Path, reason: str) -> StoreError:
    return StoreError(
        f"bundle {str(path)!r} is damaged ({reason}): copy it again, or write it again with "
        "`tilescout bundle`"
    )


def _install(kind: str, key: str, files: dict[str, bytes]) -> bool:
    """Puts one kernel into its compiler's cache; False where it is there."""
    if kind == "tilelang":
        folder = platformdirs.user_cache_path("tilescout") / "tilelang" / key
        last = "facts.json"
    else:
        import triton

        folder = Path(triton.knobs.cache.dir) / key
        (metadata,) = (name for name in files if name.endswith(".json"))
        # Triton names the files of a kernel by their full paths, in a file that it looks for first.
        last = f"{_TRITON_GROUP}{metadata}"
        paths = {name: str(folder / name) for name in files}
        files = {**files, last: json.dumps({"child_paths": paths}).encode()}
    if (folder / last).exists():
        return False
    folder.mkdir(parents=True, exist_ok=True)
    for name in sorted(files, key=lambda name: name == last):
        handle, part = tempfile.mkstemp(prefix=f".{name}.", dir=folder)
        with os.fdopen(handle, "wb") as file:
            file.write(files[name])
        Path(part).chmod(0o755 if name.endswith(".so") else 0o644)
        Path(part).replace(folder / name)
    return True
