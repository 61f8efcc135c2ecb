"""Finds NVIDIA's tools that read machine code: they come with the Triton wheel."""

from __future__ import annotations

import shutil
from pathlib import Path

from ..errors import DeviceError

__all__ = ["cuda_tool_path"]


def cuda_tool_path(name: str, consequence: str) -> Path:
    """The program, from the Triton wheel or the search path.

    Args:
        name: ``cuobjdump`` or ``nvdisasm``.
        consequence: What does not work without it, for the message.

    Raises:
        DeviceError: it is in neither.
    """
    try:
        from triton import knobs

        return Path(getattr(knobs.nvidia, name).path)
    except (ImportError, AttributeError, RuntimeError):
        found = shutil.which(name)
    if found is None:
        raise DeviceError(
            f"{name} is neither in the installed triton nor on PATH, and without it {consequence}; "
            "install triton >= 3.6 from PyPI or the CUDA toolkit, or set "
            f"TRITON_{name.upper()}_PATH"
        )
    return Path(found)
