"""Opens a recording, plain or gzipped, and tells the three formats apart by their fields."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Mapping
from pathlib import Path

from ...errors import UsageError
from .export_file import read_export
from .kernel_tuner_file import read_kernel_tuner_cache
from .recorded import RecordedSpace
from .t4_file import read_t4_results

__all__ = ["read_recorded"]

_GZIP_MAGIC = b"\x1f\x8b"


def read_recorded(path: str | Path) -> tuple[RecordedSpace, ...]:
    """The recorded spaces of a Kernel Tuner cache file, a T4 file or an export of ours.

    Raises:
        UsageError: the file cannot be read, is none of these, or a field in it is wrong.
    """
    label = str(path)
    data = _decoded(label)
    if isinstance(data, Mapping):
        if "cache" in data:
            return (read_kernel_tuner_cache(label, data),)
        if "results" in data:
            return (read_t4_results(label, data),)
        if "trials" in data:
            return read_export(label, data)
    raise UsageError(
        f"{label} has none of the fields 'cache' (Kernel Tuner), 'results' (T4) and 'trials' "
        "(tilescout export): give a recorded space in one of these formats"
    )


def _decoded(label: str) -> object:
    try:
        content = Path(label).read_bytes()
        if content.startswith(_GZIP_MAGIC):
            content = gzip.decompress(content)
        return json.loads(content)
    except (OSError, EOFError, zlib.error) as error:
        what = getattr(error, "strerror", None) or error
        raise UsageError(f"{label} cannot be read ({what}): check the path and the file") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"{label} is not JSON ({error}): a file that was cut short must be written again"
        ) from error
