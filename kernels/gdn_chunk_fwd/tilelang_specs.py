"""The scan of a config, specialised: what TileLang gets; and the rows that TMA can read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..tilelang_spec import TileLangKernelSpec
from .tilelang_config import GdnChunkTileLangConfig
from .triton_specs import TensorTraits

if TYPE_CHECKING:
    import torch

__all__ = [
    "ELEMENTS_PER_STRIDE",
    "SCAN_KERNEL",
    "SCAN_MODULE",
    "SCAN_SOURCES",
    "misalignment",
    "scan_spec",
]

SCAN_MODULE = f"{__package__}.tilelang_kernel"
SCAN_SOURCES = tuple(
    f"{__package__}.tilelang_{name}"
    for name in ("tiles_kernel", "joint_kernel", "roles_kernel", "config")
)
"""Modules that the device code takes parts and constants from."""
_PROGRAM = "gdn_chunk_tilelang_scan"
SCAN_KERNEL = f"{_PROGRAM}_kernel"
ELEMENTS_PER_STRIDE = 8  # of the device code, which is not imported where it need not be compiled
_INDEX_DTYPES = {"i32": "int32", "i64": "int64"}


def scan_spec(config: GdnChunkTileLangConfig, traits: TensorTraits) -> TileLangKernelSpec:
    """The kernel of the scan."""
    problem = config.problem
    uses_wgmma = config.word("scan_matmul") == "wgmma"
    parameters: dict[str, Any] = {
        "dtype": problem.dtype,
        "seqlen_dtype": _INDEX_DTYPES[traits.seqlen_type],
        "head_dim_k": problem.head_dim_k,
        "head_dim_v": problem.head_dim_v,
        "chunk": config.chunk,
        "is_cut": config.segment > 0,
        "is_wy": config.form == "wy",
        "has_scores": config.has_scores,
        "is_v_first": problem.state_layout == "VK",
        "is_varlen": traits.is_varlen,
        "has_initial_state": traits.has_initial_state,
        "has_final_state": traits.has_final_state,
        "block_v": config.block_v,
        "num_stages": config.number("scan_num_stages"),
        "producer": config.word("scan_producer"),
        "roles": config.word("scan_roles"),
        "num_turns": int(config.config.get("scan_num_turns") or 1),
        "uses_wgmma": uses_wgmma,
    }
    return TileLangKernelSpec(
        module=SCAN_MODULE,
        sources=SCAN_SOURCES,
        factory="scan_program",
        program=_PROGRAM,
        parameters=parameters,
        pass_configs={
            "tl.disable_wgmma": not uses_wgmma,
            "tl.disable_warp_specialized": True,
            # Asynchronous copies are under way where the planner of shared memory does not see
            # them, and the barriers that the ring needs are in the program.
            "tl.disable_shared_memory_reuse": True,
            "tl.disable_thread_storage_sync": True,
        },
    )


def misalignment(tensor: torch.Tensor, name: str) -> str | None:
    """None, or why the rows of the tensor are not contiguous pieces of 16 bytes."""
    strides, last = tensor.stride()[1:3], tensor.stride(3)
    if last != 1:
        return f"{name} has strides {tensor.stride()}; the last must be 1"
    if any(stride % ELEMENTS_PER_STRIDE for stride in strides):
        return f"{name} has strides {tensor.stride()}, no multiples of {ELEMENTS_PER_STRIDE}"
    if tensor.data_ptr() % 16:
        return f"{name} starts {tensor.data_ptr() % 16} bytes after a multiple of 16"
    return None
