"""Problems, configs and runs of the FP4 attention backward that its tests share."""

from __future__ import annotations

from tilescout.kernels.base import Config
from tilescout.kernels.fp4_attention_bwd import (
    Fp4AttentionBwdInputs,
    Fp4AttentionBwdOutputs,
    Fp4AttentionBwdProblem,
)
from tilescout.kernels.fp4_attention_bwd import reference as ref
from tilescout.kernels.registry import template

PASSES = {"together": ("dkdv", "dq"), "apart": ("dk", "dv", "dq")}


def problem_of(**changes: object) -> Fp4AttentionBwdProblem:
    """A small problem; fields by name."""
    fields: dict[str, object] = {
        "batch": 1,
        "num_qo_heads": 2,
        "num_kv_heads": 1,
        "query_len": 70,
        "kv_len": 133,
        "head_dim": 64,
        "products": "emulated",
        "dtype": "float32",
    }
    return Fp4AttentionBwdProblem(**{**fields, **changes})  # type: ignore[arg-type]


def config_of(
    algorithm: str = "together", block_m: int = 64, block_n: int = 64, prepare_block_m: int = 32
) -> Config:
    """A config with the same tile in every pass."""
    values: dict[str, int | str] = {
        "algorithm": algorithm,
        "prepare_block_m": prepare_block_m,
        "prepare_num_warps": 4,
    }
    tile = {"block_m": block_m, "block_n": block_n, "num_warps": 4, "num_stages": 2}
    for part in PASSES[algorithm]:
        values |= {f"{part}_{name}": value for name, value in tile.items()}
    return Config.of("triton", values)


def run(
    problem: Fp4AttentionBwdProblem, inputs: Fp4AttentionBwdInputs, config: Config | None = None
) -> Fp4AttentionBwdOutputs:
    """The gradients of one launch."""
    config = config or config_of()
    outputs = ref.make_outputs(problem, inputs)
    template(problem.op, config.template).build(problem, config, inputs).launch(inputs, outputs)
    return outputs
