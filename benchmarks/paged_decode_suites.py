"""The problems that the paged-decode benchmark times, by suite, and what each suite is to reach.

Shapes are one layer of a model with 32 query heads on 8 KV heads of 128 unless a suite says
otherwise; targets are ratios within one run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from tilescout.kernels.paged_decode import PagedDecodeProblem

__all__ = ["SUITES", "TARGETS", "SuiteCell", "Target", "cell_of"]

_SHAPE = {
    "num_qo_heads": 32,
    "num_kv_heads": 8,
    "head_dim": 128,
    "page_size": 16,
    "dtype": "bfloat16",
}


@dataclass(frozen=True)
class SuiteCell:
    """A labelled problem of a suite."""

    label: str
    problem: PagedDecodeProblem
    has_baselines: bool = True
    """Whether other libraries are timed too; not where only our own time is compared with."""


@dataclass(frozen=True)
class Target:
    """A bound on a ratio of times over cells of one suite."""

    suite: str
    words: str
    bound: float
    statistic: Literal["geomean", "least", "most"]
    """Over the cells; ``most`` is an upper bound, the others are lower bounds."""
    cells: tuple[str, ...] = ()
    """Labels; none: every cell of the suite that has baselines."""
    against: tuple[str, ...] = ()
    """Our own time at these cells over our time at ``cells``, pair by pair; none: the best
    baseline's time over ours. Under ``most`` the inverse."""

    @property
    def is_upper(self) -> bool:
        """Whether the ratio must stay below the bound."""
        return self.statistic == "most"


def cell_of(values: Mapping[str, object], *, prefix: str = "", has_baselines: bool = True) -> Any:
    """A cell of ``batch`` x ``kv_len`` with every other field as usual unless it is in values."""
    problem = PagedDecodeProblem.from_dict({**_SHAPE, **values})
    return SuiteCell(f"{prefix}{problem.batch}x{problem.kv_len}", problem, has_baselines)


def _cells(batches: tuple[int, ...], kv_lens: tuple[int, ...], **fields: object) -> Any:
    return tuple(cell_of({**fields, "batch": b, "kv_len": n}) for b in batches for n in kv_lens)


_WINDOW_BATCHES = (16, 64)
_ONE_HEAD = {"num_qo_heads": 8, "num_kv_heads": 1}

SUITES: Mapping[str, tuple[SuiteCell, ...]] = MappingProxyType(
    {
        "grid": _cells((1, 16, 64, 128), (1024, 8192, 32768)),
        "skewed": _cells((16, 64), (32768,), lengths="skewed"),
        "uniform": _cells((16, 64, 128), (16384,), lengths="uniform"),
        "one_head": tuple(
            cell_of({**_ONE_HEAD, "batch": batch, "kv_len": kv_len})
            for batch, kv_len in ((1, 4096), (1, 32768), (16, 4096), (64, 4096), (64, 32768))
        ),
        # Page size 1 with groups of 4 and of 8.
        "small_page": (
            *_cells((16, 64), (8192,), page_size=1),
            *(
                cell_of(
                    {"num_qo_heads": 64, "page_size": 1, "batch": batch, "kv_len": 4096},
                    prefix="g8 ",
                )
                for batch in (16, 64)
            ),
        ),
        "group_8": _cells((1, 16, 64), (8192,), num_qo_heads=64),
        "window": (
            *_cells(_WINDOW_BATCHES, (32768,), window_left=1023),
            *(
                cell_of({"batch": b, "kv_len": 1024}, prefix="no window ", has_baselines=False)
                for b in _WINDOW_BATCHES
            ),
        ),
        "fp8": (
            cell_of({"batch": 64, "kv_len": 8192, "kv_dtype": "float8_e4m3fn"}),
            cell_of({"batch": 64, "kv_len": 8192}, prefix="bf16 ", has_baselines=False),
        ),
        # FlashInfer has no NVFP4 decode for Hopper: our own caches are compared.
        "nvfp4": tuple(
            cell_of(
                {"batch": 64, "kv_len": 8192, "kv_dtype": kv_dtype},
                prefix=prefix,
                has_baselines=False,
            )
            for prefix, kv_dtype in (("", "nvfp4"), ("e4m3 ", "float8_e4m3fn"), ("bf16 ", ""))
        ),
    }
)

TARGETS = (
    Target("grid", "geometric mean", 1.10, "geomean"),
    Target("grid", "worst cell", 0.98, "least"),
    Target(
        "grid",
        "worst of batch 64 and 128 at 8192 and 32768",
        0.99,
        "least",
        ("64x8192", "64x32768", "128x8192", "128x32768"),
    ),
    Target("grid", "1x8192", 1.3, "least", ("1x8192",)),
    Target("grid", "16x8192", 1.04, "least", ("16x8192",)),
    Target("skewed", "batch 16", 1.08, "least", ("16x32768",)),
    Target("skewed", "batch 64", 1.6, "least", ("64x32768",)),
    Target("uniform", "geometric mean", 1.05, "geomean"),
    Target("one_head", "geometric mean", 1.1, "geomean"),
    Target("small_page", "worst cell", 1.0, "least"),
    Target("group_8", "worst cell", 1.0, "least"),
    Target("window", "worst cell", 1.05, "least"),
    Target(
        "window",
        "time over our own at 1024 tokens without a window",
        1.1,
        "most",
        ("16x32768", "64x32768"),
        ("no window 16x1024", "no window 64x1024"),
    ),
    Target("fp8", "our bf16 over our fp8", 1.7, "least", ("64x8192",), ("bf16 64x8192",)),
    Target("nvfp4", "our bf16 over our nvfp4", 1.8, "least", ("64x8192",), ("bf16 64x8192",)),
    Target("nvfp4", "our e4m3 over our nvfp4", 1.1, "least", ("64x8192",), ("e4m3 64x8192",)),
)
