"""Tilescout: finds, keeps and hands out the fastest correct kernel config for a GPU.

Public names are resolved on first use, so that importing the package loads nothing else.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "LookupResult": "tilescout.tuner.dispatch",
    "PagedDecodeProblem": "tilescout.kernels.paged_decode",
    "TilescoutError": "tilescout.errors",
    "adopt": "tilescout.tuner.adoption",
    "autotune": "tilescout.tuner.adoption",
    "capture": "tilescout.tuner.capture",
    "lookup": "tilescout.tuner.dispatch",
    "ops": "tilescout.ops",
    "policy": "tilescout.tuner.dispatch",
    "tune": "tilescout.tuner.tune",
    "tuning": "tilescout.tuner.adoption",
    "use_bundle": "tilescout.tuner.bundle",
    "use_external": "tilescout.tuner.external",
    "use_lock": "tilescout.tuner.dispatch",
    "warmup": "tilescout.ops.warmup",
}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(_PUBLIC[name])
    # ``ops`` is itself a module; the other names are attributes of theirs.
    found = module if module.__name__.rpartition(".")[2] == name == "ops" else getattr(module, name)
    # The next time it is found without this function, which takes longer than a look-up.
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
