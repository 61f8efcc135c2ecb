"""What a launcher passes, through the generated host function of its TileLang program, on the CPU.

The host function checks ranks, shapes, strides, dtypes and pointers of what it is given. It is
compiled as it is generated, but for CPU tensors, and keeps what it would launch the device function
with. So a launcher runs as it does on a GPU, up to the launch.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import tvm_ffi
from tilescout.kernels.tilelang_spec import BoundTileLangKernel, TileLangKernelSpec, lowered
from tvm_ffi import libinfo

__all__ = ["HostFunction", "LauncherOnHost"]

_LAST_INCLUDE = "#include <stdbool.h>\n"
_KEEPING = """
static TVMFFIAny kept[256];
static int32_t num_kept = 0;
static int keep(TVMFFIAny* values, int32_t count) {
  num_kept = count;
  for (int32_t i = 0; i < count; ++i) kept[i] = values[i];
  return 0;
}
int32_t kept_count(void) { return num_kept; }
int32_t kept_kind(int32_t i) { return kept[i].type_index; }
int64_t kept_integer(int32_t i) { return kept[i].v_int64; }
double kept_number(int32_t i) { return kept[i].v_float64; }
#define TVMBackendGetFuncFromEnv(context, name, found) 0
#define TVMFFIFunctionCall(function, values, count, result) keep(values, count)
"""
_CUDA_DEVICE = re.compile(r"== 2(\)+ \{\n)(?=[^}]*device_type mismatch)")
_FLOAT_KIND = 3  # kTVMFFIFloat


@dataclass
class HostFunction:
    """The host function of one program."""

    function: Any
    library: ctypes.CDLL
    names: tuple[str, ...]
    """Of the device function's parameters."""
    launched: dict[str, Any] = field(default_factory=dict)
    """What the last call would have launched with, by these names; a pointer is an address."""

    @classmethod
    def of(cls, spec: TileLangKernelSpec, folder: Path) -> HostFunction:
        """Generates, changes to CPU tensors, and compiles."""
        artifact = lowered(spec, 90)
        (function,) = artifact.device_mod.functions.values()
        source = artifact.host_mod.inspect_source()
        assert _LAST_INCLUDE in source
        source, count = _CUDA_DEVICE.subn(r"== 1\1", source)
        assert count
        path = folder / "host.c"
        path.write_text(source.replace(_LAST_INCLUDE, _LAST_INCLUDE + _KEEPING, 1))
        library = folder / f"{spec.program}.so"
        ffi = Path(libinfo.find_libtvm_ffi())
        includes = [*libinfo.include_paths(), _tvm_headers()]
        subprocess.run(
            [
                *("gcc", "-shared", "-fPIC", "-w", "-O1"),
                *(f"-I{include}" for include in includes),
                *("-o", library, path, ffi, f"-Wl,-rpath,{ffi.parent}"),
            ],
            check=True,
        )
        module = tvm_ffi.load_module(str(library))
        names = tuple(str(parameter.name) for parameter in function.params)
        found = ctypes.CDLL(str(library))
        found.kept_integer.restype = ctypes.c_int64
        found.kept_number.restype = ctypes.c_double
        return cls(module[spec.program], found, names)

    def __call__(self, *values: Any) -> None:
        """Checks the values as a call on a GPU does.

        Raises:
            RuntimeError: they are not what the program declares.
        """
        self.launched = {}
        self.function(*values)
        assert self.library.kept_count() >= len(self.names)
        self.launched = {name: self._kept(i) for i, name in enumerate(self.names)}

    def _kept(self, i: int) -> Any:
        if self.library.kept_kind(i) == _FLOAT_KIND:
            return self.library.kept_number(i)
        return self.library.kept_integer(i)


def _tvm_headers() -> Path:
    import tilelang

    return Path(tilelang.__file__).parent / "3rdparty" / "tvm" / "include"


class LauncherOnHost:
    """While patched in, a launcher binds host functions, and takes CPU tensors for a GPU's."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path) -> None:
        self.folder = folder
        self.functions: dict[str, HostFunction] = {}
        patch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
        patch.setattr(TileLangKernelSpec, "bind", lambda spec, arch: self._bind(spec))

    def _bind(self, spec: TileLangKernelSpec) -> BoundTileLangKernel:
        folder = self.folder / f"{spec.program}-{len(self.functions)}"
        folder.mkdir()
        self.functions[spec.program] = HostFunction.of(spec, folder)
        return BoundTileLangKernel(self.functions[spec.program])

    def check(self, program: str, values: Mapping[str, Any]) -> None:
        """Asserts that the newest call of a program launches with these values.

        A tensor map is no value: what it is made of, the host function has checked.
        """
        launched = self.functions[program].launched
        assert launched, f"{program} was not called"
        compared = {name for name in launched if not name.endswith("_desc")}
        assert compared <= set(values)
        expected = {name: _plain(values[name]) for name in compared}
        assert {name: launched[name] for name in compared} == expected


def _plain(value: Any) -> Any:
    """A tensor's address, a float as a kernel takes it."""
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    return ctypes.c_float(value).value if isinstance(value, float) else value or 0
