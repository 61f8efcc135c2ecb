"""Public functions with the signatures people know, dispatched to the winners of the database."""

from __future__ import annotations

from . import gdn
from .paged_decode import paged_decode, resolve_paged_decode

__all__ = ["gdn", "paged_decode", "resolve_paged_decode"]
