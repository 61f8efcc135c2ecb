"""What calls come to, by prepared calls and without, on kernels that only write down launches."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from compiled_stand_in import Launched, Launches
from prepared_calls import Call
from tilescout.ops import prepared


def forget() -> None:
    for calls in prepared._all:
        calls.forget()


def outcome(call: Call, launches: Launches) -> tuple[object, ...]:
    """What a call comes to: its launches and results, or the error."""
    launches.take()
    try:
        with call.context():
            found = call.function(**call.arguments)
    except call.errors as error:
        return type(error), str(error), launches.take()
    results = found if isinstance(found, tuple) else (found,)
    # What the call allocates lies elsewhere in every call.
    names = {x.data_ptr(): f"result {i}" for i, x in enumerate(results) if x is not None}
    given = {x.data_ptr() for x in call.arguments.values() if isinstance(x, torch.Tensor)}
    temporaries: dict[int, str] = {}
    enqueued = [
        (
            launch.constexprs,
            launch.signature,
            launch.grid,
            *plain_arguments(launch, names, given, temporaries),
        )
        for launch in launches.take()
    ]
    shown = [x if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in results]
    return enqueued, shown


WRITTEN = ("out", "lse", "out_a", "lse_a", "out_b", "lse_b")
"""Arguments of kernels that may be memory which a call allocates and does not return."""


def plain_arguments(
    launch: Launched, names: dict[int, str], given: set[int], temporaries: dict[int, str]
) -> Iterator[object]:
    arguments = list(zip(launch.signature, launch.args, strict=True))
    made = {
        value: (name, launch.constants[name])
        for (name, _), value in arguments
        if name in launch.constants and value not in given
    }
    for (name, _), value in arguments:
        if name in WRITTEN and value not in given and value not in names:
            temporaries.setdefault(value, f"temporary {len(temporaries)}")
    return ({**temporaries, **names, **made}.get(value, value) for value in launch.args)


def agrees(sequence: list[Call], launches: Launches) -> int:
    """Compares every call of a sequence with the long way; how many were served prepared."""
    forget()
    quick, num_prepared = [], 0
    for call in sequence:
        before = launches.num_long
        quick.append(outcome(call, launches))
        num_prepared += launches.num_long == before and bool(quick[-1][0])
    for call, found in zip(sequence, quick, strict=True):
        forget()
        assert found == outcome(call, launches), call.name
    return num_prepared


def is_prepared(call: Call, launches: Launches) -> bool:
    """Makes the call; whether it went the short way."""
    before = launches.num_long
    outcome(call, launches)
    return launches.num_long == before


def warm(call: Call, launches: Launches) -> None:
    assert [is_prepared(call, launches) for _ in range(3)] == [False, False, True]
