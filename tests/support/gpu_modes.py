"""Modes of the GPU that a test switches on and that must not outlive it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def waiting_forbidden() -> Iterator[None]:
    """What waits for the device raises."""
    _set("error")
    try:
        yield
    finally:
        _set("default")


def _set(mode: str) -> None:
    with warnings.catch_warnings():
        # torch says that the mode may miss some waits.
        warnings.simplefilter("ignore", UserWarning)
        torch.cuda.set_sync_debug_mode(mode)
