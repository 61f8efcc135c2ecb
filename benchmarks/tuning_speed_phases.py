"""The phases of ``tuning_speed``: each takes configs, in a process of its own, and returns figures.

Kept apart from the comparison: this is what is timed, that is what is concluded.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tilescout.kernels import registry
from tilescout.kernels.base import Config
from tilescout.kernels.device import DeviceSpec
from tilescout.kernels.paged_decode import PagedDecodeProblem
from tilescout.kernels.triton_spec import TritonKernelSpec
from tilescout.search_spaces.listed import listed_space
from tilescout.search_spaces.space import JointSpace
from tilescout.tuner import catalog, worker
from tilescout.tuner.compile_pool import CompilePool, compile_config
from tilescout.tuner.environment import current_device, toolchain
from tilescout.tuner.evaluators.measure import MeasureEvaluator
from tilescout.tuner.finals import time_rounds
from tilescout.tuner.measure import MeasureSettings, count_copies, count_launches
from tilescout.tuner.measuring_processes import MeasuringProcesses
from tilescout.tuner.progress import LoggingListener
from tilescout.tuner.records import MeasurementPolicy, Provenance, StudyKey, TrialStatus
from tilescout.tuner.search.driver import run_study
from tilescout.tuner.search.stopping import GainRule
from tilescout.tuner.store import Store
from tilescout.tuner.timers import Call, CudaTimer, Run

__all__ = [
    "DRY_SKU",
    "PROBLEM",
    "TEMPLATE",
    "device_at_hand",
    "device_kernel",
    "grid_of",
    "kernel_arguments",
    "run_phase",
    "search_list",
    "triton_config",
]

PROBLEM = PagedDecodeProblem(
    batch=16,
    kv_len=8192,
    num_qo_heads=32,
    num_kv_heads=8,
    head_dim=128,
    page_size=16,
    dtype="bfloat16",
)
OP, TEMPLATE = "paged_decode", "triton"
MAX_SPLITS = 64
NUM_FINALISTS = 8
DRY_SKU = "h200"


def phase_ours(configs: Sequence[Config]) -> dict[str, Any]:
    """All configs through compile pool and GPU worker."""
    start = time.monotonic()
    counts: dict[str, int] = {}
    with MeasuringProcesses() as processes, _evaluator(processes) as evaluator:
        waiting, in_flight = list(configs), 0
        while waiting or in_flight:
            while waiting and in_flight < evaluator.capacity:
                evaluator.submit(waiting.pop(0))
                in_flight += 1
            ended = evaluator.collect()
            assert ended is not None, "there is no deadline"
            counts[ended.status.value] = counts.get(ended.status.value, 0) + 1
            in_flight -= 1
        elapsed_s = time.monotonic() - start
        share = evaluator.gpu_busy_share
    return {
        "num_configs": len(configs),
        "elapsed_s": elapsed_s,
        "gpu_busy_share": share,
        "statuses": counts,
    }


def _evaluator(processes: MeasuringProcesses) -> MeasureEvaluator:
    """One over processes that start first, as in a tuning run."""
    processes.start()
    return MeasureEvaluator(
        PROBLEM, device_at_hand(), compilers=processes.compilers, gpu=processes.gpu
    )


def phase_serial(configs: Sequence[Config]) -> dict[str, Any]:
    """The same compiling, verifying and timing, one config after the other in one process."""
    device = device_at_hand()
    task = worker.Task(
        op=OP,
        op_module=registry.module_of(OP),
        problem=PROBLEM,
        policy=MeasurementPolicy(),
        torch_device="cuda",
        l2_bytes=device.l2_bytes,
        seed=0,
    )
    worker.prepare(task)
    best_us: float | None = None
    seconds = []
    worker.evaluate(configs[-1], None)  # untimed: loads what each later one finds loaded
    for config in configs[:-1]:
        start = time.monotonic()
        outcome = worker.evaluate(config, best_us)
        seconds.append(time.monotonic() - start)
        if outcome.status is TrialStatus.OK and outcome.timing is not None:
            best_us = min(best_us or outcome.timing.median_us, outcome.timing.median_us)
    return {"seconds": seconds}


def phase_search(configs: Sequence[Config]) -> dict[str, Any]:
    """Our search over the list, with finals, into an empty database."""
    start = time.monotonic()
    with MeasuringProcesses() as processes, _evaluator(processes) as evaluator:
        device = device_at_hand()
        found = search_list(configs, device, evaluator)
        share = evaluator.gpu_busy_share
    return {**found, "elapsed_s": time.monotonic() - start, "gpu_busy_share": share}


def phase_compile_serial(configs: Sequence[Config]) -> dict[str, Any]:
    """Serial just-in-time compilation, as ``triton.autotune`` does it."""
    arguments = kernel_arguments()
    _jit_compile(configs[-1], arguments)  # untimed: starts the compiler
    return {"seconds": [_timed(partial(_jit_compile, c, arguments)) for c in configs[:-1]]}


def phase_compile_part(configs: Sequence[Config], part: int, num_parts: int) -> dict[str, Any]:
    """Every ``num_parts``-th config, so that processes side by side fill one cache."""
    arguments = kernel_arguments()
    for config in configs[part::num_parts]:
        _jit_compile(config, arguments)
    return {}


def phase_autotune(configs: Sequence[Config], num_probed: int) -> dict[str, Any]:
    """``triton.autotune`` over all configs with its default timing.

    The first ``num_probed`` configs are loaded from the cache beforehand, to know what that takes.
    """
    import torch
    import triton

    arguments = kernel_arguments()
    load_s = [_timed(partial(_jit_compile, c, arguments)) for c in configs[:num_probed]]
    candidates = [triton_config(config) for config in configs]
    tuned = triton.autotune(configs=candidates, key=[])(device_kernel())
    start = time.monotonic()
    tuned[grid_of](*arguments)
    torch.cuda.synchronize()
    elapsed_s = time.monotonic() - start
    place = next(i for i, c in enumerate(candidates) if c is tuned.best_config)
    return {"elapsed_s": elapsed_s, "load_s": load_s, "winner": configs[place].as_dict()}


def phase_winners(configs: Sequence[Config]) -> dict[str, Any]:
    """Times the configs in interleaved rounds, launches captured, L2 cold."""
    import torch

    settings = MeasureSettings(max_rounds=40)
    operation = registry.operation(OP)
    copies = count_copies(
        bytes_moved=PROBLEM.bytes_moved,
        bytes_held=PROBLEM.bytes_moved,
        l2_bytes=device_at_hand().l2_bytes,
        free_bytes=torch.cuda.mem_get_info()[0],
        settings=settings,
    )
    inputs = [operation.make_inputs(PROBLEM, device="cuda", seed=seed) for seed in range(copies)]
    outputs = [operation.make_outputs(PROBLEM, i) for i in inputs]
    timer = CudaTimer(is_graph=True)
    runs: list[Run] = []
    for config in configs:
        launcher = registry.template(OP, TEMPLATE).build(PROBLEM, config, inputs[0])
        calls: list[Call] = [
            partial(launcher.launch, i, o) for i, o in zip(inputs, outputs, strict=True)
        ]
        for call in calls:
            call()
        comparison = operation.compare(PROBLEM, inputs[0], outputs[0])
        assert comparison.is_ok, f"{config}: {comparison.reason}"
        rough_us = timer.time_us([timer.prepare(calls, len(calls))])[0]
        runs.append(timer.prepare(calls, count_launches(rough_us, len(calls), settings)))
    timer.time_us(runs * 2)
    samples_us = time_rounds(runs, timer, settings.max_rounds)
    return {"median_us": [statistics.median(samples) for samples in samples_us]}


def phase_dry_pool(configs: Sequence[Config]) -> dict[str, Any]:
    """Compiles in the pool for an H200 that need not be there."""
    start = time.monotonic()
    module, arch = registry.module_of(OP), catalog.gpu(DRY_SKU).arch
    with CompilePool() as pool:
        jobs = [pool.submit(OP, module, TEMPLATE, PROBLEM, c, arch) for c in configs]
        statuses = [job.result().status.value for job in jobs]
    return {
        "num_configs": len(configs),
        "elapsed_s": time.monotonic() - start,
        "gpu_busy_share": 0.0,
        "statuses": {status: statuses.count(status) for status in sorted(set(statuses))},
    }


def phase_dry_serial(configs: Sequence[Config]) -> dict[str, Any]:
    """Compiles one after the other for the same."""
    job = (OP, registry.module_of(OP), TEMPLATE, PROBLEM)
    arch = catalog.gpu(DRY_SKU).arch
    return {"seconds": [_timed(partial(compile_config, *job, c, arch)) for c in configs]}


def device_at_hand() -> DeviceSpec:
    """The GPU of this machine."""
    device = current_device()
    assert device is not None, "this phase needs a GPU"
    return device


def search_list(configs: Sequence[Config], device: DeviceSpec, evaluator: Any) -> dict[str, Any]:
    """Runs the study; the winner, its trials and how many were evaluated."""
    space = JointSpace((listed_space(TEMPLATE, configs),))
    key = StudyKey(
        problem=PROBLEM,
        device=device,
        toolchain=toolchain(with_driver=False),
        provenance=Provenance.MEASURED,
        policy=MeasurementPolicy(),
        space_fingerprint=space.fingerprint(),
        template_hashes=((TEMPLATE, registry.template(OP, TEMPLATE).source_hash()),),
    )
    with tempfile.TemporaryDirectory() as folder, Store.open(Path(folder, "search.db")) as store:
        study = store.study(key, seed=0)
        winner = run_study(
            space=space,
            evaluator=evaluator,
            store=store,
            study=study,
            num_trials=len(configs),
            deadline=None,
            seed=0,
            num_finalists=NUM_FINALISTS,
            listener=LoggingListener(),
            gain=GainRule(),
        )
        assert winner is not None, "no config worked"
        trials = store.trials(study.study_id)
    return {"winner": winner.trial.evaluation.config.as_dict(), "num_trials": len(trials)}


def device_kernel() -> Any:
    """The one kernel that every config of the list launches."""
    from tilescout.kernels.paged_decode.triton_kernel import paged_decode_kernel

    return paged_decode_kernel


def triton_config(config: Config) -> Any:
    """The config as Triton's tuner takes it."""
    import triton

    spec = registry.template(OP, TEMPLATE).kernel_specs(PROBLEM, config)[0]
    assert isinstance(spec, TritonKernelSpec)
    constants: dict[str, Any] = dict(spec.constexprs)
    return triton.Config(
        {**constants, "num_splits": int(config.get("num_splits", 1) or 1), "split_tokens": 0},
        num_warps=int(config["num_warps"]),
        num_stages=int(config["num_stages"]),
    )


def grid_of(meta: dict[str, Any]) -> tuple[int, int, int]:
    """The grid under these constants, as Triton's tuner asks for it."""
    group = PROBLEM.num_qo_heads // PROBLEM.num_kv_heads
    head_tiles = PROBLEM.num_kv_heads * -(-group // meta["BLOCK_M"])
    return head_tiles * PROBLEM.batch * meta["num_splits"], 1, 1


def kernel_arguments(
    problem: PagedDecodeProblem = PROBLEM, torch_device: str = "cuda"
) -> tuple[Any, ...]:
    """Run-time arguments of the kernel up to ``batch``, with scratch for the most splits."""
    import torch

    operation = registry.operation(OP)
    inputs = operation.make_inputs(problem, device=torch_device, seed=0)
    out = operation.make_outputs(problem, inputs).out
    rows = problem.batch * MAX_SPLITS * problem.num_qo_heads
    partial_lse = torch.empty(rows, device=torch_device)
    partial_out = torch.empty(rows, problem.head_dim, device=torch_device)
    arrivals = torch.zeros(
        problem.batch * problem.num_qo_heads, dtype=torch.int32, device=torch_device
    )
    k, v = inputs.k_cache, inputs.v_cache
    tables = (inputs.kv_indptr, inputs.kv_indices, inputs.kv_last_page_len)
    strides = (*inputs.q.stride()[:2], *k.stride()[:3], *v.stride()[:3], *out.stride()[:2])
    results = (out, partial_lse, partial_out, partial_lse, arrivals)
    unused = (partial_lse,) * 4  # sinks, slopes and scales on the device
    scale_log2 = inputs.sm_scale * math.log2(math.e)
    factors = (scale_log2, 1.0, 1.0, 0.0, 0.0, 1.0)
    sizes = (0, -1, problem.batch)  # stride of a dense table, window, batch
    return (inputs.q, k, v, *tables, *results, *unused, *factors, *strides, *sizes)


def _jit_compile(config: Config, arguments: Sequence[Any]) -> None:
    try:
        device_kernel().warmup(*arguments, grid=(1,), **triton_config(config).all_kwargs())
    except Exception as error:  # the tuner, too, passes over what does not compile
        print(f"{config}: {error}", file=sys.stderr)


def _timed(action: Callable[[], object]) -> float:
    start = time.monotonic()
    action()
    return time.monotonic() - start


def run_phase(arguments: argparse.Namespace) -> None:
    """The body of a phase's process."""
    values = json.loads(arguments.configs_file.read_text())
    configs = [Config.of(TEMPLATE, value) for value in values]
    phases: dict[str, Callable[[], dict[str, Any]]] = {
        "start": lambda: phase_ours(configs),
        "ours": lambda: phase_ours(configs),
        "serial": lambda: phase_serial(configs),
        "search": lambda: phase_search(configs),
        "compile_serial": lambda: phase_compile_serial(configs),
        "compile_part": lambda: phase_compile_part(configs, arguments.part, arguments.parts),
        "autotune": lambda: phase_autotune(configs, arguments.probed),
        "winners": lambda: phase_winners(configs),
        "dry_pool": lambda: phase_dry_pool(configs),
        "dry_serial": lambda: phase_dry_serial(configs),
    }
    arguments.result.write_text(json.dumps(phases[arguments.phase]()))
