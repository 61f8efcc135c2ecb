"""Cases of paged decode over every axis of its semantics, with their problems and inputs."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from devices import H200
from tilescout.kernels.base import Config, ParameterValue
from tilescout.kernels.paged_decode import (
    PagedDecodeInputs,
    PagedDecodeOutputs,
    PagedDecodeProblem,
)
from tilescout.kernels.paged_decode.reference import paged_inputs
from tilescout.kernels.registry import template
from tilescout.search_spaces.constraints import Constraint
from tilescout.search_spaces.covering import CoveringSample, covering_sample
from tilescout.search_spaces.paged_decode import triton_space
from tilescout.search_spaces.parameters import Parameter, categorical, ordered
from tilescout.search_spaces.space import SearchSpace

BATCH, MAX_TOKENS = 4, 1500
LENGTHS = {
    "ragged": [77, 500, 3, 131],
    "zeros": [0, 301, 0, 45],
    "ones": [1, 1, 1, 1],
    "whole tiles": [64, 256, 128, 512],
    "one long": [16, MAX_TOKENS, 5, 64],
}
"""Tokens of the four requests."""

CHEAP = {
    "block_n": (16, 32, 64),
    "num_warps": (2, 4, 8),
    "num_stages": (1, 2, 3),
    "num_splits": (2, 3, 4, 6),
    "split_tokens": (128, 256),
    "ctas_per_sm": (1, 2),
}
"""Values of the template's parameters that compile fast."""
SHARED = ("split_rule", "merge", "swap_ab", "prefetch_pages", "launch_pdl")
"""Parameters of the template that are axes of the grid too."""
MAX_VALUES_PER_THREAD, MAX_ROTATED_PER_THREAD = 64, 24
"""Values of the tiles of q and K that a thread holds; a rotated one takes a sine and a cosine, and
256 of them took a compiler 70 s."""


def problem_of(case: Mapping[str, ParameterValue]) -> PagedDecodeProblem:
    group = int(case["group"])
    num_kv_heads = 1 if group > 5 else 2
    return PagedDecodeProblem(
        batch=BATCH,
        kv_len=MAX_TOKENS,
        num_qo_heads=group * num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_dim=int(case["head_dim"]),
        page_size=int(case["page_size"]),
        dtype=str(case["dtype"]),
        kv_dtype="" if case["kv_dtype"] == "as q" else str(case["kv_dtype"]),
        query_len=int(case["query_len"]),
        kv_layout=str(case["kv_layout"]),
        window_left=int(case["window_left"]),
        is_causal=bool(case["is_causal"]),
        has_soft_cap=bool(case["soft_cap"]),
        has_sinks=bool(case["sinks"]),
        has_alibi=bool(case["alibi"]),
        has_rope=bool(case["rope"]),
    )


def inputs_of(
    case: Mapping[str, ParameterValue], *, device: str, seed: int = 1
) -> PagedDecodeInputs:
    """Inputs with NaN wherever a kernel must not look."""
    inputs = paged_inputs(
        problem_of(case),
        LENGTHS[str(case["lengths"])],
        device=device,
        seed=seed,
        num_unused_pages=2,
        poison=True,
        is_dense=case["table"] == "dense",
    )
    if case["scales"] == "tensors":
        scales = {
            "k_scale": torch.tensor([0.75], device=device),
            "v_scale": torch.tensor([1.25], device=device),
        }
        inputs = replace(inputs, **scales)
    return _STRIDES[str(case["strides"])](inputs)


def _separate(inputs: PagedDecodeInputs) -> PagedDecodeInputs:
    """K and V in pools of their own, of equal strides."""
    return replace(inputs, k_cache=_pitched(inputs.k_cache), v_cache=_pitched(inputs.v_cache))


def _unequal(inputs: PagedDecodeInputs) -> PagedDecodeInputs:
    """V's rows further apart than K's."""
    return replace(inputs, v_cache=_pitched(inputs.v_cache, 16))


def _odd(inputs: PagedDecodeInputs) -> PagedDecodeInputs:
    """Rows of the pools and of q that start at no multiple of 16 bytes."""
    return replace(
        inputs,
        q=_pitched(inputs.q, 1),
        k_cache=_pitched(inputs.k_cache, 1),
        v_cache=_pitched(inputs.v_cache, 1),
    )


def _pitched(tensor: torch.Tensor, extra: int = 0) -> torch.Tensor:
    """A copy whose rows are ``extra`` elements further apart than they are long."""
    bits = tensor if tensor.element_size() > 1 else tensor.view(torch.uint8)
    padded = bits.new_zeros((*bits.shape[:-1], bits.shape[-1] + extra))
    padded[..., : bits.shape[-1]] = bits
    return padded.view(tensor.dtype)[..., : bits.shape[-1]]


_STRIDES = {
    "interleaved": lambda inputs: inputs,
    "separate": _separate,
    "unequal": _unequal,
    "odd": _odd,
}


def outputs_of(case: Mapping[str, ParameterValue], inputs: PagedDecodeInputs) -> PagedDecodeOutputs:
    """Outputs filled with NaN."""
    nan = float("nan")
    lse = None
    if case["lse"] != "none":
        lse = inputs.q.new_full(inputs.q.shape[:2], nan, dtype=torch.float32)
    out = torch.full(inputs.q.shape, nan, dtype=inputs.q.dtype, device=inputs.q.device)
    return PagedDecodeOutputs(out, lse, "e" if case["lse"] == "e" else "2")


def _semantics() -> tuple[Parameter, ...]:
    booleans = ("is_causal", "soft_cap", "sinks", "alibi", "rope")
    return (
        categorical("kv_layout", "NHD", "HND"),
        categorical("table", "csr", "dense"),
        ordered("page_size", 1, 7, 16, 48, 64, 256, 528, 1024),
        ordered("head_dim", 64, 96, 128, 192, 256),
        ordered("group", 1, 2, 3, 4, 5, 7, 8, 12, 16),
        ordered("query_len", 1, 2, 4, 8),
        categorical("dtype", "bfloat16", "float16"),
        categorical("kv_dtype", "as q", "float8_e4m3fn", "float8_e5m2"),
        ordered("window_left", -1, 0, 5, 100),
        categorical("lse", "none", "2", "e"),
        categorical("lengths", *LENGTHS),
        categorical("strides", *_STRIDES),
        categorical("scales", "numbers", "tensors"),
        *(categorical(name, True, False) for name in booleans),
    )


def grid_space() -> SearchSpace:
    """The product of all axes, with how the Triton template splits and merges."""
    semantics = _semantics()
    default: dict[str, ParameterValue] = {p.name: p.values[0] for p in semantics}
    default["alibi"] = False
    of_template = [
        p for p in triton_space(problem_of(default), H200).parameters if p.name in SHARED
    ]
    default |= {p.name: p.values[0] for p in of_template if p.active_when is None}
    default["split_rule"] = "none"

    def has_one_bias(config: Config) -> str | None:
        return "peers disagree on the order" if config["soft_cap"] and config["alibi"] else None

    return SearchSpace(
        template="semantics",
        parameters=(*semantics, *of_template),
        constraints=(Constraint("soft cap or ALiBi", has_one_bias),),
        default=Config.of("semantics", default),
    )


@cache
def grid_cases(num_cases: int) -> CoveringSample:
    return covering_sample(grid_space(), num_cases, seed=0)


def refusal(case: Mapping[str, ParameterValue], template_name: str = "triton") -> str | None:
    """Why the template does not serve the case, or None."""
    return template("paged_decode", template_name).supports(problem_of(case), H200)


def config_of(case: Config) -> Config:
    """A config of the Triton template that splits and merges as the case says and compiles fast.

    The space of a problem with a short window has no splits; the kernel must bear them there too.
    """
    space = triton_space(replace(problem_of(case.as_dict()), window_left=-1), H200)
    limit = MAX_ROTATED_PER_THREAD if case["rope"] else MAX_VALUES_PER_THREAD
    rng = random.Random(case.config_id)
    drawn = [_draw(space, case, rng) for _ in range(200)]
    valid = [config for config in drawn if space.check(config) is None]
    assert valid, f"no config for {case}"
    small = [c for c in valid if _values_per_thread(c, int(case["head_dim"])) <= limit]
    return small[0] if small else min(valid, key=lambda c: _values_per_thread(c, 1))


def _draw(space: SearchSpace, case: Config, rng: random.Random) -> Config:
    values: dict[str, Any] = {}
    for parameter in space.active_parameters(dict(case.values)):
        wanted = case.get(parameter.name)
        cheap = [v for v in CHEAP.get(parameter.name, ()) if v in parameter.values]
        values[parameter.name] = rng.choice(cheap or parameter.values) if wanted is None else wanted
    return Config.of(space.template, values)


def _values_per_thread(config: Config, head_dim: int) -> float:
    rows = int(config["block_n"]) + int(config["block_m"])
    return rows * head_dim / (32 * int(config["num_warps"]))
