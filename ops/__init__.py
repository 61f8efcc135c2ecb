"""Public functions with the signatures people know, dispatched to the winners of the database."""

from __future__ import annotations

from . import gdn
from .attention_states import merge_state, merge_states
from .paged_decode import paged_decode, resolve_paged_decode

__all__ = ["gdn", "merge_state", "merge_states", "paged_decode", "resolve_paged_decode"]
