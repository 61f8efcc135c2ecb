#!/usr/bin/env python3
"""How fast tuning is: against a serial loop, and against ``triton.autotune`` run exhaustively.

The problem is one paged decode; the configs are a random sample of those whose kernel is a single
launch, so that both sides time the same code. Every phase is a process of its own with a Triton
cache of its own, empty at its start:

- start: untimed; one config through the machinery of *ours*, so that no later phase is the one
  that reads torch, Triton and CUDA from a cold disk;
- ours: compile pool and GPU worker over all configs, in configs a minute, starting of all
  processes included;
- serial: the worker's own compiling, verifying and timing, one config after the other, over a
  subset; its start and its first config are not timed;
- search: our search over the same list, until its winner is decided; it may stop early;
- autotune: ``triton.autotune`` over the whole list with its own timing. Its compilation is serial
  and would take minutes, so the list is compiled in parallel first and its time is: the measured
  run on a warm cache, plus the serial compile time of a subset scaled to the list (--full runs it
  cold instead and scales nothing);
- winners: both winners re-measured, interleaved.

    python benchmarks/tuning_speed.py --json tuning_speed.json

Without a GPU, --dry-run does all that needs none, on few configs, and prints no comparison.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tilescout.kernels.base import Config
from tilescout.kernels.device import DeviceSpec
from tilescout.search_spaces.registry import joint_space
from tilescout.tuner import catalog
from tilescout.tuner.environment import toolchain
from tilescout.tuner.records import Evaluation, Provenance, Timing, TrialStatus
from tuning_speed_phases import (
    DRY_SKU,
    PROBLEM,
    TEMPLATE,
    device_at_hand,
    device_kernel,
    grid_of,
    kernel_arguments,
    run_phase,
    search_list,
    triton_config,
)

PHASE_TIMEOUT_S = 900.0


def choose_configs(device: DeviceSpec, count: int, seed: int) -> list[Config]:
    """A random sample of the configs that are one launch: unsplit, or merged by the last block."""
    single = [
        config
        for config in joint_space(PROBLEM, device, [TEMPLATE])
        if config["split_rule"] == "none"
        or (config["split_rule"] == "count" and config["merge"] == "last_block")
    ]
    return random.Random(seed).sample(single, min(count, len(single)))


class Phases:
    """Runs phases of this script in processes of their own, with caches of their own."""

    def __init__(self, folder: Path, configs: Sequence[Config]) -> None:
        self._folder = folder
        self.write("all", configs)

    def run(self, phase: str, *options: str, cache: str, configs: str = "all") -> dict[str, Any]:
        """What one phase returns."""
        return self.run_all(phase, [options], cache=cache, configs=configs)[0]

    def run_all(
        self, phase: str, options: Sequence[Sequence[str]], *, cache: str, configs: str = "all"
    ) -> list[dict[str, Any]]:
        """One process for each set of options, all at a time."""
        environment = {**os.environ, "TRITON_CACHE_DIR": str(self._folder / f"cache-{cache}")}
        print(f"{phase} ...", file=sys.stderr, flush=True)
        processes, results = [], []
        for index, extra in enumerate(options):
            results.append(self._folder / f"{phase}-{index}.json")
            command = [sys.executable, __file__, "--phase", phase, "--result", str(results[-1])]
            command += ["--configs-file", str(self._folder / f"{configs}.json"), *extra]
            processes.append(subprocess.Popen(command, env=environment))
        try:
            for process in processes:
                if process.wait(timeout=PHASE_TIMEOUT_S):
                    raise SystemExit(f"phase {phase} failed with status {process.returncode}")
        finally:
            for process in processes:
                process.kill()
        ended = [json.loads(result.read_text()) for result in results]
        # Said at once, so that a run that is cut short has not measured in vain.
        print(f"{phase}: {json.dumps(ended[0])}", file=sys.stderr, flush=True)
        return ended

    def write(self, name: str, configs: Sequence[Config]) -> None:
        """Keeps a list of configs for phases."""
        text = json.dumps([config.as_dict() for config in configs])
        (self._folder / f"{name}.json").write_text(text)


def compare(arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs everything and concludes."""
    device = device_at_hand()
    configs = choose_configs(device, arguments.configs, arguments.seed)
    subset = configs[: arguments.subset]
    num_cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as name:
        phases = Phases(Path(name), configs)
        phases.write("subset", subset)
        phases.write("first", configs[:1])
        phases.run("start", cache="start", configs="first")
        ours = phases.run("ours", cache="ours")
        serial = phases.run("serial", cache="serial", configs="subset")
        search = phases.run("search", cache="search")
        if arguments.full:
            compile_s: list[float] = []
            tuned = phases.run("autotune", "--probed", "0", cache="autotune")
        else:
            compiled = phases.run("compile_serial", cache="compile", configs="subset")
            compile_s = compiled["seconds"]
            parts = [["--part", str(i), "--parts", str(num_cores)] for i in range(num_cores)]
            phases.run_all("compile_part", parts, cache="autotune")
            tuned = phases.run("autotune", "--probed", str(len(subset)), cache="autotune")
        winners = [Config.of(TEMPLATE, found["winner"]) for found in (search, tuned)]
        phases.write("winners", winners)
        times_us = phases.run("winners", cache="search", configs="winners")["median_us"]
    return {
        "device": device.name,
        "num_cores": num_cores,
        "problem": PROBLEM.as_dict(),
        "toolchain": toolchain(with_driver=True).as_dict(),
        "is_dry_run": False,
        "throughput": conclude_throughput(ours, serial["seconds"]),
        "against_autotune": conclude_autotune(search, tuned, compile_s, times_us, len(configs)),
    }


def conclude_throughput(ours: dict[str, Any], serial_s: Sequence[float]) -> dict[str, Any]:
    """Configs a minute of both; the serial rate with its standard error, being of a subset."""
    mean_s = statistics.mean(serial_s)
    error = statistics.stdev(serial_s) / len(serial_s) ** 0.5 / mean_s if serial_s[1:] else None
    ours_per_minute = 60.0 * ours["num_configs"] / ours["elapsed_s"]
    serial_per_minute = 60.0 / mean_s
    return {
        **ours,
        "ours_per_minute": ours_per_minute,
        "serial_per_minute": serial_per_minute,
        "serial_num_configs": len(serial_s),
        "serial_relative_error": error,
        "ratio": ours_per_minute / serial_per_minute,
    }


def conclude_autotune(
    search: dict[str, Any],
    tuned: dict[str, Any],
    compile_s: Sequence[float],
    times_us: Sequence[float],
    num_configs: int,
) -> dict[str, Any]:
    """Both wall times and both winners; ``compile_s`` is empty where the tuner ran cold."""
    tuned_s = tuned["elapsed_s"]
    if compile_s:
        # What was loaded beforehand belongs to the run; each compile replaces a load.
        load_s = statistics.mean(tuned["load_s"])
        tuned_s += sum(tuned["load_s"]) + num_configs * (statistics.mean(compile_s) - load_s)
    return {
        "num_configs": num_configs,
        "ours_s": search["elapsed_s"],
        "ours_num_trials": search["num_trials"],
        "ours_gpu_busy_share": search["gpu_busy_share"],
        "autotune_s": tuned_s,
        "autotune_measured_s": tuned["elapsed_s"],
        "autotune_compile_s": list(compile_s),
        "is_extrapolated": bool(compile_s),
        "time_ratio": search["elapsed_s"] / tuned_s,
        "ours_winner": search["winner"],
        "autotune_winner": tuned["winner"],
        "is_same_winner": search["winner"] == tuned["winner"],
        "ours_us": times_us[0],
        "autotune_us": times_us[1],
        "winner_ratio": times_us[0] / times_us[1],
    }


def print_report(report: dict[str, Any]) -> None:
    """Two tables."""
    rate, against = report["throughput"], report["against_autotune"]
    error = rate["serial_relative_error"]
    margin = "" if error is None else f" (+/- {error:.0%})"
    print(f"{report['device']}, {report['num_cores']} cores, {PROBLEM}")
    print(f"\n{'configs a minute':<22}{'configs':>8}{'a minute':>10}")
    print(f"{'tilescout':<22}{rate['num_configs']:>8}{rate['ours_per_minute']:>10.1f}")
    serial = f"{rate['serial_per_minute']:>10.1f}{margin}"
    print(f"{'serial loop':<22}{rate['serial_num_configs']:>8}{serial}")
    print(f"ratio {rate['ratio']:.1f} (target: 8 on 16 cores); statuses {rate['statuses']};")
    print(f"GPU verifying and timing for {rate['gpu_busy_share']:.0%} of the time")
    kind = "extrapolated" if against["is_extrapolated"] else "measured"
    print(f"\n{'search':<22}{'trials':>8}{'seconds':>10}{'winner us':>11}  winner")
    for name, trials, seconds, us, winner in (
        ("tilescout", against["ours_num_trials"], against["ours_s"], against["ours_us"], "ours"),
        (
            f"autotune, {kind}",
            against["num_configs"],
            against["autotune_s"],
            against["autotune_us"],
            "autotune",
        ),
    ):
        values = " ".join(f"{k}={v}" for k, v in against[f"{winner}_winner"].items())
        print(f"{name:<22}{trials:>8}{seconds:>10.1f}{us:>11.2f}  {values}")
    print(
        f"time ratio {against['time_ratio']:.2f} (target: 0.25), "
        f"winner ratio {against['winner_ratio']:.4f} (target: 1.01)"
    )


class MadeUpEvaluator:
    """Times by a formula, for a dry run."""

    provenance = Provenance.MEASURED
    capacity = 4

    def __init__(self) -> None:
        self._waiting: list[Config] = []

    def submit(self, config: Config) -> None:
        """Queues the config."""
        self._waiting.append(config)

    def prepare(self, config: Config) -> None:
        """See ``Evaluator``; nothing is done early."""

    def collect(self, until: float | None = None) -> Evaluation:
        """The one that waits longest."""
        return self._evaluate(self._waiting.pop(0))

    def finals(self, configs: Sequence[Config]) -> list[Evaluation]:
        """By time."""
        return sorted(map(self._evaluate, configs), key=lambda e: e.time_us or 0.0)

    def close(self) -> None:
        """Has nothing to end."""

    def _evaluate(self, config: Config) -> Evaluation:
        us = 100.0 + abs(int(config["block_n"]) - 64) / 8 + abs(int(config["num_stages"]) - 3)
        timing = Timing(us, us, us, us, us, (us,) * 6, 6)
        return Evaluation(config, TrialStatus.OK, self.provenance, timing=timing)


def dry_run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Compiles a few configs for an H200 both ways, and searches the list by made-up times."""
    device = catalog.gpu(DRY_SKU)
    configs = choose_configs(device, arguments.configs, arguments.seed)
    few = configs[: arguments.subset]
    _check_call(configs)
    with tempfile.TemporaryDirectory() as name:
        phases = Phases(Path(name), few)
        ours = phases.run("dry_pool", cache="ours")
        serial_s = phases.run("dry_serial", cache="serial")["seconds"]
    start = time.monotonic()
    search = search_list(configs, device, MadeUpEvaluator())
    search |= {"elapsed_s": time.monotonic() - start, "gpu_busy_share": 0.0}
    tuned = {"elapsed_s": 1.0, "load_s": [0.0] * len(few), "winner": search["winner"]}
    return {
        "device": "none: a dry run, made-up times",
        "num_cores": len(os.sched_getaffinity(0)),
        "problem": PROBLEM.as_dict(),
        "toolchain": toolchain(with_driver=False).as_dict(),
        "is_dry_run": True,
        "throughput": conclude_throughput(ours, serial_s),
        "against_autotune": conclude_autotune(search, tuned, serial_s, [1.0, 1.0], len(configs)),
    }


def _check_call(configs: Sequence[Config]) -> None:
    """Every config names, with the run-time arguments, each argument of the kernel once."""
    names = list(device_kernel().arg_names)
    given = len(kernel_arguments(replace(PROBLEM, batch=1, kv_len=64), "cpu"))
    assert names[given - 1] == "batch", f"argument {given} is {names[given - 1]}"
    for config in configs:
        values = triton_config(config).all_kwargs()
        tuned = [name for name in values if name not in {"num_warps", "num_stages", "num_ctas"}]
        assert sorted(tuned) == sorted(names[given:]), config
        assert grid_of(values)[0] % (PROBLEM.batch * PROBLEM.num_kv_heads) == 0


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--configs", type=int, default=200, help="configs of the list")
    parser.add_argument(
        "--subset", type=int, default=17, help="configs that are compiled serially, one untimed"
    )
    parser.add_argument("--full", action="store_true", help="triton.autotune on an empty cache")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--dry-run", action="store_true")
    for name in ("--phase", "--part", "--parts", "--probed", "--result", "--configs-file"):
        is_path = name in ("--result", "--configs-file")
        kind = Path if is_path else str if name == "--phase" else int
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Runs a phase, a dry run or the comparison."""
    arguments = parse_arguments()
    if arguments.phase:
        run_phase(arguments)
        return
    if not (arguments.dry_run or 2 <= arguments.subset <= arguments.configs):
        raise SystemExit(f"--subset {arguments.subset} must be from 2 to {arguments.configs}")
    report = dry_run(arguments) if arguments.dry_run else compare(arguments)
    if report["is_dry_run"]:
        print("DRY RUN: the figures below compare nothing.")
    print_report(report)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
