"""Public functions with the signatures people know, dispatched to the winners of the database."""

from __future__ import annotations

from .paged_decode import paged_decode, resolve_paged_decode

__all__ = ["paged_decode", "resolve_paged_decode"]
