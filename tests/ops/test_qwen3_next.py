"""A client as it is: transformers' Qwen3-Next, random weights, its gated delta net served by ours.

Its two functions are replaced by ours in its own module and nothing else of it is touched. Logits
of a prefill and of decode steps after it are compared with those of its own torch path.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from tilescout import ops

interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"
)
TOLERANCES = {torch.float32: 2e-3, torch.bfloat16: 5e-2}
"""Largest difference of logits over the largest logit. fp32: the interpreter's products are exact,
the chunks sum in another order; bf16: 8 bits of each of some ten roundings a layer."""
OPTIONS = {
    *("g", "beta", "initial_state", "output_final_state", "use_qk_l2norm_in_kernel", "cu_seqlens"),
}


@pytest.fixture(scope="module")
def modeling() -> Any:
    """The module of the model; importing it warns of packages that it does without."""
    pytest.importorskip("transformers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return import_module("transformers.models.qwen3_next.modeling_qwen3_next")


def model_of(modeling: Any, *, head_dim: int, dtype: torch.dtype, device: str) -> Any:
    """Three layers of gated delta net and one of attention, as the model interleaves them."""
    config = modeling.Qwen3NextConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=head_dim,
        linear_value_head_dim=head_dim,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    model = modeling.Qwen3NextForCausalLM(config)
    return model.to(dtype=dtype, device=device).eval()


def served_by_ours(modeling: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Puts our functions in the place of the model's; how often each is called."""
    calls = {"prefill": 0, "step": 0}

    def counted(kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(q: Any, k: Any, v: Any, **options: Any) -> Any:
            calls[kind] += 1
            # The model hands on views of what its convolution gave, with channels before tokens,
            # and options of its own that are none of the function's.
            tokens = (x.contiguous() for x in (q, k, v))
            return function(*tokens, **{name: options[name] for name in OPTIONS & options.keys()})

        return call

    ours = {
        "torch_chunk_gated_delta_rule": counted("prefill", ops.gdn.chunk_gated_delta_rule),
        "torch_recurrent_gated_delta_rule": counted(
            "step", ops.gdn.fused_recurrent_gated_delta_rule
        ),
    }
    for name, function in ours.items():
        monkeypatch.setattr(modeling, name, function)
    return calls


def logits_of(model: Any, tokens: torch.Tensor, num_steps: int) -> list[torch.Tensor]:
    """Of a prefill of all tokens but the last few, and of a step for each of these."""
    first = tokens.shape[1] - num_steps
    found = model(tokens[:, :first], use_cache=True)
    logits = [found.logits[:, -1]]
    for at in range(first, tokens.shape[1]):
        found = model(tokens[:, at : at + 1], past_key_values=found.past_key_values, use_cache=True)
        logits.append(found.logits[:, -1])
    return logits


def assert_close(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    for step, (found, expected) in enumerate(zip(ours, theirs, strict=True)):
        error = (found.float() - expected.float()).abs().max() / expected.float().abs().max()
        assert error <= TOLERANCES[expected.dtype], f"step {step}: {error:.2g}"


def compare(modeling: Any, monkeypatch: pytest.MonkeyPatch, model: Any, sizes: Any) -> None:
    batch, prefill, num_steps = sizes
    device = next(model.parameters()).device
    tokens = torch.randint(3, 256, (batch, prefill + num_steps), device=device)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers' own use of torch
        theirs = logits_of(model, tokens, num_steps)
        with monkeypatch.context() as patch:
            calls = served_by_ours(modeling, patch)
            ours = logits_of(model, tokens, num_steps)
        other = logits_of(model, tokens.flip(0, 1), num_steps)
    assert calls == {"prefill": 3, "step": 3 * num_steps}
    assert_close(ours, theirs)
    with pytest.raises(AssertionError):
        assert_close(other, theirs)


@pytest.mark.interpreter
@interpreted
def test_logits_in_the_interpreter(modeling: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(modeling, head_dim=64, dtype=torch.float32, device="cpu")
    compare(modeling, monkeypatch, model, (1, 20, 3))


@pytest.mark.gpu
def test_logits_on_the_gpu(modeling: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(modeling, head_dim=128, dtype=torch.bfloat16, device="cuda")
    compare(modeling, monkeypatch, model, (2, 300, 32))
