"""How the tokens of a batch are spread over its requests: the mixes that a config is timed on."""

from __future__ import annotations

import random

__all__ = ["LENGTH_MIXES", "NUM_VARIANTS", "request_lengths"]

LENGTH_MIXES = ("equal", "skewed", "uniform", "mixed")
"""``equal``: ``kv_len`` each. ``skewed``: one request of ``kv_len``, the others a sixteenth of it.
``uniform``: evenly spread from 1 to ``kv_len``, in random order. ``mixed``: what a page table with
room for ``kv_len`` tokens a request may hold; its variants are timed in turn."""

NUM_VARIANTS = 4
"""Variants of ``mixed``: full, half full, uniform, and one long request among short ones."""

_SHORT_SHARE = 16


def request_lengths(mix: str, batch: int, kv_len: int, seed: int) -> list[int]:
    """Tokens of every request, at least 1; ``seed`` orders them and picks the variant of a mix.

    The total depends on the seed only through the variant, so copies of one problem move equally
    many bytes.
    """
    short = max(1, kv_len // _SHORT_SHARE)
    if mix == "mixed":
        variant = seed % NUM_VARIANTS
        if variant == 1:
            return [max(1, kv_len // 2)] * batch
        if variant == 3:
            # The long request is as long as the page table has room for, and a limit allows.
            room = batch * kv_len - (batch - 1) * short
            return _skewed(batch, min(_SHORT_SHARE * kv_len, room), short, seed)
        mix = "uniform" if variant == 2 else "equal"
    if mix == "skewed":
        return _skewed(batch, kv_len, short, seed)
    return _uniform(batch, kv_len, seed) if mix == "uniform" else [kv_len] * batch


def _skewed(batch: int, longest: int, short: int, seed: int) -> list[int]:
    lengths = [short] * batch
    lengths[random.Random(seed).randrange(batch)] = longest
    return lengths


def _uniform(batch: int, kv_len: int, seed: int) -> list[int]:
    lengths = [max(1, round((i + 0.5) * kv_len / batch)) for i in range(batch)]
    random.Random(seed).shuffle(lengths)
    return lengths
