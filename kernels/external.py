"""Other people's kernels as templates: libraries that compete with ours where they are installed.

Owns which libraries there are, whether they are installed in a version that is known, and whether
they may serve. No library is imported before one of its configs is compiled or built. What a
library does with a problem is in the folder of the operation.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any, ClassVar, Literal, get_args

from ..errors import UsageError
from .base import CompiledBinary, Config, KernelTemplate, LaunchEstimate
from .device import DeviceSpec
from .source_hash import source_hash

__all__ = [
    "EXTERNAL_VARIABLE",
    "FLA",
    "FLASHINFER",
    "FLASH_QLA",
    "ExternalPolicy",
    "ExternalTemplate",
    "Library",
    "calling",
    "external_policy",
    "set_external_policy",
]

ExternalPolicy = Literal["never", "forward", "always"]
"""``never``: no external template is searched or serves; ``forward``: they serve what autograd does
not record; ``always``: what it records, too."""

EXTERNAL_VARIABLE = "TILESCOUT_EXTERNAL"
"""Environment variable that names the policy where none was set."""

_DEFAULT: ExternalPolicy = "forward"
_chosen: ExternalPolicy | None = None


def external_policy() -> ExternalPolicy:
    """The policy that was set, else that of the environment, else ``forward``.

    Raises:
        UsageError: the variable names no policy.
    """
    global _chosen  # noqa: PLW0603 - of the process, as what is installed is
    if _chosen is None:
        _chosen = _checked(os.environ.get(EXTERNAL_VARIABLE, "").strip() or _DEFAULT)
    return _chosen


def set_external_policy(policy: ExternalPolicy | None) -> None:
    """Sets the policy of this process; None: that of the environment again.

    Look-ups that were answered stay as they are: ``tuner.external`` makes them forget.

    Raises:
        UsageError: no such policy.
    """
    global _chosen  # noqa: PLW0603 - see above
    _chosen = None if policy is None else _checked(policy)


def _checked(policy: str) -> ExternalPolicy:
    for known in get_args(ExternalPolicy):
        if policy == known:
            return known  # type: ignore[no-any-return]
    allowed = ", ".join(get_args(ExternalPolicy))
    raise UsageError(f"policy of external templates {policy!r} ({EXTERNAL_VARIABLE}): {allowed}")


@dataclass(frozen=True)
class Library:
    """A library that has kernels of its own."""

    distribution: str
    """Name that it is installed by."""
    least: str
    """Oldest version whose functions are called as here."""
    needs: tuple[str, ...] = ()
    """Top-level modules of others that its kernels import."""

    @property
    def installed(self) -> str | None:
        """Version at hand; None: not installed."""
        return _version(self.distribution)

    @property
    def missing(self) -> str | None:
        """None where its kernels can be imported, else what is not there."""
        found = self.installed
        if found is None:
            return (
                f"{self.distribution} is not installed: it needs {self.distribution}>={self.least}"
            )
        if _numbers(found) < _numbers(self.least):
            return f"{self.distribution} {found} is too old: it needs {self.least} or later"
        absent = [name for name in self.needs if not _has_module(name)]
        if absent:
            return (
                f"{self.distribution} {found} needs modules that are not there: {', '.join(absent)}"
            )
        return None


FLA = Library("fla-core", "0.6.0", ("einops", "triton"))
FLASH_QLA = Library("flash-qla", "0.1.3", ("tilelang",))
FLASHINFER = Library("flashinfer-python", "0.6.18", ("cutlass",))
"""Its kernels of the gated delta net are written in nvidia-cutlass-dsl's CuTe."""


@cache
def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


@cache
def _has_module(name: str) -> bool:
    return find_spec(name) is not None


def _numbers(text: str) -> tuple[int, ...]:
    """``0.6.18.post1`` as (0, 6, 18): what tells releases apart."""
    release = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, release.group().split("."))) if release else ()


@dataclass(frozen=True)
class LibrarySpec:
    """Stands where our templates have a kernel to compile: imports the library, no more.

    Its compilers run at the first launch, on the GPU, and keep what they made in caches of theirs.
    """

    name: str
    module: str

    def compile(self, arch: int) -> CompiledBinary:
        """A binary without device code; raises what the import raises."""
        del arch
        import_module(self.module)
        return CompiledBinary(self.name, b"", 0, 0, 0)


class ExternalTemplate(KernelTemplate):
    """A library's kernel for an operation; it has one config, the library's own choice."""

    is_external = True
    library: ClassVar[Library]
    module: ClassVar[str]
    """Module of the library that has the function."""
    sources: ClassVar[tuple[str, ...]]
    """Modules of ours that say how it is called."""

    def refusal(self, problem: Any, device: DeviceSpec) -> str | None:
        """None, or why the library cannot serve the problem on the device."""
        raise NotImplementedError

    def supports(self, problem: Any, device: DeviceSpec) -> str | None:
        """None, or that external templates are excluded, the library missing, or its refusal."""
        if external_policy() == "never":
            return "external templates are excluded"
        return self.library.missing or self.refusal(problem, device)

    def kernel_specs(self, problem: Any, config: Config) -> tuple[LibrarySpec, ...]:
        """The import of the library."""
        return (LibrarySpec(self.name, self.module),)

    def estimate(
        self, problem: Any, config: Config, device: DeviceSpec
    ) -> tuple[LaunchEstimate, ...]:
        """None: nothing is known of a library's launches before they run."""
        return ()

    def source_hash(self) -> str:
        """Hash of how the library is called, and of its name and version.

        Raises:
            ImportError: it is not installed, so that no winner of it can serve.
        """
        missing = self.library.missing
        if missing is not None:
            raise ImportError(missing)
        text = f"{source_hash(self.sources)} {self.library.distribution} {self.library.installed}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def calling(library: Library, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What the library's function returns.

    Raises:
        RuntimeError: it raised something; libraries refuse by assertions as well.
        MemoryError: there is no memory left.
    """
    try:
        return function(*args, **kwargs)
    except (RuntimeError, MemoryError):
        raise
    except Exception as error:
        raise RuntimeError(f"{library.distribution}: {type(error).__name__}: {error}") from error
