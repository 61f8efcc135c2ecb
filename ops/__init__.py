"""Public functions with the signatures people know, dispatched to the winners of the database."""

from __future__ import annotations

from ..kernels.paged_decode.inputs import Rope
from . import flashinfer, gdn
from .append_nvfp4 import append_nvfp4_kv_cache
from .attention_states import merge_state, merge_states
from .debug_checks import debugging
from .fp4_attention import fp4_attention, sageattn3_blackwell
from .fp4_training import fp4_attention_training
from .mla_decode import mla_decode
from .page_table import PageTable
from .paged_decode import paged_decode, resolve_paged_decode
from .shared_prefix_decode import shared_prefix_decode

__all__ = [
    "PageTable",
    "Rope",
    "append_nvfp4_kv_cache",
    "debugging",
    "flashinfer",
    "fp4_attention",
    "fp4_attention_training",
    "gdn",
    "merge_state",
    "merge_states",
    "mla_decode",
    "paged_decode",
    "resolve_paged_decode",
    "sageattn3_blackwell",
    "shared_prefix_decode",
]
