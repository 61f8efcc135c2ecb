"""Host time of look-ups, operation calls and launches: what a call costs beside its kernel.

Look-ups need no GPU. On one, calls of paged decode are timed on the host, one after the other
without waiting, in rounds that take every contender in turn: the compiled kernels launched
directly, the public function, its operator, FlashInfer's wrapper over ours, and a small kernel
launched as Triton does, through @triton.autotune and adopted. With --capture a capture is on.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tilescout
from tilescout.tuner import dispatch

NUM_ROUNDS = 40
CALLS_A_ROUND = 200
IMPORT_RUNS = 5

Contenders = dict[str, Callable[[], object]]


def main() -> None:
    """Prints a table: contender, median and least microseconds a call."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=4, help="requests of the paged-decode call")
    parser.add_argument("--kv-len", type=int, default=1024, help="tokens of each request")
    parser.add_argument("--capture", action="store_true", help="count look-ups meanwhile")
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    print(f"import of the dispatch path beyond torch: {import_ms():.0f} ms")
    with tempfile.TemporaryDirectory() as folder:
        if given.capture:
            tilescout.capture(Path(folder) / "calls.json")
        show(lookups(given.batch, given.kv_len), lambda: None)
        if has_gpu():
            import torch

            contenders = {**decode_calls(given.batch, given.kv_len), **small_kernels()}
            show(contenders, torch.cuda.synchronize)
        else:
            print("no NVIDIA GPU: calls and launches are left out")
        tilescout.capture(None)


def has_gpu() -> bool:
    """Whether torch sees one."""
    import torch

    return torch.cuda.is_available()


def import_ms() -> float:
    """Least time that ``tilescout.tuner.dispatch`` takes to import in a process that has torch."""
    code = (
        "import torch, time; start = time.perf_counter()\n"
        "import tilescout.tuner.dispatch\n"
        "print(1e3 * (time.perf_counter() - start))"
    )
    command = [sys.executable, "-c", code]
    return min(
        float(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
        for _ in range(IMPORT_RUNS)
    )


def lookups(batch: int, kv_len: int) -> Contenders:
    """Hits: an object that was looked up before, an equal new one, fields."""
    problem = tilescout.PagedDecodeProblem
    fields = (batch, kv_len, 32, 8, 128, 16, "bfloat16")
    known, device = problem(*fields), dispatch.find_device("h200")
    snapshot = dispatch.current_snapshot()
    return {
        "lookup, same problem": lambda: tilescout.lookup(known, gpu="h200"),
        "Snapshot.lookup, same problem": lambda: snapshot.lookup(known, device),
        "lookup, problem built from fields": lambda: tilescout.lookup(problem(*fields), gpu="h200"),
    }


def decode_calls(batch: int, kv_len: int) -> Contenders:
    """One problem of paged decode, called in every way that there is."""
    import torch
    from tilescout import ops
    from tilescout.kernels.paged_decode import PagedDecodeOutputs, PagedDecodeProblem
    from tilescout.kernels.paged_decode.inputs import make_inputs
    from tilescout.kernels.registry import template
    from tilescout.ops.flashinfer import BatchDecodeWithPagedKVCacheWrapper

    problem = PagedDecodeProblem(batch, kv_len, 32, 8, 128, 16, "bfloat16")
    inputs = make_inputs(problem, device="cuda", seed=0)
    out = torch.empty_like(inputs.q)
    cache = (inputs.k_cache, inputs.v_cache)
    assert inputs.kv_indptr is not None
    assert inputs.kv_last_page_len is not None
    table = (inputs.kv_indptr, inputs.kv_indices, inputs.kv_last_page_len)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(torch.empty(1, device="cuda"))
    wrapper.plan(*table, 32, 8, 128, 16, q_data_type="bfloat16")
    found = ops.resolve_paged_decode(inputs.q, cache, ops.PageTable.csr(*table))
    launcher = template(found.op, found.template).build(found.problem, found.config, inputs)
    outputs = PagedDecodeOutputs(out, None)
    into = torch.ops.tilescout.paged_decode_out.default
    contenders: Contenders = {
        f"launcher of {found.template}": lambda: launcher.launch(inputs, outputs),
        "ops.paged_decode(out=)": lambda: ops.paged_decode(inputs.q, cache, *table, out=out),
        "torch.ops.tilescout.paged_decode_out": lambda: into([inputs.q], cache, *table, out=out),
        "FlashInfer's wrapper over ours": lambda: wrapper.run(inputs.q, cache, out=out),
    }
    return contenders


def small_kernels() -> Contenders:
    """One kernel launched by Triton, through its autotuner, and adopted."""
    import torch
    import triton
    import triton.language as tl

    # Triton reads a kernel's source, so the kernel must not be made from text.
    def double(x, y, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(y + offsets, 2 * tl.load(x + offsets, mask=offsets < n), mask=offsets < n)

    globals()["tl"] = tl  # names of a kernel are looked up in its module
    jitted = triton.jit(double)
    configs = [triton.Config({"BLOCK": block}) for block in (256, 512)]

    def tuned() -> Any:
        return triton.autotune(configs=configs, key=["n"])(jitted)

    theirs, ours = tuned(), tuned()
    tilescout.adopt(ours)
    x = torch.ones(4096, device="cuda")
    y = torch.empty_like(x)
    return {
        "torch.add(out=)": lambda: torch.add(x, x, out=y),
        "plain Triton launch": lambda: jitted[(16,)](x, y, 4096, BLOCK=256),
        "through @triton.autotune": lambda: theirs[(16,)](x, y, 4096),
        "adopted by Tilescout": lambda: ours[(16,)](x, y, 4096),
    }


def show(contenders: Contenders, wait: Callable[[], object]) -> None:
    """Times every contender in every round; prints microseconds a call."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for call in contenders.values():
        call()
    for _ in range(NUM_ROUNDS):
        for name, call in contenders.items():
            wait()
            start = time.perf_counter()
            for _ in range(CALLS_A_ROUND):
                call()
            times[name].append(1e6 * (time.perf_counter() - start) / CALLS_A_ROUND)
    width = max(map(len, times))
    for name, found in times.items():
        median, least = statistics.median(found), min(found)
        print(f"{name:{width}}  {median:8.2f} us  least {least:8.2f} us")


if __name__ == "__main__":
    main()
