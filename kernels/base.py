"""The words of every operation: problem, config, template, operation.

Owns the contracts that ``kernels/<op>`` fulfils and that search, measurement, store and dispatch
rely on. Holds no list of values and knows no particular operation.
"""

from __future__ import annotations

import functools
import hashlib
import json
import types
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, Protocol, Self

from ..errors import UnknownNameError, UsageError
from .device import DeviceSpec

__all__ = [
    "Backend",
    "Comparison",
    "CompiledBinary",
    "Config",
    "KernelSpec",
    "KernelTemplate",
    "LaunchEstimate",
    "Launcher",
    "Operation",
    "ParameterValue",
    "Part",
    "PartwiseLauncher",
    "Problem",
    "canonical_json",
]

type_hints = functools.cache(typing.get_type_hints)
"""Resolving them takes longer than checking the values of a problem."""
ParameterValue = bool | int | str
Backend = Literal["triton", "tilelang", "cute"]


def canonical_json(value: object) -> str:
    """The one text form of a JSON value: sorted keys, no spaces; the input of every hash."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


@dataclass(frozen=True)
class Config:
    """A value for every active parameter of one template; hashable, ordered by name."""

    template: str
    values: tuple[tuple[str, ParameterValue], ...]

    @classmethod
    def of(cls, template: str, values: Mapping[str, ParameterValue]) -> Self:
        """The config of ``template`` with these parameter values, in canonical order."""
        return cls(template, tuple(sorted(values.items())))

    def __getitem__(self, name: str) -> ParameterValue:
        for key, value in self.values:
            if key == name:
                return value
        raise KeyError(name)

    def get(self, name: str, default: ParameterValue | None = None) -> ParameterValue | None:
        """The value of ``name``, or ``default`` where the parameter is not active."""
        return dict(self.values).get(name, default)

    def as_dict(self) -> dict[str, ParameterValue]:
        """Parameter values by name."""
        return dict(self.values)

    def replace(self, **changes: ParameterValue) -> Config:
        """A copy with some values changed."""
        return Config.of(self.template, {**self.as_dict(), **changes})

    @property
    def config_id(self) -> str:
        """Twelve hex digits that name this config in logs and reports."""
        text = canonical_json([self.template, self.as_dict()])
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.values)


@dataclass(frozen=True)
class Problem(ABC):
    """An operation with its shapes, dtypes and flags.

    Subclasses are frozen dataclasses whose fields are ``int``, ``str`` or ``bool`` and which check
    them in ``__post_init__`` (raising ``UsageError``). A bucket is exact in the static fields and a
    range in the dynamic ones.
    """

    op: ClassVar[str]
    dynamic_fields: ClassVar[tuple[str, ...]]
    """Positive integers in which a winner of a neighbouring problem may serve, nearest first."""
    following_fields: ClassVar[Mapping[str, str]] = types.MappingProxyType({})
    """Fields whose default is the value of another field, with that field."""

    @property
    @abstractmethod
    def flops(self) -> int:
        """Floating-point operations the operation must do; a multiply-add counts two."""

    @property
    @abstractmethod
    def bytes_moved(self) -> int:
        """Least device-memory traffic: each input read once, each output written once."""

    @property
    def num_input_variants(self) -> int:
        """Kinds of inputs that seeds 0, 1, ... give in turn; copies to time hold each as often."""
        return 1

    @property
    @abstractmethod
    def compute_dtype(self) -> str:
        """The operand dtype whose peak rate bounds this problem (torch's name)."""

    def check_sizes(self, besides: Collection[str] = ()) -> None:
        """Raises ``UsageError`` where an integer field is below 1 or no 32-bit integer.

        Args:
            besides: Fields that are checked elsewhere.
        """
        for name, value in self.as_dict().items():
            if name in besides:
                continue
            if isinstance(value, int) and not isinstance(value, bool) and not 1 <= value < 2**31:
                raise UsageError(
                    f"{name}={value!r} of a {self.op} problem must be from 1 to 2147483647"
                )

    def check_one_of(self, name: str, allowed: Collection[str]) -> None:
        """Raises ``UsageError`` where the field is none of the allowed words."""
        value = getattr(self, name)
        if value not in allowed:
            listing = ", ".join(allowed)
            raise UsageError(f"{name}={value!r} of a {self.op} problem: one of {listing}")

    def check_multiple(self, name: str, divisor: str) -> None:
        """Raises ``UsageError`` where one field is no multiple of the other."""
        value, by = getattr(self, name), getattr(self, divisor)
        if value % by:
            raise UsageError(
                f"{name}={value} of a {self.op} problem must be a multiple of {divisor}={by}"
            )

    def as_dict(self) -> dict[str, ParameterValue]:
        """Field values by name, in declaration order."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def key(self) -> str:
        """Canonical JSON of all fields: the identity of the problem in the database."""
        return canonical_json(self.as_dict())

    def static_key(self) -> str:
        """Canonical JSON of the fields that must match exactly."""
        values = self.as_dict()
        return canonical_json({k: v for k, v in values.items() if k not in self.dynamic_fields})

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> Self:
        """The problem with these field values; text is converted to the field's type.

        Raises:
            UnknownNameError: a key that is no field.
            UsageError: a value of the wrong type or out of range, or a field that is missing.
        """
        hints = type_hints(cls)
        known = [field.name for field in fields(cls)]
        for name in values:
            if name not in known:
                raise UnknownNameError(f"field of a {cls.op} problem", name, known)
        parsed = {name: _parse_field(cls.op, name, hints[name], v) for name, v in values.items()}
        try:
            return cls(**parsed)
        except TypeError as error:
            missing = [n for n in known if n not in parsed and not hasattr(cls, n)]
            if not missing:
                raise
            raise UsageError(
                f"a {cls.op} problem needs {', '.join(missing)}: got {', '.join(values) or 'none'}"
            ) from error

    def changed(self, values: Mapping[str, object]) -> Self:
        """A copy with these field values, as for ``from_dict``.

        A field that has its default, another field's value, goes with that one.

        Raises:
            UnknownNameError: a key that is no field.
            UsageError: a value of the wrong type or out of range.
        """
        kept = self.as_dict()
        for name, leader in self.following_fields.items():
            if kept[name] == kept[leader]:
                del kept[name]
        return self.from_dict({**kept, **values})

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.as_dict().items())


def _parse_field(op: str, name: str, hint: Any, value: object) -> ParameterValue:
    if isinstance(hint, types.UnionType) or hint not in (int, str, bool):
        raise TypeError(f"field {name!r} of {op} must be int, str or bool, not {hint!r}")
    if hint is bool:
        allowed: dict[object, bool] = {True: True, False: False, "true": True, "false": False}
        if isinstance(value, bool | str) and value in allowed:
            return allowed[value]
        raise UsageError(f"{name}={value!r} of a {op} problem must be true or false")
    if hint is int:
        try:
            if isinstance(value, bool | float):
                raise ValueError(value)
            return int(typing.cast(Any, value))
        except (TypeError, ValueError):
            raise UsageError(f"{name}={value!r} of a {op} problem must be an integer") from None
    if not isinstance(value, str):
        raise UsageError(f"{name}={value!r} of a {op} problem must be text")
    return value


@dataclass(frozen=True)
class CompiledBinary:
    """Device code of one kernel for one architecture, as a compiler left it."""

    kernel: str
    """Name of the kernel function in the binary."""
    cubin: bytes
    threads_per_block: int
    smem_bytes: int
    """Shared memory one block needs, static and dynamic together."""
    tmem_columns: int
    """Tensor-memory columns (Blackwell data-centre parts); 0 elsewhere."""


class KernelSpec(Protocol):
    """Everything a compiler needs to make one kernel; picklable, independent of any GPU at hand."""

    @property
    def name(self) -> str:
        """Name of the device function."""

    def compile(self, arch: int) -> CompiledBinary:
        """Compiles for ``arch`` (90, 100, ...) through the compiler's own on-disk cache."""


@dataclass(frozen=True)
class LaunchEstimate:
    """How one launch of a kernel will load the device: the cost model's view of a config."""

    kernel: str
    """``KernelSpec.name`` of the kernel that is launched."""
    num_programs: int
    """Blocks in the grid that do work."""
    bytes_moved: int
    """Device-memory traffic of the whole launch."""
    flops: int
    """Floating-point operations of the whole launch, tile padding included."""
    bytes_in_flight: int
    """Bytes one block keeps requested from memory while it streams."""
    serial_loads: int
    """Dependent memory round trips on the critical path of the longest block."""
    longest_share: float = 1.0
    """Work of the longest block over the mean block (1.0 when all are equal)."""


class Launcher(Protocol):
    """A compiled config, ready for the device it was built for."""

    def launch(self, inputs: Any, outputs: Any) -> None:
        """Enqueues the kernels on the current stream; never compiles, allocates or waits."""


class PartwiseLauncher(Launcher, Protocol):
    """A launcher of a template that has parts; ``launch`` is all parts in their order."""

    def launch_part(self, part: str, inputs: Any, outputs: Any) -> None:
        """Enqueues the kernels of one part, on what the parts before it left.

        May be repeated: no part overwrites what it reads.
        """


@dataclass(frozen=True)
class Part:
    """Kernels of a config that are searched by themselves: their time adds to the others'."""

    name: str
    kernels: tuple[str, ...]
    """``KernelSpec.name`` of each; a kernel belongs to one part."""


class KernelTemplate(ABC):
    """A parametric kernel for an operation in one language."""

    op: ClassVar[str]
    name: ClassVar[str]
    """Unique within the operation, e.g. ``triton``."""
    backend: ClassVar[Backend]
    is_repeatable: ClassVar[bool] = True
    """Two runs on equal inputs give equal bits, for every config."""
    is_external: ClassVar[bool] = False
    """Somebody else's kernel: see ``external``. Never predicted, searched after ours, launched on
    outputs of its own: it may put memory of its own in their place."""
    is_in_place: ClassVar[bool] = False
    """It only writes into the memory it reads; other outputs cost a copy before. It is timed on
    ``Operation.make_in_place``."""

    @abstractmethod
    def supports(self, problem: Any, device: DeviceSpec) -> str | None:
        """None, or the reason why this template cannot serve the problem on the device."""

    def supports_tensors(self, problem: Any, inputs: Any, outputs: Any = None) -> str | None:
        """None, or why it cannot serve these tensors of a problem that it supports.

        A problem does not say everything of its tensors: strides, alignment, optional arguments.
        Look-ups for a call leave a template out that says why. Reads shapes, never values.

        Args:
            problem: A problem that ``supports`` accepts.
            inputs: Of the problem.
            outputs: Of the problem; None where they will be new and contiguous.
        """
        return None

    @abstractmethod
    def kernel_specs(self, problem: Any, config: Config) -> tuple[KernelSpec, ...]:
        """The kernels that the config launches, each to be compiled once."""

    @abstractmethod
    def build(self, problem: Any, config: Config, inputs: Any) -> Launcher:
        """A launcher for inputs of these shapes and strides on their device.

        Compiles through the on-disk cache and allocates the scratch memory.
        """

    @abstractmethod
    def estimate(
        self, problem: Any, config: Config, device: DeviceSpec
    ) -> tuple[LaunchEstimate, ...]:
        """One estimate a launch, in launch order."""

    def parts(self, problem: Any, config: Config) -> tuple[Part, ...]:
        """The parts of the config's algorithm in launch order; all its kernels, or none.

        Depends on nothing but the parameters that belong to no part (``Parameter.part``). Launchers
        of a config with parts are ``PartwiseLauncher``. Where there are fewer than two, the
        algorithm is searched as a whole.
        """
        return ()

    def launch_key(self, problem: Any, config: Config) -> str | None:
        """Text that is equal for two configs only if they launch their kernels in the same way.

        Same grids, same arguments, same scratch: where their binaries are equal too, one
        measurement serves both. None: the template does not say.
        """
        return None

    @abstractmethod
    def source_hash(self) -> str:
        """Hash of the syntax trees of the template's modules, comments and layout left out."""


@dataclass(frozen=True)
class Comparison:
    """Outcome of comparing a template's outputs with the reference."""

    reason: str | None
    """None where the outputs are right, else what is wrong, with the figures."""
    max_abs_error: float
    relative_rms_error: float

    @property
    def is_ok(self) -> bool:
        """Whether the outputs are right."""
        return self.reason is None


@dataclass(frozen=True)
class Operation:
    """What the tuner needs to know of one operation; ``kernels/<op>`` exports it as OPERATION."""

    name: str
    problem_type: type[Problem]
    template_names: tuple[str, ...]
    load_template: Callable[[str], KernelTemplate]
    make_inputs: Callable[..., Any]
    """``(problem, *, device, seed) -> inputs`` to time: every length as the problem says."""
    make_validation_inputs: Callable[..., Any]
    """``(problem, *, device, seed) -> inputs`` to verify: ragged, with poison where kernels must
    not look, of bounded size."""
    make_outputs: Callable[..., Any]
    """``(problem, inputs) -> outputs`` filled with NaN, so that what is not written shows."""
    compare: Callable[..., Comparison]
    """``(problem, inputs, outputs) -> Comparison`` against the plain-torch reference."""
    outputs_equal: Callable[[Any, Any], bool]
    """Whether two outputs are equal bit for bit."""
    make_in_place: Callable[..., Any] | None = None
    """``(problem, inputs) -> (inputs, outputs)``: a copy of the inputs, and outputs that share the
    part of it that is updated in place; None for an operation that updates nothing."""
