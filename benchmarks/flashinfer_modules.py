#!/usr/bin/env python3
"""FlashInfer's compiled modules for the paged-decode baselines: built in one go, then packed.

FlashInfer compiles a module at its first use, tens of seconds each. Here the modules of all suites
are compiled in one go on all cores, on a machine without a GPU too:

    FLASHINFER_CUDA_ARCH_LIST=9.0a MAX_JOBS=8 python benchmarks/flashinfer_modules.py \
        --archive modules.tar.xz

A FlashInfer of the same version elsewhere compiles nothing that is unpacked into its folder of
prebuilt modules, which ``--where`` prints:

    tar -xf modules.tar.xz -C "$(python benchmarks/flashinfer_modules.py --where)"
"""

from __future__ import annotations

import argparse
import sys
import tarfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from paged_decode_suites import SUITES
from tilescout.kernels.paged_decode import PagedDecodeProblem

__all__ = ["XQA_PAGE_SIZES", "build_modules", "module_specs"]

XQA_PAGE_SIZES = (16, 32, 64, 128)
"""Page sizes that FlashInfer's XQA kernel is compiled for (flashinfer.jit.xqa, 0.6.18)."""

_NO_ROTATION = 0
"""FlashInfer's PosEncodingMode.NONE."""


def module_specs(problems: Iterable[PagedDecodeProblem]) -> list[Any]:
    """What FlashInfer compiles for these problems, backend by backend, without repeats."""
    specs = {spec.name: spec for problem in problems for spec in _specs_of(problem)}
    return list(specs.values())


def _specs_of(problem: PagedDecodeProblem) -> list[Any]:
    from flashinfer.jit.attention.modules import (
        gen_batch_attention_module,
        gen_batch_decode_module,
        gen_batch_prefill_module,
    )
    from flashinfer.jit.xqa import gen_xqa_module

    q, kv = getattr(torch, problem.dtype), getattr(torch, problem.kv_dtype)
    types, head_dim = (q, kv, q, torch.int32), (problem.head_dim, problem.head_dim_v)
    has_window, has_cap = problem.window_left >= 0, problem.has_soft_cap
    specs = [
        gen_batch_decode_module(*types, *head_dim, _NO_ROTATION, has_window, has_cap),
        gen_batch_prefill_module(
            "fa2", *types, *head_dim, _NO_ROTATION, has_window, has_cap, False
        ),
    ]
    if not has_window:
        specs.append(gen_batch_attention_module(*types, *head_dim, _NO_ROTATION, has_cap, False))
    if problem.page_size in XQA_PAGE_SIZES:
        specs.append(
            gen_xqa_module(
                q, kv, problem.page_size, problem.head_dim, problem.group_size, has_window, q
            )
        )
    return specs


def build_modules(problems: Iterable[PagedDecodeProblem]) -> list[Any]:
    """Compiles what is not compiled yet, ``MAX_JOBS`` files at a time; returns all specs."""
    from flashinfer.jit.core import build_jit_specs

    specs = module_specs(problems)
    start = time.monotonic()
    build_jit_specs(specs)
    print(
        f"{len(specs)} modules of FlashInfer in {time.monotonic() - start:.0f} s", file=sys.stderr
    )
    return specs


def write_archive(specs: Iterable[Any], path: Path) -> None:
    """Packs the libraries as ``NAME/NAME.so``, where FlashInfer looks for prebuilt ones."""
    with tarfile.open(path, "w:xz") as archive:
        for spec in specs:
            library = spec.get_library_path()
            archive.add(library, arcname=f"{spec.name}/{spec.name}.so")
    print(f"{path}: {path.stat().st_size / 2**20:.1f} MiB", file=sys.stderr)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--suite", choices=SUITES, nargs="+", default=list(SUITES))
    parser.add_argument("--archive", type=Path, help="pack what was built into this .tar.xz")
    parser.add_argument("--list", action="store_true", help="print the modules, build none")
    parser.add_argument("--where", action="store_true", help="print FlashInfer's folder and end")
    return parser.parse_args()


def main() -> None:
    """Builds, lists or packs the modules."""
    arguments = parse_arguments()
    try:
        from flashinfer.jit import env
    except ImportError as error:
        raise SystemExit(f"FlashInfer cannot be imported: {error}") from None
    if arguments.where:
        print(env.FLASHINFER_AOT_DIR)
        return
    problems = [c.problem for suite in arguments.suite for c in SUITES[suite] if c.has_baselines]
    if arguments.list:
        print("\n".join(spec.name for spec in module_specs(problems)))
        return
    specs = build_modules(problems)
    if arguments.archive:
        write_archive(specs, arguments.archive)


if __name__ == "__main__":
    main()
