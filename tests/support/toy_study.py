"""A study of the toy operation in a real store; also run as a program that a test kills.

    python toy_study.py DATABASE LOG NUM_TRIALS

appends the id of every config to LOG before it is evaluated.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import toy_op
from formula_evaluator import FormulaEvaluator, RecordingListener
from tilescout.kernels import registry
from tilescout.kernels.device import DeviceSpec
from tilescout.search_spaces import registry as spaces
from tilescout.search_spaces.registry import joint_space
from tilescout.tuner.records import MeasurementPolicy, Provenance, StudyKey, Toolchain
from tilescout.tuner.search.driver import run_study
from tilescout.tuner.store import Store


def toy_key(device: DeviceSpec, problem: toy_op.ToyProblem, **changes) -> StudyKey:
    values = {
        "problem": problem,
        "device": device,
        "toolchain": Toolchain(triton="3.9.0"),
        "provenance": Provenance.MEASURED,
        "policy": MeasurementPolicy(),
        "space_fingerprint": joint_space(problem, device).fingerprint(),
        "template_hashes": (("triton", "toy-1"),),
    }
    return StudyKey(**{**values, **changes})


def search_toy(store, device, *, size=64, evaluator=None, listener=None, **changes):
    """Runs (or goes on with) the study of one toy problem."""
    problem = toy_op.ToyProblem(size=size)
    evaluator = evaluator or FormulaEvaluator()
    study = store.study(toy_key(device, problem, provenance=evaluator.provenance), seed=0)
    limits = {"num_trials": 20, "deadline": None, "seed": 0, "num_finalists": 3, **changes}
    return run_study(
        space=joint_space(problem, device),
        evaluator=evaluator,
        store=store,
        study=study,
        listener=listener or RecordingListener(),
        **limits,
    )


class _LoggingEvaluator(FormulaEvaluator):
    def __init__(self, log: Path) -> None:
        super().__init__(capacity=1)
        self._log = log

    def collect(self):
        time.sleep(0.05)
        ended = super().collect()
        with self._log.open("a") as file:
            file.write(f"{ended.config.config_id}\n")
        return ended


def toy_device() -> DeviceSpec:
    return DeviceSpec(
        sku="toy-gpu",
        name="Toy GPU",
        architecture="hopper",
        compute_capability=(9, 0),
        num_sms=4,
        memory_bytes=10**9,
        l2_bytes=2**20,
        smem_per_block_bytes=232448,
        smem_per_sm_bytes=233472,
        registers_per_sm=65536,
        max_threads_per_sm=2048,
        max_blocks_per_sm=32,
        bandwidth_gbps=100.0,
        peak_tflops={"float32": 1.0},
        clock_mhz=1000.0,
    )


if __name__ == "__main__":
    registry.register("toy", toy_op.MODULE)
    spaces.register("toy", toy_op.MODULE)
    database, log, num_trials = sys.argv[1:]
    with Store.open(database) as store:
        search_toy(
            store,
            toy_device(),
            evaluator=_LoggingEvaluator(Path(log)),
            num_trials=int(num_trials),
        )
