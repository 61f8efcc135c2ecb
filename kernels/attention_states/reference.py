"""Plain-torch merging of attention states in fp64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch

__all__ = ["merge_reference"]


def merge_reference(
    outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor], lse_base: Literal["2", "e"] = "2"
) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, LSE) over the tokens of all states together, in fp64.

    Args:
        outs: ``[..., head_dim]`` each; values of a state without tokens are not used.
        lses: ``[...]`` each; infinite where the state saw no token.
        lse_base: Base of the logarithm in ``lses`` and in the result.
    """
    natural = math.log(2.0) if lse_base == "2" else 1.0
    exponents = torch.stack(list(lses)).double() * natural
    is_empty = exponents.isinf()
    exponents = exponents.masked_fill(is_empty, -math.inf)
    lse = torch.logsumexp(exponents, dim=0)
    # Rows that no state saw have -inf - (-inf) here.
    weights = (exponents - lse).masked_fill(is_empty, -math.inf).exp()
    values = torch.stack(list(outs)).double().masked_fill(is_empty[..., None], 0.0)
    return (weights[..., None] * values).sum(dim=0), lse / natural
