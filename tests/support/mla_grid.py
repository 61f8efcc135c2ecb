"""Cases of MLA decode over every axis of its semantics and of the template that serves it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from tilescout.kernels.base import Config, ParameterValue
from tilescout.kernels.paged_decode import (
    PagedDecodeInputs,
    PagedDecodeOutputs,
    PagedDecodeProblem,
)
from tilescout.kernels.paged_decode.reference import paged_inputs
from tilescout.search_spaces.constraints import Constraint
from tilescout.search_spaces.parameters import ActiveWhen, Parameter, categorical, ordered
from tilescout.search_spaces.space import SearchSpace

Case = Mapping[str, ParameterValue]
DIMS = {"576 of 512": (576, 512), "160 of 128": (160, 128), "80 of 64": (80, 64)}
STRIDES = ("dense", "pitched", "odd")
SHARED = (
    *("block_n", "block_m", "swap_ab", "page_tiles", "prefetch_pages", "launch_pdl"),
    "loop_body",
    "split_rule",
)
"""Parameters of the template that are axes of the grid."""
SPLITS: dict[str, dict[str, ParameterValue]] = {
    "none": {},
    "count": {"num_splits": 3},
    "size": {"split_tokens": 64},
    "stream": {"ctas_per_sm": 1},
}


def case_space(
    *,
    lengths: Sequence[str],
    heads: Sequence[int],
    query_lens: Sequence[int],
    pages: Sequence[int],
) -> SearchSpace:
    """All axes; the first values are the plainest."""
    is_split = ActiveWhen("split_rule", ("count", "size", "stream"))
    parameters: tuple[Parameter, ...] = (
        ordered("heads", *heads),
        ordered("query_len", *query_lens),
        ordered("page_size", *pages),
        categorical("dims", *DIMS),
        categorical("dtype", "bfloat16", "float16"),
        categorical("kv_dtype", "as q", "float8_e4m3fn", "float8_e5m2"),
        ordered("window_left", -1, 0, 9, 40),
        categorical("is_causal", True, False),
        categorical("soft_cap", False, True),
        categorical("sinks", False, True),
        categorical("kv_layout", "NHD", "HND"),
        categorical("table", "csr", "dense"),
        categorical("lse", "2", "e", "none"),
        categorical("lengths", *lengths),
        categorical("strides", *STRIDES),
        categorical("scales", "numbers", "tensors"),
        ordered("block_n", 16, 32, 64),
        ordered("block_m", 16, 8, 32),
        categorical("swap_ab", False, True),
        categorical("page_tiles", False, True),
        categorical("prefetch_pages", False, True),
        categorical("split_rule", *SPLITS),
        categorical("loop_body", "flat", "branch", "two_branches"),
        categorical("launch_pdl", False, True),
        categorical("merge", "kernel", "last_block", active_when=is_split),
    )
    return SearchSpace(
        template="semantics",
        parameters=parameters,
        constraints=(Constraint("what the template's space refuses", _refusal),),
        default=Config.of(
            "semantics", {p.name: p.values[0] for p in parameters if p.active_when is None}
        ),
    )


def _refusal(case: Config) -> str | None:
    if case["block_m"] == 8 and not case["swap_ab"]:
        return "a matrix tile has 16 rows"
    if case["page_tiles"] and int(case["page_size"]) % int(case["block_n"]):
        return "tiles cross the borders of pages"
    if case["page_tiles"] and int(case["window_left"]) >= 0:
        return "a window shifts tiles off the borders of pages"
    return None


def config_of(case: Case) -> Config:
    """The config of the template that the case asks for."""
    values = {name: case[name] for name in SHARED} | SPLITS[str(case["split_rule"])]
    if "merge" in case:
        values["merge"] = case["merge"]
    rest = {"num_warps": 4, "num_stages": 2, "kv_eviction": "evict_normal"}
    return Config.of("triton_mla", values | rest)


def problem_of(case: Case, lengths: Sequence[int]) -> PagedDecodeProblem:
    head_dim, head_dim_v = DIMS[str(case["dims"])]
    return PagedDecodeProblem(
        batch=len(lengths),
        kv_len=max(1, *lengths),
        num_qo_heads=int(case["heads"]),
        num_kv_heads=1,
        head_dim=head_dim,
        page_size=int(case["page_size"]),
        dtype=str(case["dtype"]),
        kv_dtype="" if case["kv_dtype"] == "as q" else str(case["kv_dtype"]),
        query_len=int(case["query_len"]),
        head_dim_v=head_dim_v,
        kv_layout=str(case["kv_layout"]),
        window_left=int(case["window_left"]),
        is_causal=bool(case["is_causal"]),
        has_soft_cap=bool(case["soft_cap"]),
        has_sinks=bool(case["sinks"]),
    )


def inputs_of(case: Case, lengths: Sequence[int], *, device: str) -> PagedDecodeInputs:
    """Inputs with NaN wherever a kernel must not look."""
    inputs = paged_inputs(
        problem_of(case, lengths),
        list(lengths),
        device=device,
        seed=1,
        num_unused_pages=2,
        poison=True,
        is_dense=case["table"] == "dense",
    )
    if case["scales"] == "tensors":
        scales = {"k_scale": [0.75], "v_scale": [1.25]}
        inputs = replace(
            inputs, **{name: torch.tensor(v, device=device) for name, v in scales.items()}
        )
    extra = {"dense": 0, "pitched": 16, "odd": 1}[str(case["strides"])]
    return with_pitch(inputs, extra) if extra else inputs


def with_pitch(inputs: PagedDecodeInputs, extra: int) -> PagedDecodeInputs:
    """The same values in rows that are ``extra`` elements further apart."""
    k_cache = _pitched(inputs.k_cache, extra)
    v_cache = k_cache[..., : inputs.v_cache.shape[3]]
    return replace(inputs, q=_pitched(inputs.q, extra), k_cache=k_cache, v_cache=v_cache)


def _pitched(tensor: torch.Tensor, extra: int) -> torch.Tensor:
    bits = tensor if tensor.element_size() > 1 else tensor.view(torch.uint8)
    padded = bits.new_zeros((*bits.shape[:-1], bits.shape[-1] + extra))
    padded[..., : bits.shape[-1]] = bits
    return padded.view(tensor.dtype)[..., : bits.shape[-1]]


def outputs_of(case: Case, inputs: PagedDecodeInputs) -> PagedDecodeOutputs:
    """Outputs filled with NaN."""
    shape = (*inputs.q.shape[:2], inputs.v_cache.shape[3])
    out = inputs.q.new_full(shape, float("nan"))
    lse = None
    if case["lse"] != "none":
        lse = inputs.q.new_full(shape[:2], float("nan"), dtype=torch.float32)
    return PagedDecodeOutputs(out, lse, "e" if case["lse"] == "e" else "2")
