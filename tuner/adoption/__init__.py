"""Users' own Triton kernels under the same search, store and dispatch.

``autotune`` decorates a ``@triton.jit`` function, ``adopt`` takes over kernels that
``@triton.autotune`` decorates already; both leave the way the kernel is called as it is.
"""

from __future__ import annotations

from .adopt import Adoption, adopt
from .decorator import autotune
from .kernel import AdoptedKernel, OnMiss, tuning

__all__ = ["AdoptedKernel", "Adoption", "OnMiss", "adopt", "autotune", "tuning"]
