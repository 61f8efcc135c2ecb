"""How many codes of P are another's on a GPU: at most one in a hundred thousand, for every mode.

``-rP`` prints the counts. The same count runs without a GPU in test_rounding.py (Triton) and
test_tilelang_on_host.py.
"""

from __future__ import annotations

import functools

import pytest
import torch
from fp4_calls import MODES, problem_of, run
from fp4_codes import check_codes
from tilescout.kernels.base import Config
from tilescout.kernels.fp4_attention import reference as ref
from tilescout.kernels.registry import template
from tilescout.search_spaces.registry import joint_space
from tilescout.tuner.environment import current_device

pytestmark = pytest.mark.gpu

SIZES = {"query_len": 512, "kv_len": 1024, "head_dim": 128, "num_qo_heads": 4}
"""Two million codes: twenty of them may differ."""
TEMPLATES = ("triton_emulated", "tilelang_emulated", "triton_native", "tilelang_native")


def config_for(problem, name: str) -> Config:
    """The template's default, TileLang's winner on an H200; skips where it serves nothing."""
    device = current_device()
    assert device is not None
    reason = template(problem.op, name).supports(problem, device)
    if reason is not None:
        pytest.skip(reason)
    if name == "tilelang_emulated":
        values = {"block_m": 128, "block_n": 128, "num_stages": 2, "load": "tma_ws"}
        return Config.of(name, values)
    return joint_space(problem, device, [name]).default


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", TEMPLATES)
def test_codes_are_the_references(name: str, mode: str) -> None:
    products = name.partition("_")[2]
    problem = problem_of(**SIZES, **MODES[mode], products=products)
    config = config_for(problem, name)
    inputs = ref.make_inputs(problem, device="cuda", seed=5)
    check_codes(f"{name}, {mode}", problem, inputs, functools.partial(run, config=config))
    torch.cuda.empty_cache()
