"""Runs a generated TileLang kernel on the CPU: its CUDA, compiled for the host, values and all.

The kernel's arguments go by the names that its device function has; tensor maps are made by the
expressions of the generated host code.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilescout.kernels.tilelang_spec import TileLangKernelSpec, lowered

__all__ = ["HostKernel"]

_HERE = Path(__file__).parent
_SIGNATURE = r'extern "C" __global__ void (?:__launch_bounds__\([^)]*\) )?{name}\((.*?)\)\s*[;{{]'
_SHARED = re.compile(r"extern __shared__ __align__\(\d+\) (\w+) (\w+)\[\];")
_EX2 = re.compile(r'asm\("ex2\.approx\.ftz\.f32 %0, %1;" : "=f"\((\w+)\) : "f"\((\w+)\)\);')
_MAP_VALUE = re.compile(r"stack_ffi_any\)\[(\d+)\]\.(?:v_int64|v_ptr)\) = (.*);")


@dataclass(frozen=True)
class HostKernel:
    """A kernel as a function of the host."""

    function: Any
    arguments: tuple[tuple[str, str], ...]
    """(C type, name) of what the caller gives."""

    @classmethod
    def of(
        cls, spec: TileLangKernelSpec, folder: Path, *, arch: int = 90, change: Any = None
    ) -> HostKernel:
        """Generates, translates and compiles; ``change`` may alter the CUDA first."""
        artifact = lowered(spec, arch)
        (function,) = artifact.device_mod.functions.values()
        cuda = str(artifact.kernel_source)
        cuda = cuda if change is None else change(cuda)
        parameters = _parameters(cuda, spec.name)
        maps = _tensor_maps(artifact.host_mod.inspect_source())
        names = [name for _, name in parameters]
        given = [(kind, name) for kind, name in parameters if "CUtensorMap" not in kind]
        given += _needed_by_maps(names, maps, artifact.host_mod.inspect_source())
        (folder / "kernel.cpp").write_text(
            _program(
                _for_host(cuda),
                spec.name,
                given,
                parameters,
                maps,
                threads=int(function.attrs["thread_extent"]["threadIdx.x"]),
                shared_bytes=int(function.attrs.get("dyn_shared_memory_buf", 0)) + 1024,
            )
        )
        library = folder / "kernel.so"
        command = ["g++", "-std=c++20", "-O1", "-w", "-fpermissive", "-ffp-contract=off"]
        command += [
            "-shared",
            "-fPIC",
            f"-I{_HERE}",
            "-o",
            str(library),
            str(folder / "kernel.cpp"),
        ]
        subprocess.run(command, check=True)
        run = ctypes.CDLL(str(library)).run
        run.restype = ctypes.c_char_p
        return cls(run, tuple(given))

    def __call__(
        self, grid: tuple[int, ...], values: dict[str, Any], *, is_reversed: bool = False
    ) -> None:
        """Runs every block; tensors are CPU tensors, None where the kernel does not look.

        Raises:
            RuntimeError: threads wait for one another, or a copy is misaligned.
        """
        sizes = (*grid, 1, 1)[:3]
        given = (_c_value(*argument, values) for argument in self.arguments)
        failure = self.function(*sizes, int(is_reversed), *given)
        if failure is not None:
            raise RuntimeError(failure.decode())


def _parameters(cuda: str, name: str) -> list[tuple[str, str]]:
    found = re.search(_SIGNATURE.format(name=name), cuda)
    assert found is not None
    cleaned = re.sub(r"__restrict__|__grid_constant__", "", found.group(1))
    pairs = (part.rsplit(None, 1) for part in cleaned.split(",") if part.strip())
    return [(kind.strip(), name) for kind, name in pairs]


def _for_host(cuda: str) -> str:
    lines = [line for line in cuda.splitlines() if not line.startswith("#")]
    cuda = _EX2.sub(r"\1 = ex2_approx_ftz(\2);", "\n".join(lines))
    return _SHARED.sub(r"\1* \2 = (\1*)shared_memory;", cuda)


def _tensor_maps(host: str) -> dict[str, str]:
    """Name of each tensor map -> its initialiser in C++."""
    found = {}
    for block in re.split(r"void\* (?=\w+_desc = )", host)[1:]:
        name = block.split(" ", 1)[0]
        call = block[: block.index("TVMFFIFunctionCall")]
        # A pointer is set to 0 first: the last assignment counts.
        values = {int(at): value for at, value in _MAP_VALUE.findall(call)}
        rank = _number(values[2])
        sizes, strides, box = (
            ", ".join(values[4 + rank * n + i] for i in range(rank)) for n in range(3)
        )
        swizzle = values[4 + 4 * rank + 1]
        found[name] = (
            f"{{{rank}, (char*){values[3]}, {{{sizes}}}, {{{strides}}}, {{{box}}}, {swizzle}}}"
        )
    return found


def _number(text: str) -> int:
    return int(re.sub(r"\(int64_t\)|[()]", "", text))


def _needed_by_maps(names: list[str], maps: dict[str, str], host: str) -> list[tuple[str, str]]:
    """What the tensor maps are made of and the kernel does not take itself."""
    words = {w for text in maps.values() for w in re.findall(r"[A-Za-z_]\w*", text)}
    words -= {"int64_t", "char", *names}
    pointers = {w for w in words if re.search(rf"void\* {w} = ", host)}
    return [("void*" if w in pointers else "int64_t", w) for w in sorted(words)]


def _program(
    cuda: str,
    kernel: str,
    given: list[tuple[str, str]],
    parameters: list[tuple[str, str]],
    maps: dict[str, str],
    *,
    threads: int,
    shared_bytes: int,
) -> str:
    declared = ", ".join(f"{kind} {name}" for kind, name in given)
    made = "\n".join(f"  CUtensorMap {name} = {value};" for name, value in maps.items())
    passed = ", ".join(name for _, name in parameters)
    return f"""#include "fp4_products_on_host.h"
{cuda}
extern "C" const char* run(
    int grid_x, int grid_y, int grid_z, int is_reversed{declared and ", "}{declared}) {{
{made}
  failure = nullptr;
  posix_memalign((void**)&shared_memory, 1024, {shared_bytes});
  body = [&] {{ {kernel}({passed}); }};
  for (int z = 0; z < grid_z; ++z)
    for (int y = 0; y < grid_y; ++y)
      for (int x = 0; x < grid_x; ++x) {{
        blockIdx = {{x, y, z}};
        run_block({threads}, {shared_bytes}, is_reversed);
        if (failure) return failure;
      }}
  free(shared_memory);
  return nullptr;
}}
"""


def _c_value(kind: str, name: str, values: dict[str, Any]) -> Any:
    value = values[name]
    if "*" in kind:
        return ctypes.c_void_p(0 if value is None else value.data_ptr())
    if kind == "float":
        return ctypes.c_float(value)
    return ctypes.c_int64(value) if kind == "int64_t" else ctypes.c_int(value)
