"""What one matrix instruction does, read from its SASS name, and the peak rate it can reach."""

from __future__ import annotations

import re
from functools import cache

from ...kernels.device import DeviceSpec
from .constants import CostConstants
from .occupancy import HARDWARE
from .roofline import peak_flops_per_us

__all__ = ["flops_per_warp", "matrix_flops_per_us"]

_WARPS_OF_A_GROUP = 4
_WARP_SHAPE = re.compile(r"(?P<m>16|8)(?P<n>8)(?P<k>\d{1,3})$")
_GROUP_SHAPE = re.compile(r"(?P<m>\d+)x(?P<n>\d+)x(?P<k>\d+)$")


@cache
def flops_per_warp(mma_kind: str) -> float:
    """Operations that one instruction does for each warp that issues it.

    ``HMMA.16816.F32`` is 16 x 8 x 16, ``HGMMA.64x256x16.F32`` is shared by the four warps of a
    group. 0 where the name has no shape (tcgen05) and for ``none``.
    """
    _, _, modifiers = mma_kind.partition(".")
    shape = modifiers.partition(".")[0]
    for pattern, num_warps in ((_WARP_SHAPE, 1), (_GROUP_SHAPE, _WARPS_OF_A_GROUP)):
        found = pattern.match(shape)
        if found:
            return 2.0 * int(found["m"]) * int(found["n"]) * int(found["k"]) / num_warps
    return 0.0


def matrix_flops_per_us(
    mma_kind: str, compute_dtype: str, device: DeviceSpec, constants: CostConstants
) -> float:
    """The rate of the matrix instructions that a binary really has; the float32 rate without."""
    if mma_kind == "none":
        return constants.matrix_efficiency * peak_flops_per_us(device, "float32")
    peak = constants.matrix_efficiency * peak_flops_per_us(device, compute_dtype)
    opcode = mma_kind.partition(".")[0]
    is_group_mma = opcode.startswith("UTC") or opcode.endswith("GMMA")
    has_group_mma = device.compute_capability[0] in HARDWARE.group_mma_majors
    return peak if is_group_mma or not has_group_mma else peak * constants.warp_mma_share
