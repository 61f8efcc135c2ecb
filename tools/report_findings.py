"""What the report of the shipped results.db says about Hopper against Blackwell, in sentences.

The figures are read from the report's own tables; a sentence whose figures are missing is left out.
"""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd
from tilescout.tuner.report.frames import ReportFrames

__all__ = ["findings"]

_PRODUCTS = {"h200": "H200", "b200": "B200", "gb200": "GB200", "rtx5090": "RTX 5090"}


def findings(frames: ReportFrames) -> list[str]:
    """Up to five sentences."""
    return [
        *_published(frames.libraries_summary, "gb200"),
        *_published(frames.libraries_summary, "rtx5090"),
        *_ours(frames, "paged_decode", "b200"),
        *_changed(frames, "b200"),
        *_carried(frames.transfer_summary, "paged_decode", "b200"),
    ]


def _published(libraries: pd.DataFrame, sku: str) -> Iterator[str]:
    """The libraries that have most problems on both SKUs."""
    found = libraries[(libraries["sku"] == sku) & (libraries["provenance"] == "published")]
    if not len(found):
        return
    found = found[found["num_problems"] == found["num_problems"].max()]
    op, base, bandwidth, peak, num_problems = found.iloc[0][
        ["op", "base_sku", "bandwidth_ratio", "peak_ratio", "num_problems"]
    ]
    ratios = ", ".join(
        f"{ratio:.2f} ({library} {version})"
        for library, ratio, version in zip(
            found["library"], found["geomean_ratio"], found["library_versions"], strict=True
        )
    )
    yield (
        f"On {num_problems} problems of `{op}` with published times, other libraries make the "
        f"{_PRODUCTS[sku]} {ratios} times as fast as the {_PRODUCTS[base]} in geometric mean, "
        f"where its bandwidth alone would give {bandwidth:.2f} and its peak rate {peak:.2f}."
    )


def _ours(frames: ReportFrames, op: str, sku: str) -> Iterator[str]:
    summary = frames.summary[(frames.summary["op"] == op)]
    measured = summary[summary["provenance"] == "measured"]
    pairs = frames.comparison_summary
    compared = pairs[(pairs["op"] == op) & (pairs["sku"] == sku)]
    if not len(measured) or not len(compared):
        return
    here, row = measured.iloc[0], compared.iloc[0]
    kind = row["provenance"]
    caveat = (
        "; a prediction rests on bandwidth and peak rate, so this is what our cost model expects, "
        "not what a GPU did"
    )
    yield (
        f"Our `{op}` winners reach {100 * here['median_share_of_roofline']:.0f}% of the "
        f"{_PRODUCTS[here['sku']]}'s roofline (measured, median of {here['num_problems']} "
        f"problems); over {row['num_problems']} problems the {_PRODUCTS[sku]} is "
        f"{row['geomean_speedup']:.2f} times as fast ({kind}, from {row['smallest_speedup']:.2f} "
        f"to {row['largest_speedup']:.2f}), where bandwidth alone would give "
        f"{row['bandwidth_ratio']:.2f}{caveat if 'predicted' in kind else ''}."
    )


def _changed(frames: ReportFrames, sku: str) -> Iterator[str]:
    pairs, changes = frames.comparison_summary, frames.parameter_changes
    parts = []
    for _, row in pairs[pairs["sku"] == sku].iterrows():
        num_problems = row["num_problems"]
        text = (
            f"{num_problems - row['num_same_config']} of {num_problems} problems of `{row['op']}`"
        )
        found = changes[(changes["op"] == row["op"]) & (changes["sku"] == sku)]
        if len(found):
            first = found.iloc[0]
            text += f", most often in `{first['parameter']}` ({first['num_changed']})"
        parts.append(f"{text} ({row['provenance']})")
    if parts:
        base = _PRODUCTS[pairs.iloc[0]["base_sku"]]
        yield (
            f"On the {_PRODUCTS[sku]} another config than on the {base} wins for "
            f"{' and '.join(parts)}."
        )


def _carried(transfers: pd.DataFrame, op: str, sku: str) -> Iterator[str]:
    found = transfers[(transfers["op"] == op) & (transfers["num_timed"] > 0)]
    there = found[(found["from_provenance"] == "measured") & (found["sku"] == sku)]
    back = found[(found["from_sku"] == sku) & found["sku"].isin(there["from_sku"])]
    if not len(there) or not len(back):
        return
    told = [
        f"the {_PRODUCTS[row['from_sku']]}'s winner ({row['from_provenance']}) takes "
        f"{row['geomean_cost']:.2f} times as long on the {_PRODUCTS[row['sku']]} as its own "
        f"({row['provenance']}, {row['num_timed']} of {row['num_common']} problems, at most "
        f"{row['largest_cost']:.2f})"
        for row in (there.iloc[0], back.iloc[0])
    ]
    yield f"Carrying a `{op}` winner over costs time: {', and '.join(told)}."
