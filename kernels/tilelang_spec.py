"""One specialised TileLang kernel: cross-compiled for any architecture, or loaded to be launched.

The counterpart of ``triton_spec``. A program factory, its parameters and the compiler's options
name the kernel. What they compile to, a cubin and a small library that launches it, is kept on
disk: a kernel known there needs no tracing and, to be judged, not even TileLang. Shapes and strides
are run-time arguments of the program and no part of the key.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import platformdirs

from ..errors import DeviceError
from .base import CompiledBinary
from .source_hash import source_hash

__all__ = ["BoundTileLangKernel", "TileLangKernelSpec", "lowered"]

_CACHE_VERSION = 2

_PASS_CONFIGS = {
    # Programs keep to their bounds; checks of every access would stand between load and use.
    "tl.disable_safe_memory_legalize": True,
    # On sm_100 and later 0.1.15 leaves packed sums undefined where a reduction is batched.
    "tl.enable_fp32x2_reduction": False,
}
_NVCC_OPTIONS = {
    "tl.enable_fast_math",
    "tl.ptxas_register_usage_level",
    "tl.device_compile_flags",
}
"""Pass configs that are flags of nvcc, which ``_cubin_of`` does not take."""
# Of the ELF format, elf(5); NVIDIA's machine is EM_CUDA.
_ELF_MAGIC = b"\x7fELF"
_ELF_MACHINE_AT = 18
_ELF_MACHINE_CUDA = 190
_ELF_SECTION_WITHOUT_BYTES = 8

_CUBIN, _LIBRARY, _FACTS = "kernel.cubin", "launch.so", "facts.json"


@dataclass(frozen=True)
class TileLangKernelSpec:
    """What TileLang needs for one kernel. Picklable: the program's factory goes by name."""

    module: str
    """Module that holds the factory."""
    factory: str
    """Name of the function that takes ``arch`` and ``parameters`` and returns a ``T.prim_func``."""
    program: str
    """Name of that ``T.prim_func``."""
    parameters: Mapping[str, Any] = field(hash=False)
    """Compile-time arguments of the factory."""
    sources: tuple[str, ...] = ()
    """Further modules whose code shapes the kernel."""
    pass_configs: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """TileLang's ``PassConfigKey`` values by name, e.g. ``tl.disable_wgmma``."""

    @property
    def name(self) -> str:
        """Name that TileLang gives the program's device function."""
        return f"{self.program}_kernel"

    def compile(self, arch: int) -> CompiledBinary:
        """Compiles for ``arch`` (90, 100, ...); a second call reads the disk.

        Only a call that compiles imports TileLang, and torch with it.

        Raises:
            DeviceError: there is no nvcc.
        """
        folder = self._compiled(arch)
        facts = json.loads((folder / _FACTS).read_text())
        return CompiledBinary(cubin=(folder / _CUBIN).read_bytes(), tmem_columns=0, **facts)

    def bind(self, arch: int) -> BoundTileLangKernel:
        """The kernel ready to launch on the current device, which is of ``arch``."""
        library = self._compiled(arch) / _LIBRARY
        import tilelang  # noqa: F401  (puts its own tvm on the path, and registers the runtime)
        import tvm

        module = tvm.runtime.load_module(str(library))
        return BoundTileLangKernel(module[self.program])

    def _compiled(self, arch: int) -> Path:
        """The folder of this kernel, filled."""
        folder = _cache_folder() / self._digest(arch)
        if not (folder / _FACTS).exists():
            folder.parent.mkdir(parents=True, exist_ok=True)
            # Configs share kernels, above all the merge: the first process compiles, others wait.
            with _locked(folder.with_suffix(".lock")):
                if not (folder / _FACTS).exists():
                    self._fill(folder, arch)
        return folder

    def _digest(self, arch: int) -> str:
        parts = (
            _CACHE_VERSION,
            source_hash((self.module, *self.sources)),
            self.factory,
            self.program,
            sorted(self.parameters.items()),
            sorted({**_PASS_CONFIGS, **self.pass_configs}.items()),
            arch,
            _toolchain(),
        )
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def _fill(self, folder: Path, arch: int) -> None:
        """Compiles into a folder beside ``folder`` and moves it there in one step."""
        part = Path(tempfile.mkdtemp(prefix=f"{folder.name[:12]}.", dir=folder.parent))
        try:
            self._compile_into(part, arch)
            # Fails where another process was first, on a file system without locks: its files are
            # as good.
            with suppress(OSError):
                part.rename(folder)
        finally:
            shutil.rmtree(part, ignore_errors=True)
        assert (folder / _FACTS).exists(), f"{folder} has no {_FACTS}"

    def _compile_into(self, folder: Path, arch: int) -> None:
        import tilelang
        import tvm

        if not tilelang.env.CUDA_HOME:
            raise DeviceError(
                "TileLang found no CUDA toolkit, and without its nvcc it compiles nothing; install "
                "the toolkit, set CUDA_HOME, or search Triton's templates alone"
            )
        with _device_compiler(f"sm_{arch}a"):
            artifact = lowered(self, arch, compiles_device_code=True)
        (function,) = artifact.device_mod.functions.values()
        library = folder / _LIBRARY
        tvm.runtime.Executable(artifact.rt_mod).export_library(str(library))
        (folder / _CUBIN).write_bytes(_embedded_cubin(library.read_bytes()))
        symbol = str(function.attrs["global_symbol"])
        assert symbol == self.name, f"the device function is {symbol}, not {self.name}"
        facts = {
            "kernel": symbol,
            "threads_per_block": int(function.attrs["thread_extent"]["threadIdx.x"]),
            "smem_bytes": int(function.attrs.get("dyn_shared_memory_buf", 0)),
        }
        (folder / _FACTS).write_text(json.dumps(facts))


def lowered(spec: TileLangKernelSpec, arch: int, *, compiles_device_code: bool = False) -> Any:
    """What TileLang makes of a program: its CUDA source and host module; needs no nvcc."""
    import tilelang
    import tvm

    program = getattr(import_module(spec.module), spec.factory)(arch=arch, **spec.parameters)
    # The suffix allows what only this architecture has: wgmma, TMA with its own instructions.
    target = tvm.target.Target({"kind": "cuda", "arch": f"sm_{arch}a"})
    options = {**_PASS_CONFIGS, **spec.pass_configs}
    assert not _NVCC_OPTIONS & set(options), f"{options} holds flags of nvcc"
    with tvm.transform.PassContext(opt_level=3, config=options), target:
        return tilelang.lower(
            program,
            target=target,
            enable_host_codegen=True,
            enable_device_compile=compiles_device_code,
        )


@dataclass(frozen=True)
class BoundTileLangKernel:
    """A loaded kernel; call it with the program's arguments, tensors and numbers."""

    function: Callable[..., Any]

    def __call__(self, *args: Any) -> None:
        """Enqueues one launch on the current stream of the tensors' device.

        TVM-FFI converts tensors without a copy and takes the stream from torch; neither allocates
        nor waits, so that a CUDA graph can capture the launch.
        """
        self.function(*args)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Keeps other processes out of the block; best effort, without a file in the end."""
    with path.open("w") as file:
        # Where the file system has no locks, a kernel may be compiled twice.
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            # Who waits for the removed file looks at the folder next, as does who makes a new one.
            path.unlink(missing_ok=True)


@contextmanager
def _device_compiler(arch: str) -> Iterator[None]:
    """Lets TileLang compile device code by ``_cubin_of`` inside the block.

    Its own compiler adds -lineinfo, which leaves the instructions as they are and triples the
    bytes that are then compiled into the library and disassembled. It also keeps every cubin a
    second time, whatever nvcc made it.
    """
    import tvm_ffi

    name = "tilelang_callback_cuda_compile"
    theirs = tvm_ffi.get_global_func(name)
    tvm_ffi.register_global_func(
        name, lambda code, _target, _options=None: _cubin_of(str(code), arch), override=True
    )
    try:
        yield
    finally:
        tvm_ffi.register_global_func(name, theirs, override=True)


def _cubin_of(code: str, arch: str) -> bytearray:
    """What nvcc makes of TileLang's CUDA source, by TileLang's flags but -lineinfo."""
    from tilelang.contrib.cc import get_cplus_compiler
    from tilelang.contrib.nvcc import get_nvcc_compiler
    from tilelang.env import CUTLASS_INCLUDE_DIR, TILELANG_TEMPLATE_PATH

    with tempfile.TemporaryDirectory() as name:
        source, cubin = Path(name, "kernel.cu"), Path(name, _CUBIN)
        source.write_text(code)
        command = [
            *(get_nvcc_compiler(), f"-ccbin={get_cplus_compiler()}", f"-arch={arch}", "--cubin"),
            *("-O3", "-std=c++20", "-w", f"-I{TILELANG_TEMPLATE_PATH}", f"-I{CUTLASS_INCLUDE_DIR}"),
            *("-o", str(cubin), str(source)),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"nvcc failed: {done.stderr or done.stdout}")
        return bytearray(cubin.read_bytes())


def _embedded_cubin(library: bytes) -> bytes:
    """The one CUDA binary in the data of a library; TVM's module would only give it as text."""
    start = library.find(_ELF_MAGIC, 1)
    while start >= 0:
        (machine,) = struct.unpack_from("<H", library, start + _ELF_MACHINE_AT)
        if machine == _ELF_MACHINE_CUDA:
            return library[start : start + _elf_size(library, start)]
        start = library.find(_ELF_MAGIC, start + 1)
    raise AssertionError("TileLang left no CUDA binary in its library")


def _elf_size(data: bytes, start: int) -> int:
    """Bytes from the header of a 64-bit ELF file to the end of what it points at."""
    segments_at, sections_at = struct.unpack_from("<QQ", data, start + 32)
    segment_size, num_segments, section_size, num_sections = struct.unpack_from(
        "<HHHH", data, start + 54
    )
    end: int = max(
        segments_at + segment_size * num_segments, sections_at + section_size * num_sections
    )
    for i in range(num_sections):
        header = start + sections_at + i * section_size
        (kind,) = struct.unpack_from("<I", data, header + 4)
        offset, size = struct.unpack_from("<QQ", data, header + 24)
        if kind != _ELF_SECTION_WITHOUT_BYTES:
            end = max(end, offset + size)
    return end


def _cache_folder() -> Path:
    return platformdirs.user_cache_path("tilescout") / "tilelang"


@cache
def _toolchain() -> tuple[str, ...]:
    """What turns a program into a cubin and a library."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = shutil.which("nvcc", path=f"{home}/bin") if home else shutil.which("nvcc")
    compiler = ""
    if nvcc is not None:
        stat = Path(nvcc).resolve().stat()
        compiler = f"{stat.st_size}.{stat.st_mtime_ns}"
    return (version("tilelang"), version("apache-tvm-ffi"), compiler)
