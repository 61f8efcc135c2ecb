"""What ``plan`` of FlashInfer's decode wrapper is given, checked, and what ``run`` keeps of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import UnsupportedError, UsageError
from ..kernels.paged_decode.inputs import Rope
from .page_table import PageTable

__all__ = ["Plan", "PlanOptions", "alibi_slopes", "refuse", "wrong"]

_POSITIONS = ("NONE", "ROPE_LLAMA", "ALIBI")
_Dtype = str | torch.dtype | None


@dataclass(frozen=True)
class Plan:
    """What ``run`` needs of the last ``plan``."""

    table: PageTable
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    q_len_per_req: int
    q_dtype: torch.dtype
    kv_dtype: torch.dtype
    window_left: int
    logits_soft_cap: float | None
    sm_scale: float | None
    is_causal: bool
    rope: Rope | None
    alibi_slopes: torch.Tensor | None


@dataclass(frozen=True)
class PlanOptions:
    """The options of ``plan`` with FlashInfer's defaults, checked."""

    pos_encoding_mode: str = "NONE"
    window_left: int = -1
    logits_soft_cap: float | None = None
    q_data_type: _Dtype = "float16"
    kv_data_type: _Dtype = None
    o_data_type: _Dtype = None
    data_type: _Dtype = None
    sm_scale: float | None = None
    rope_scale: float | None = None
    rope_theta: float | None = None
    non_blocking: bool = True
    block_tables: torch.Tensor | None = None
    seq_lens: torch.Tensor | None = None
    fixed_split_size: int | None = None
    disable_split_kv: bool = False
    q_len_per_req: int = 1
    window_right: int = 0
    is_causal: bool | None = None
    use_token_head_sf: bool = False

    @classmethod
    def of(cls, given: dict[str, Any]) -> PlanOptions:
        """The options of a call.

        Raises:
            UsageError: an option that does not exist or has a wrong value.
            UnsupportedError: an option is refused.
        """
        unknown = [name for name in given if name not in cls.__dataclass_fields__]
        if unknown:
            known = ", ".join(cls.__dataclass_fields__)
            raise UsageError(f"plan has no argument {unknown[0]!r}: it takes {known}")
        options = cls(**given)
        if options.pos_encoding_mode not in _POSITIONS:
            allowed = f"one of {', '.join(_POSITIONS)}"
            raise wrong("pos_encoding_mode", options.pos_encoding_mode, allowed)
        if options.q_len_per_req < 1:
            raise wrong("q_len_per_req", options.q_len_per_req, "at least 1")
        reason = "how KV is split is the winner's choice"
        refuse("fixed_split_size", options.fixed_split_size, reason)
        refuse("disable_split_kv", options.disable_split_kv or None, reason)
        refuse("window_right", options.window_right or None, "only 0 is served: nothing to come")
        scales = "there are no scales by token and head"
        refuse("use_token_head_sf", options.use_token_head_sf or None, scales)
        if options.o_data_type is not None and _dtype(options.o_data_type) != options.q_dtype:
            raise UnsupportedError(
                f"o_data_type={options.o_data_type!r} is not supported: the output has q's dtype, "
                f"{options.q_dtype}; convert it afterwards"
            )
        return options

    @property
    def q_dtype(self) -> torch.dtype:
        """``data_type`` stands for both where it is given, as in FlashInfer."""
        return _dtype(self.q_data_type if self.data_type is None else self.data_type)

    @property
    def kv_dtype(self) -> torch.dtype:
        """Dtype of the cache."""
        given = self.kv_data_type if self.data_type is None else self.data_type
        return self.q_dtype if given is None else _dtype(given)

    @property
    def rope(self) -> Rope | None:
        """The rotation, with FlashInfer's defaults."""
        if self.pos_encoding_mode != "ROPE_LLAMA":
            return None
        return Rope(theta=self.rope_theta or 1e4, scale=self.rope_scale or 1.0)


def _dtype(value: _Dtype) -> torch.dtype:
    found = getattr(torch, value, None) if isinstance(value, str) else value
    if not isinstance(found, torch.dtype):
        raise wrong("data type", value, "a torch dtype or its name, e.g. 'bfloat16'")
    return found


def alibi_slopes(num_heads: int) -> torch.Tensor:
    """Slopes of the ALiBi paper (Press et al., 2022) for any number of heads.

    With n the largest power of two: 2^(-8 i / n) for i = 1 to n, then every other one of 2n heads.
    """
    n = 1 << (num_heads.bit_length() - 1)
    exponents = [8.0 * i / n for i in range(1, n + 1)]
    exponents += [4.0 * i / n for i in range(1, 2 * (num_heads - n), 2)]
    return torch.tensor([math.exp2(-e) for e in exponents], dtype=torch.float32)


def refuse(name: str, value: object, reason: str) -> None:
    """Raises where an argument that is not served is given.

    Raises:
        UnsupportedError: ``value`` is not None.
    """
    if value is not None:
        raise UnsupportedError(f"{name}={value!r} is not supported: {reason}")


def wrong(what: str, value: object, allowed: str) -> UsageError:
    """The error of an argument that the wrapper cannot take."""
    return UsageError(
        f"{what} in BatchDecodeWithPagedKVCacheWrapper is {value!r}: must be {allowed}"
    )
