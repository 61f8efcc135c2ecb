"""A user's kernel as an operation: its problem, its one template, its listed space."""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar

from ...errors import UnsupportedError
from ...kernels import registry
from ...kernels.base import (
    Backend,
    Config,
    KernelSpec,
    KernelTemplate,
    Launcher,
    LaunchEstimate,
    Operation,
    Problem,
)
from ...kernels.device import DeviceSpec
from ...search_spaces import registry as space_registry
from ...search_spaces.listed import listed_space
from ...search_spaces.space import SearchSpace

__all__ = ["KernelProblem", "register_kernel", "source_of"]


@dataclass(frozen=True)
class KernelProblem(Problem):
    """The arguments that a kernel's author named as its key, and the dtypes of all."""

    op: ClassVar[str] = ""
    dynamic_fields: ClassVar[tuple[str, ...]] = ()

    arguments: str
    """JSON of the key by name."""
    dtypes: str
    """Dtypes of the arguments that have one, in order."""

    @property
    def flops(self) -> int:
        """0: what a kernel computes is not known."""
        return 0

    @property
    def bytes_moved(self) -> int:
        """0: what a kernel moves is not known."""
        return 0

    @property
    def compute_dtype(self) -> str:
        """Unknown, too."""
        return "float32"


class _KernelTemplate(KernelTemplate):
    """The kernel as its author wrote it; it is launched with the arguments at hand only."""

    def __init__(self, op: str, language: Backend, source: str) -> None:
        self.op = op  # type: ignore[misc]
        self.name = language  # type: ignore[misc]
        self.backend = language  # type: ignore[misc]
        self._source = source

    def supports(self, problem: Any, device: DeviceSpec) -> str | None:
        return None

    def kernel_specs(self, problem: Any, config: Config) -> tuple[KernelSpec, ...]:
        """None: signatures come with the arguments of a call."""
        return ()

    def build(self, problem: Any, config: Config, inputs: Any) -> Launcher:
        raise UnsupportedError(f"{self.op} is launched by calling it, not through Tilescout")

    def estimate(
        self, problem: Any, config: Config, device: DeviceSpec
    ) -> tuple[LaunchEstimate, ...]:
        return ()

    def source_hash(self) -> str:
        return self._source


def register_kernel(
    op: str, function: Any, configs: Iterable[Config], language: Backend = "triton"
) -> type[KernelProblem]:
    """Makes a kernel known to look-ups of this process; returns the type of its problems.

    A kernel that is decorated again shares its problems with the one before; another kernel of the
    same name, as a notebook makes it, is told apart by its source.
    """
    source = source_of(function)
    known = _registered.get(op)
    if known is not None and known.source != source:
        return register_kernel(f"{op}@{source}", function, configs, language)
    if known is None:
        known = _registered[op] = _Registered(op, language, source)
        # The registries find operations by the name of a module.
        module = known.module()
        sys.modules[module.__name__] = module
        registry.register(op, module.__name__)
        space_registry.register(op, module.__name__)
    known.configs |= dict.fromkeys(configs)
    return known.problem_type


class _Registered:
    """One kernel that look-ups know, with the configs of all its decorations."""

    def __init__(self, op: str, language: Backend, source: str) -> None:
        self.op, self.language, self.source = op, language, source
        self.problem_type = type("KernelProblem", (KernelProblem,), {"op": op})
        self.configs: dict[Config, None] = {}

    def module(self) -> ModuleType:
        """The operation and its space as a module of ``kernels`` would have them."""
        template = _KernelTemplate(self.op, self.language, self.source)
        name = hashlib.sha256(self.op.encode()).hexdigest()[:16]
        module: Any = ModuleType(f"{__name__}.{name}")
        module.SPACES = {self.language: self._space}
        module.OPERATION = Operation(
            name=self.op,
            problem_type=self.problem_type,
            template_names=(self.language,),
            load_template=lambda name: template,
            make_inputs=self._unavailable,
            make_validation_inputs=self._unavailable,
            make_outputs=self._unavailable,
            compare=self._unavailable,
            outputs_equal=self._unavailable,
        )
        assert isinstance(module, ModuleType)
        return module

    def _space(self, problem: Problem, device: DeviceSpec) -> SearchSpace:
        del problem, device
        return listed_space(self.language, tuple(self.configs))

    def _unavailable(self, *_: object, **__: object) -> Any:
        raise UnsupportedError(
            f"{self.op} has no inputs of its own: it is tuned where it is called"
        )


_registered: dict[str, _Registered] = {}


def source_of(function: Any) -> str:
    """Sixteen hex digits over the source of a kernel and of the jitted functions it calls."""
    digest = hashlib.sha256()
    pending, seen = [function], set()
    while pending:
        jitted = pending.pop(0)
        python = _python_function(jitted)
        if python is None or python in seen:
            continue
        seen.add(python)
        written = getattr(jitted, "src", None) or getattr(jitted, "func_source", None)
        digest.update(str(written or python.__qualname__).encode())
        names = sorted(python.__code__.co_names)
        pending += [python.__globals__[name] for name in names if name in python.__globals__]
    return digest.hexdigest()[:16]


def _python_function(value: Any) -> Any | None:
    """The function under Triton's or TileLang's wrappers; None for anything else."""
    if type(value).__module__.partition(".")[0] == "tilelang" and hasattr(value, "func"):
        return inspect.unwrap(value.func)
    while hasattr(value, "fn") and not hasattr(value, "__code__"):
        value = value.fn
        if hasattr(value, "__code__"):
            return value
    return None
