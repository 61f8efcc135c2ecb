"""Launches the TileLang template: Triton's kernels of the preparation, then the scan."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from ...errors import UsageError
from ..tilelang_spec import BoundTileLangKernel, TileLangKernelSpec
from .inputs import GdnChunkInputs, GdnChunkOutputs
from .tilelang_config import GdnChunkTileLangConfig
from .tilelang_specs import ELEMENTS_PER_STRIDE, misalignment, scan_spec
from .triton_config import SCAN
from .triton_launcher import GdnChunkTritonLauncher
from .triton_specs import TensorTraits

__all__ = ["GdnChunkTileLangLauncher"]

_MAX_BOUND = 512
"""Scans that stay loaded: every launcher of equal static shapes shares them."""


@lru_cache(maxsize=_MAX_BOUND)
def _load(spec: TileLangKernelSpec, arch: int) -> BoundTileLangKernel:
    return spec.bind(arch)


class GdnChunkTileLangLauncher(GdnChunkTritonLauncher):
    """Compiled kernels and scratch memory for up to so many tokens and sequences."""

    config: GdnChunkTileLangConfig

    def __init__(
        self, config: GdnChunkTileLangConfig, inputs: GdnChunkInputs, tokens: int, sequences: int
    ) -> None:
        super().__init__(config, inputs, tokens, sequences)
        self._scans: dict[TensorTraits, BoundTileLangKernel] = {}
        for traits in {traits for _, traits in self._kernels}:
            self._scan(traits)

    def _scan(self, traits: TensorTraits) -> BoundTileLangKernel:
        """The scan for these tensors, compiled at first use."""
        if traits not in self._scans:
            spec = scan_spec(self.config, traits)
            self._scans[traits] = _load(spec, self.arch)
        return self._scans[traits]

    def launch(self, inputs: GdnChunkInputs, outputs: GdnChunkOutputs) -> None:
        """Enqueues the kernels of all parts.

        Raises:
            UsageError: the rows of a tensor are no contiguous pieces of 16 bytes, or the call is
                larger than the launcher was built for.
        """
        traits, values = self._call(inputs, outputs)
        _check_rows(values)
        for part in self.config.parts:
            self._launch_part(part, traits, values)
        self._launch_scan(traits, values)

    def launch_part(self, part: str, inputs: GdnChunkInputs, outputs: GdnChunkOutputs) -> None:
        """Enqueues the kernels of one part, on what the parts before it left."""
        if part != SCAN:
            super().launch_part(part, inputs, outputs)
            return
        traits, values = self._call(inputs, outputs)
        _check_rows(values)
        self._launch_scan(traits, values)

    def _launch_scan(self, traits: TensorTraits, values: dict[str, Any]) -> None:
        config, problem = self.config, self.config.problem
        is_wy = config.form == "wy"
        scratch_tokens = values["scratch_tokens"]
        tokens, sequences = values["num_tokens"], values["num_sequences"]
        segments = config.max_segments(tokens, sequences)
        # The program's tensors have one axis of tokens and one of states, as long as this call is;
        # scratch memory may be for more.
        q, k, out = (_merged(values[name])[:tokens] for name in ("q", "k", "out"))
        v = values["u"] if is_wy else _merged(values["v"])
        initial = _merged(values["initial_state"]) if traits.has_initial_state else None
        final = _merged(values["final_state"]) if traits.has_final_state else None
        entry = None
        if config.segment:
            shape = (segments * problem.num_v_heads, problem.head_dim_k, problem.head_dim_v)
            entry = values["entry_state"][:segments].view(shape)
        strides = [x.stride(axis) for x in (q, k, v, out) for axis in (0, 1)]
        self._scan(traits)(
            q,
            k,
            v,
            values["cu_seqlens"] if traits.is_varlen else None,
            values["total_decay"],
            values["w" if is_wy else "inverse"],
            values["scores"] if config.has_scores else None,
            initial,
            entry,
            out,
            final,
            values["scale"],
            *(stride // ELEMENTS_PER_STRIDE for stride in strides),
            tokens,
            scratch_tokens,
            sequences,
            values["tokens_each"],
            config.segment,
            segments,
            problem.num_heads,
            problem.num_v_heads,
        )


def _merged(x: torch.Tensor) -> torch.Tensor:
    """A view with the first two axes as one."""
    return x.view(x.shape[0] * x.shape[1], *x.shape[2:])


def _check_rows(values: dict[str, Any]) -> None:
    reasons = (misalignment(values[name], name) for name in ("q", "k", "v", "out"))
    reason = next((reason for reason in reasons if reason is not None), None)
    if reason is not None:
        raise UsageError(
            f"these tensors are not supported by gdn_chunk_fwd/tilelang: {reason}; use template "
            "'triton', or lay them out in rows that start at multiples of 16 bytes"
        )
