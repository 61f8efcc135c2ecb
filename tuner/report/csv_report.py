"""The CSV file behind every table."""

from __future__ import annotations

from pathlib import Path

from .frames import ReportFrames

__all__ = ["write_csv"]


def write_csv(frames: ReportFrames, folder: Path) -> tuple[Path, ...]:
    """Writes each frame to ``<name>.csv`` in the folder; full precision, empty where unknown."""
    paths = []
    for name, frame in frames.named():
        path = folder / f"{name}.csv"
        frame.to_csv(path, index=False, lineterminator="\n")
        paths.append(path)
    return tuple(paths)
