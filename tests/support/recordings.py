"""Small recordings in the three formats, and a space whose best config is known."""

from __future__ import annotations

import itertools
import json

A_VALUES = (1, 2, 4, 8, 16, 32)
B_VALUES = (1, 2, 3, 4, 5)
BEST = {"a": 8, "b": 4, "mode": 1}


def time_ms(a: int, b: int, mode: int) -> float:
    """Smallest, 1.0, at ``BEST``."""
    return 1.0 + abs(A_VALUES.index(a) - 3) + abs(b - 4) * 0.5 + (mode == 0) * 0.25


def kernel_tuner_cache() -> dict:
    """All of the product but a=32; b=5 with a=16 does not compile."""
    cache = {}
    for a, b, mode in itertools.product(A_VALUES[:-1], B_VALUES, (0, 1)):
        record = {"a": a, "b": b, "mode": mode, "time": time_ms(a, b, mode)}
        record["times"] = [record["time"] * factor for factor in (0.99, 1.0, 1.01)]
        if a == 16 and b == 5:
            record |= {"time": "CompilationFailedConfig", "times": []}
        cache[f"{a},{b},{mode}"] = record
    return {
        "device_name": "Some GPU",
        "kernel_name": "kernel",
        "tune_params_keys": ["a", "b", "mode"],
        "tune_params": {"a": list(A_VALUES), "b": list(B_VALUES), "mode": [0, 1]},
        "objective": "time",
        "cache": cache,
    }


def t4_results() -> dict:
    """The same recording as T4, with one config that the restrictions refuse."""
    results = [
        {
            "configuration": {name: record[name] for name in ("a", "b", "mode")},
            "times": {"compilation": 1.0, "runtimes": record["times"]},
            "invalidity": "compile" if isinstance(record["time"], str) else "correct",
            "correctness": 1,
            "objectives": ["time"],
            "measurements": []
            if isinstance(record["time"], str)
            else [{"name": "time", "value": record["time"], "unit": "ms"}],
        }
        for record in kernel_tuner_cache()["cache"].values()
    ]
    refused = {**results[0], "configuration": {"a": 32, "b": 1, "mode": 0}}
    results.append({**refused, "invalidity": "constraints"})
    return {"metadata": {}, "schema_version": "1.0.0", "results": results}


def write_json(path, data) -> str:
    path.write_text(json.dumps(data))
    return str(path)
