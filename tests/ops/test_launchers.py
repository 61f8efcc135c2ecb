"""A launcher serves one stream; a captured graph owns the one it was captured with."""

from __future__ import annotations

import pytest
import torch
from tilescout.errors import UsageError
from tilescout.ops import launchers
from tilescout.ops.launchers import LauncherCache

CPU = torch.device("cpu")


class Streams:
    """Stands in for CUDA: the current stream and whether it is being captured."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stream, self.is_capturing = 1, False
        self.num_built = 0
        monkeypatch.setattr(
            launchers, "_stream_of", lambda device: (self.stream, self.is_capturing)
        )

    def build(self) -> object:
        self.num_built += 1
        return object()


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    return Streams(monkeypatch)


def test_one_launcher_a_key_and_stream(streams: Streams) -> None:
    cache = LauncherCache()
    first = cache.get("a", CPU, streams.build)
    assert cache.get("a", CPU, streams.build) is first
    assert cache.get("b", CPU, streams.build) is not first
    streams.stream = 2
    assert cache.get("a", CPU, streams.build) is not first
    assert streams.num_built == len(cache) == 3


def test_the_least_recently_used_goes_first(streams: Streams) -> None:
    cache = LauncherCache(max_launchers=2)
    first = cache.get("a", CPU, streams.build)
    cache.get("b", CPU, streams.build)
    cache.get("a", CPU, streams.build)
    cache.get("c", CPU, streams.build)
    assert cache.get("a", CPU, streams.build) is first
    assert streams.num_built == 3
    cache.get("b", CPU, streams.build)
    assert streams.num_built == 4


def test_a_capture_takes_over_a_launcher_for_good(streams: Streams) -> None:
    cache = LauncherCache(max_launchers=1)
    warmed_up = cache.get("a", CPU, streams.build)
    streams.stream, streams.is_capturing = 2, True
    assert cache.get("a", CPU, streams.build) is warmed_up
    assert cache.get("a", CPU, streams.build) is warmed_up
    streams.stream, streams.is_capturing = 1, False
    assert cache.get("a", CPU, streams.build) is not warmed_up
    for key in "bcd":
        cache.get(key, CPU, streams.build)
    streams.stream, streams.is_capturing = 2, True
    assert cache.get("a", CPU, streams.build) is warmed_up


def test_graphs_of_one_stream_share_a_launcher_and_those_of_two_do_not(streams: Streams) -> None:
    cache = LauncherCache()
    owners = []
    for stream in (2, 2, 3):
        streams.stream, streams.is_capturing = 1, False
        cache.get("a", CPU, streams.build)  # the eager call before each capture
        streams.stream, streams.is_capturing = stream, True
        owners.append(cache.get("a", CPU, streams.build))
    assert owners[0] is owners[1]
    assert owners[2] is not owners[0]
    streams.stream, streams.is_capturing = 1, False
    assert cache.get("a", CPU, streams.build) not in owners


def test_nothing_is_built_during_a_capture(streams: Streams) -> None:
    streams.is_capturing = True
    with pytest.raises(UsageError, match="call the function once with the same shapes"):
        LauncherCache().get("a", CPU, streams.build)
    assert streams.num_built == 0
