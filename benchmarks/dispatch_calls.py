"""Calls and launches that ``dispatch.py`` times: one compiled kernel, launched in every way.

Owns the problems, their pinned configs and the contenders; without a GPU, the stand-in for kernels
that do nothing, so that the host's share can be timed anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Any

import tilescout
import torch
import triton
from tilescout import ops
from tilescout.kernels.base import Config, Problem
from tilescout.kernels.compiled_launch import Address, RecordedLaunch, record
from tilescout.kernels.device import DeviceSpec
from tilescout.kernels.gdn_decode import GdnDecodeOutputs, GdnDecodeProblem
from tilescout.kernels.gdn_decode.reference import make_inputs as gdn_inputs
from tilescout.kernels.paged_decode import PagedDecodeOutputs, PagedDecodeProblem
from tilescout.kernels.paged_decode.inputs import make_inputs as paged_inputs
from tilescout.kernels.registry import template
from tilescout.kernels.triton_spec import BoundTritonKernel, TritonKernelSpec
from tilescout.ops.flashinfer import BatchDecodeWithPagedKVCacheWrapper
from tilescout.ops.prepared_launches import MAX_ADDRESSES
from tilescout.search_spaces.registry import space_of
from tilescout.tuner import dispatch
from tilescout.tuner.lock_file import lock_text
from tilescout.tuner.records import Toolchain
from triton.compiler import CompiledKernel

__all__ = ["Contenders", "Workbench", "stand_in_kernels"]

Contenders = dict[str, Callable[[], object]]
ONE_LAUNCH, TWO_LAUNCHES = {"split_rule": "none"}, {"split_rule": "count", "merge": "kernel"}
NUM_SPLITS = 4


@dataclass(frozen=True)
class Workbench:
    """Problems of one size on one device, and a lock that pins the configs that are compared."""

    device: str
    spec: DeviceSpec
    folder: Path
    batch: int = 4
    kv_len: int = 1024

    def paged_problem(self) -> PagedDecodeProblem:
        """Llama 3 8B's heads, requests of equal length."""
        return PagedDecodeProblem(
            self.batch, self.kv_len, 32, 8, 128, 16, "bfloat16", lengths="equal"
        )

    def gdn_problem(self) -> GdnDecodeProblem:
        """Qwen3-Next's heads."""
        return GdnDecodeProblem(self.batch, 1, 16, 32, 128, 128, "bfloat16")

    def paged(self, *, is_split: bool) -> Contenders:
        """Paged decode with a config of one launch, or of two: attention and merge."""
        problem = self.paged_problem()
        choices: dict[str, Any] = dict(TWO_LAUNCHES if is_split else ONE_LAUNCH)
        if is_split:
            choices["num_splits"] = NUM_SPLITS
        config = _triton_config(problem, self.spec, choices)
        self._pin(problem, config)
        inputs = paged_inputs(problem, device=self.device, seed=0)
        assert inputs.kv_indptr is not None
        assert inputs.kv_last_page_len is not None
        outputs = PagedDecodeOutputs(torch.empty_like(inputs.q), None)
        out, q, cache = outputs.out, inputs.q, (inputs.k_cache, inputs.v_cache)
        bounds, pages, last = inputs.kv_indptr, inputs.kv_indices, inputs.kv_last_page_len
        table = (bounds, pages, last)
        into = torch.ops.tilescout.paged_decode_out.default
        decode = ops.paged_decode
        sets = _fresh((q, *table, out))
        given = cycle(sets)

        def fresh() -> None:
            q, bounds, pages, last, out = next(given)
            decode(q, cache, bounds, pages, last, lengths="equal", out=out)

        contenders: Contenders = {
            **_direct(
                problem, config, inputs, outputs, [(q, *cache, *t, out) for q, *t, out in sets]
            ),
            "ours, out=": lambda: decode(q, cache, bounds, pages, last, lengths="equal", out=out),
            "ours, out=, fresh tensors": fresh,
            "ours, out allocated": lambda: decode(q, cache, bounds, pages, last, lengths="equal"),
            "ours, torch.ops": lambda: into(
                [q], cache, bounds, pages, last, lengths="equal", out=out
            ),
        }
        if not is_split:
            wrapper = BatchDecodeWithPagedKVCacheWrapper(torch.empty(1, device=self.device))
            wrapper.plan(*table, 32, 8, 128, 16, q_data_type="bfloat16")
            contenders["FlashInfer's wrapper over ours"] = lambda: wrapper.run(q, cache, out=out)
        return contenders

    def gdn(self) -> Contenders:
        """Decode of the gated delta net, which is one launch."""
        problem = self.gdn_problem()
        config = space_of(problem, "triton", self.spec).default
        self._pin(problem, config)
        inputs = gdn_inputs(problem, device=self.device, seed=0)
        out = torch.empty_like(inputs.v)
        assert inputs.state is not None
        q, k, v, g, beta, state = (
            *(inputs.q, inputs.k, inputs.v, inputs.gate, inputs.beta),
            inputs.state,
        )
        slots, a_log, bias = inputs.slots, inputs.a_log, inputs.dt_bias
        assert slots is not None
        assert a_log is not None
        assert bias is not None
        outputs = GdnDecodeOutputs(out, state)
        step, into = ops.gdn.gdn_decode, torch.ops.tilescout.gdn_decode_out.default
        sets = _fresh((q, k, v, g, beta, out))
        given = cycle(sets)

        def fresh() -> None:
            q, k, v, g, beta, out = next(given)
            step(q, k, v, g, beta, state, slots=slots, A_log=a_log, dt_bias=bias, out=out)

        others = (state, slots, a_log, bias)
        return {
            **_direct(problem, config, inputs, outputs, [(*moved, *others) for moved in sets]),
            "ours, out=": lambda: step(
                q, k, v, g, beta, state, slots=slots, A_log=a_log, dt_bias=bias, out=out
            ),
            "ours, out=, fresh tensors": fresh,
            "ours, out allocated": lambda: step(
                q, k, v, g, beta, state, slots=slots, A_log=a_log, dt_bias=bias
            ),
            "ours, torch.ops": lambda: into(
                q, k, v, g, beta, state, slots=slots, A_log=a_log, dt_bias=bias, out=out
            ),
        }

    def _pin(self, problem: Problem, config: Config) -> None:
        """Puts a lock in force whose only winner this is: what is timed is what was chosen."""
        tilescout.use_lock(None)
        found = dispatch.lookup(problem, gpu=self.spec)
        pinned = replace(found, config=config, template=config.template, problem=problem)
        path = self.folder / "pinned.json"
        path.write_text(lock_text([pinned], self.spec, Toolchain()))
        tilescout.use_lock(path)


def _triton_config(problem: Problem, spec: DeviceSpec, choices: dict[str, Any]) -> Config:
    """The default of template triton with another kind of split."""
    space = space_of(problem, "triton", spec)
    dependent = ("merge", "num_splits", "split_tokens", "ctas_per_sm")
    values = {k: v for k, v in space.default.as_dict().items() if k not in dependent}
    config = Config.of("triton", {**values, **choices})
    reason = space.check(config)
    assert reason is None, f"{config}: {reason}"
    return config


def _fresh(tensors: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, ...]]:
    """The tensors, and copies elsewhere: so many that no set is remembered until its turn."""
    return [tuple(tensors), *(tuple(x.clone() for x in tensors) for _ in range(MAX_ADDRESSES))]


def _direct(
    problem: Problem,
    config: Config,
    inputs: Any,
    outputs: Any,
    sets: Sequence[Sequence[torch.Tensor]],
) -> Contenders:
    """The compiled kernels with the same arguments, without anything of ours.

    Args:
        problem: Of the call.
        config: Of the kernels.
        inputs: Of the launcher.
        outputs: Likewise.
        sets: The tensors of both in one order, and others in their places.
    """
    tensors = sets[0]
    launcher = template(problem.op, config.template).build(problem, config, inputs)
    launcher.launch(inputs, outputs)
    places = {id(tensor): Address(i) for i, tensor in enumerate(tensors)}
    launches = record(launcher, inputs, outputs, places, {})
    assert launches, f"{problem.op} with {config} was not recorded"
    by_tensor = [_with_arguments(launch, tensors) for launch in launches]
    by_address = [
        (launch, [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in args])
        for launch, args in by_tensor
    ]
    stream = torch.cuda.current_stream().cuda_stream if tensors[0].is_cuda else 0
    moved = cycle(
        [
            _all([_run(*_with_arguments(launch, others), stream) for launch in launches])
            for others in sets
        ]
    )
    contenders: Contenders = {
        "its launcher, tensors": _all([_run(*call, stream) for call in by_tensor]),
        "its launcher, fresh tensors": lambda: next(moved)(),  # noqa: PLW0108
        "its launcher, addresses": _all([_run(*call, stream) for call in by_address]),
        "kernel[grid]": _all([_by_grid(*call) for call in by_tensor]),
        "launcher of the template": lambda: launcher.launch(inputs, outputs),
    }
    if tensors[0].is_cuda:
        contenders |= {
            "triton.jit": _all([_jitted(*call) for call in by_tensor]),
            "@triton.autotune": _all([_autotuned(*call) for call in by_tensor]),
        }
    return contenders


def _with_arguments(
    launch: RecordedLaunch, tensors: Sequence[torch.Tensor]
) -> tuple[RecordedLaunch, list[Any]]:
    args = []
    for value in launch.args:
        if isinstance(value, Address):
            assert value.offset_bytes == 0
            value = tensors[value.index]  # noqa: PLW2901
        args.append(value)
    return launch, [*args, *launch.constants]


def _all(calls: Sequence[Callable[[], object]]) -> Callable[[], object]:
    if len(calls) == 1:
        return calls[0]
    first, second = calls

    def both() -> None:
        first()
        second()

    return both


def _run(launch: RecordedLaunch, args: Sequence[Any], stream: int) -> Callable[[], object]:
    kernel = launch.kernel
    run, grid, function, packed = kernel.run, launch.grid, kernel.function, kernel.packed_metadata
    return lambda: run(*grid, stream, function, packed, None, None, None, *args)


def _by_grid(launch: RecordedLaunch, args: Sequence[Any]) -> Callable[[], object]:
    return lambda: launch.kernel[launch.grid](*args)


def _jitted(launch: RecordedLaunch, args: Sequence[Any]) -> Callable[[], object]:
    function, given, constants, options = _as_source(launch, args)
    return lambda: function[launch.grid](*given, **constants, **options)


def _autotuned(launch: RecordedLaunch, args: Sequence[Any]) -> Callable[[], object]:
    """Two configs, so that it has a choice to remember; it tunes at the first call."""
    function, given, constants, options = _as_source(launch, args)
    stages = options.pop("num_stages")
    configs = [triton.Config({}, num_stages=n, **options) for n in (stages, stages + 1)]
    integer = next(
        name for name, value in zip(function.arg_names, given, strict=False) if type(value) is int
    )
    tuned = triton.autotune(configs=configs, key=[integer])(function)
    return lambda: tuned[launch.grid](*given, **constants)


def _as_source(
    launch: RecordedLaunch, args: Sequence[Any]
) -> tuple[Any, Sequence[Any], dict[str, Any], dict[str, Any]]:
    function = launch.kernel.src.fn
    num_args = len(launch.args)
    constants = dict(zip(function.arg_names[num_args:], launch.constants, strict=True))
    metadata = launch.kernel.metadata
    options = {"num_warps": metadata.num_warps, "num_stages": metadata.num_stages}
    return function, args[:num_args], constants, options


class _NoKernel(CompiledKernel):  # type: ignore[misc]
    """Takes launches and does nothing."""

    def __init__(self) -> None:
        self.module = None
        self.function, self.packed_metadata = 1, (4, 1, 0)
        self._run = _NoLauncher()

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *args: self._run(grid, args)


class _NoLauncher:
    """Has what Triton's launcher object has, so that calls take the way they take on a GPU."""

    gsan_enabled = False
    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid = launch_pdl = False
    arg_annotations = kernel_signature = ()

    def __call__(self, *args: object) -> None:
        pass

    launch = __call__


@contextmanager
def stand_in_kernels() -> Iterator[None]:
    """Inside, kernels do nothing and tensors on the CPU are accepted."""
    bind, is_interpreted = TritonKernelSpec.bind, triton.knobs.runtime.interpret

    def stand_in(spec: TritonKernelSpec, arch: int) -> BoundTritonKernel:
        del arch
        return BoundTritonKernel(_NoKernel().__getitem__, tuple(spec.constexprs.values()))

    TritonKernelSpec.bind = stand_in  # type: ignore[method-assign,assignment]
    triton.knobs.runtime.interpret = True
    try:
        yield
    finally:
        TritonKernelSpec.bind = bind  # type: ignore[method-assign]
        triton.knobs.runtime.interpret = is_interpreted
