"""Which columns of which frame the page shows, in which order, under which headings.

The CSV file beside a table has all columns of its frame.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import pandas as pd

from .tables import Column, Kind

__all__ = ["NOT_LISTED", "columns_of"]

NOT_LISTED = ("progress", "transfer", "libraries", "transfer_summary")
"""Tables that the page only links to: it draws them, or has their summary."""

_OP = Column("op", "op", is_identity=True)
_PROBLEM = Column("problem", "problem", href="problem_href", is_identity=True)
_SKU = Column("sku", "SKU", is_identity=True)
_PROVENANCE = Column("provenance", "provenance", is_identity=True)
_STATE = Column("state", "state")
_POLICY = Column("policy", "policy")
_TRIALS = Column("num_trials", "trials", "count")
_BY_STATUS = Column("trials_by_status", "trials by status")
_ORIGIN = (_POLICY, Column("device", "device"), Column("versions", "versions"))
_DATED = (*_ORIGIN, Column("date", "date (UTC)"))
_BASE = Column("base_sku", "base", is_identity=True)
_BANDWIDTH_RATIO = Column("bandwidth_ratio", "bandwidth alone would give", "ratio")
_RATIO_PROVENANCE = Column("provenance", "provenance of the ratios", is_identity=True)

_COLUMNS: Mapping[str, tuple[Column, ...]] = MappingProxyType(
    {
        "devices": (
            _SKU,
            Column("device", "device"),
            _PROVENANCE,
            Column("compute_capability", "compute capability"),
            Column("num_sms", "SMs", "count"),
            Column("memory_bytes", "memory (GB)", "gigabytes"),
            Column("bandwidth_gbps", "bandwidth (GB/s)", "count"),
            Column("peak_tflops", "dense peak (TFLOP/s)"),
            _POLICY,
            Column("versions", "versions"),
            Column("num_studies", "studies", "count"),
            _TRIALS,
            Column("first_date", "from (UTC)"),
            Column("date", "to (UTC)"),
        ),
        "summary": (
            _SKU,
            _OP,
            _PROVENANCE,
            Column("num_problems", "problems", "count"),
            Column("num_decided", "with a winner", "count"),
            Column("num_compared", "with both times", "count"),
            Column("geomean_gain_over_default", "gain over default (geometric mean)", "ratio"),
            Column("smallest_gain_over_default", "smallest gain", "ratio"),
            Column("num_with_baseline", "with a baseline", "count"),
            Column("geomean_speedup_over_baseline", "gain over baseline (geom. mean)", "ratio"),
            Column("smallest_speedup_over_baseline", "smallest", "ratio"),
            Column("speedup_provenance", "provenance (baseline / ours)"),
            Column("median_share_of_roofline", "share of roofline (median)", "percent"),
            _TRIALS,
            *_DATED,
        ),
        "results": (
            _OP,
            _PROBLEM,
            _PROVENANCE,
            Column("time_us", "time (us)", "time"),
            Column("default_time_us", "default (us)", "time"),
            Column("gain_over_default", "gain over default", "ratio"),
            Column("achieved_gbps", "achieved (GB/s)", "count"),
            Column("achieved_tflops", "achieved (TFLOP/s)", "time"),
            Column("share_of_roofline", "share of roofline", "percent"),
            Column("p10_us", "p10 to p90 (us)", "range", upper="p90_us"),
            Column("ci_low_us", "95% CI of the median (us)", "range", upper="ci_high_us"),
            Column("baseline", "baseline"),
            Column("baseline_time_us", "baseline (us)", "time"),
            Column("speedup_over_baseline", "gain over baseline", "ratio"),
            Column("speedup_provenance", "provenance (baseline / ours)"),
            Column("language", "language"),
            Column("template", "template"),
            Column("algorithm", "algorithm"),
            Column("config", "config"),
            Column("is_settled", "ahead of the second beyond both CIs"),
            _STATE,
            _TRIALS,
            _BY_STATUS,
            Column("default_status", "default ended", is_printed=False),
            Column("baseline_version", "baseline version", is_printed=False),
            Column("roofline_us", "roofline (us)", "time", is_printed=False),
            Column("num_samples", "samples", "count", is_printed=False),
            *_DATED,
            Column("workload", "workload", is_printed=False),
            Column("trial_id", "trial id", is_printed=False),
        ),
        "baselines": (
            _SKU,
            _OP,
            _PROBLEM,
            Column("library", "library", is_identity=True),
            Column("library_version", "version"),
            Column("time_us", "library (us)", "time"),
            _PROVENANCE,
            Column("our_time_us", "ours (us)", "time"),
            Column("our_provenance", "provenance of ours", is_identity=True),
            Column("speedup", "ours is as fast (times)", "ratio"),
            Column("compared", "what is compared (library / ours)", is_identity=True),
            Column("achieved_gbps", "library achieves (GB/s)", "count"),
            Column("share_of_roofline", "library's share of roofline", "percent"),
            _POLICY,
            Column("conditions", "conditions", is_printed=False),
            Column("source", "source"),
            Column("device", "device"),
            Column("versions", "versions", is_printed=False),
            Column("date", "date (UTC)"),
        ),
        "best_configs": (
            _SKU,
            _OP,
            _PROBLEM,
            _PROVENANCE,
            Column("rank", "rank", "count", is_identity=True),
            Column("time_us", "time (us)", "time"),
            Column("ci_low_us", "95% CI of the median (us)", "range", upper="ci_high_us"),
            Column("over_best", "time over rank 1", "ratio"),
            Column("is_settled", "slower than the rank before, beyond both CIs"),
            Column("is_finalist", "finalist"),
            Column("num_samples", "samples", "count", is_printed=False),
            Column("template", "template"),
            Column("config", "config"),
            *_DATED,
        ),
        "accuracy": (
            _SKU,
            _OP,
            _PROBLEM,
            _PROVENANCE,
            Column("num_right", "trials compared and right", "count"),
            Column("num_incorrect", "incorrect", "count"),
            Column("num_unrepeatable", "unrepeatable", "count"),
            Column("template", "template of the best"),
            Column("max_abs_error", "its largest error", "tiny"),
            Column("relative_rms_error", "its relative RMS error", "tiny"),
            Column("largest_abs_error", "largest error of all right", "tiny"),
            Column("largest_relative_rms_error", "largest relative RMS error", "tiny"),
            *_DATED,
        ),
        "importance": (
            _SKU,
            _OP,
            _PROVENANCE,
            Column("parameter", "parameter", is_identity=True),
            Column("share", "share", "percent"),
            Column("num_searches", "searches", "count"),
            Column("num_times", "times", "count"),
            *_DATED,
        ),
        "baselines_summary": (
            _SKU,
            _OP,
            Column("library", "library", is_identity=True),
            Column("library_versions", "version"),
            Column("num_problems", "problems", "count"),
            Column("num_faster", "ours faster on", "count"),
            Column("geomean_speedup", "ours is as fast (geom. mean)", "ratio"),
            Column("smallest_speedup", "smallest", "ratio"),
            Column("largest_speedup", "largest", "ratio"),
            Column("compared", "what is compared (library / ours)", is_identity=True),
            _PROVENANCE,
            *_DATED,
        ),
        "comparison_summary": (
            _OP,
            _BASE,
            _SKU,
            _RATIO_PROVENANCE,
            Column("num_problems", "problems", "count"),
            Column("geomean_speedup", "times as fast as base (geom. mean)", "ratio"),
            Column("smallest_speedup", "smallest", "ratio"),
            Column("largest_speedup", "largest", "ratio"),
            _BANDWIDTH_RATIO,
            Column("peak_ratio", "peak rate alone would give", "ratio"),
            Column("geomean_roofline_ratio", "roofline would give (geom. mean)", "ratio"),
            Column("num_same_config", "same winner on both", "count"),
            *_DATED,
        ),
        "parameter_changes": (
            _OP,
            _BASE,
            _SKU,
            Column("provenance", "provenance (base / SKU)", is_identity=True),
            Column("parameter", "parameter of the winner", is_identity=True),
            Column("num_changed", "changed on", "count"),
            Column("num_problems", "of problems", "count"),
            Column("share_changed", "share", "percent"),
            Column("changes", "commonest changes (problems)"),
            *_DATED,
        ),
        "binary_comparison": (
            _OP,
            _PROBLEM,
            _BASE,
            _SKU,
            Column("compared", "provenance (base / SKU)", is_identity=True),
            Column("base_registers", "registers a thread: base", "count"),
            Column("registers", "registers a thread: SKU", "count"),
            Column("base_spill_bytes", "spill (bytes a thread): base", "count"),
            Column("spill_bytes", "spill (bytes a thread): SKU", "count"),
            Column("base_smem_bytes", "shared memory (bytes a block): base", "count"),
            Column("smem_bytes", "shared memory (bytes a block): SKU", "count"),
            Column("base_tmem_columns", "tensor memory (columns): base", "count"),
            Column("tmem_columns", "tensor memory (columns): SKU", "count"),
            Column("base_mma_kind", "MMA kind: base", is_identity=True),
            Column("mma_kind", "MMA kind: SKU", is_identity=True),
            Column("base_num_instructions", "instructions: base", "count"),
            Column("num_instructions", "instructions: SKU", "count"),
            _PROVENANCE,
            *_DATED,
        ),
        "libraries_summary": (
            _OP,
            Column("library", "library", is_identity=True),
            _BASE,
            _SKU,
            _RATIO_PROVENANCE,
            Column("num_problems", "problems", "count"),
            Column("geomean_ratio", "times as fast as base (geom. mean)", "ratio"),
            Column("smallest_ratio", "smallest", "ratio"),
            Column("largest_ratio", "largest", "ratio"),
            _BANDWIDTH_RATIO,
            Column("peak_ratio", "peak rate alone would give", "ratio"),
            Column("geomean_roofline_ratio", "roofline would give (geom. mean)", "ratio"),
            Column("base_library_versions", "version on base"),
            Column("library_versions", "version on SKU"),
            *_DATED,
        ),
        "transfer_summary": (
            _OP,
            Column("from_sku", "best config of", is_identity=True),
            Column("from_provenance", "found by times", is_identity=True),
            Column("sku", "on SKU", is_identity=True),
            Column("provenance", "times there", is_identity=True),
            Column("num_common", "problems", "count"),
            Column("num_timed", "timed there", "count"),
            Column("num_failed", "failed there", "count"),
            Column("num_not_valid", "not valid there", "count"),
            Column("num_not_tried", "not tried there", "count"),
            Column("geomean_cost", "time over the SKU's own best (geom. mean)", "ratio"),
            Column("largest_cost", "largest", "ratio"),
            *_DATED,
        ),
        "transfer_missing": (
            _OP,
            Column("from_sku", "best config of", is_identity=True),
            Column("sku", "on SKU", is_identity=True),
            Column("status", "how it ended there", is_identity=True),
            Column("constraint", "what refuses it", is_identity=True),
            Column("num_problems", "problems", "count"),
            Column("num_common", "of common problems", "count"),
            Column("reasons", "commonest reason (problems)"),
            Column("provenance", "times there", is_identity=True),
            *_DATED,
        ),
        "comparison": (
            _OP,
            _PROBLEM,
            _BASE,
            Column("base_time_us", "base time (us)", "time"),
            Column("base_provenance", "base provenance", is_identity=True),
            _SKU,
            Column("time_us", "time (us)", "time"),
            _PROVENANCE,
            Column("speedup", "times as fast as base", "ratio"),
            Column("speedup_provenance", "provenance of the ratio", is_identity=True),
            _BANDWIDTH_RATIO,
            Column("speedup_over_bandwidth_ratio", "ratio over bandwidth's", "ratio"),
            Column("peak_ratio", "peak rate alone would give", "ratio", is_printed=False),
            Column("roofline_ratio", "roofline would give", "ratio"),
            Column("changed_parameters", "changed in the winner (base -> SKU)"),
            Column("base_share_of_roofline", "base share of roofline", "percent", is_printed=False),
            Column("share_of_roofline", "share of roofline", "percent"),
            Column("base_state", "base state"),
            _STATE,
            _POLICY,
            Column("base_device", "base device"),
            Column("device", "device"),
            Column("base_versions", "base versions"),
            Column("versions", "versions"),
            Column("base_date", "base date (UTC)"),
            Column("date", "date (UTC)"),
        ),
        "binaries": (
            _SKU,
            _OP,
            _PROBLEM,
            _PROVENANCE,
            Column("kernel", "kernel"),
            Column("threads_per_block", "threads a block", "count"),
            Column("registers", "registers a thread", "count"),
            Column("spill_bytes", "spill (bytes a thread)", "count"),
            Column("smem_bytes", "shared memory (bytes a block)", "count"),
            Column("tmem_columns", "tensor memory (columns)", "count"),
            Column("mma_kind", "MMA kind"),
            Column("num_instructions", "instructions", "count"),
            Column("instruction_mix", "instruction mix"),
            Column("template", "template"),
            Column("config_id", "config id"),
            *_DATED,
        ),
        "searches": (
            _SKU,
            _OP,
            _PROBLEM,
            _PROVENANCE,
            _STATE,
            Column("is_shown", "shown above"),
            _TRIALS,
            _BY_STATUS,
            Column("num_part_trials", "trials of parts", "count"),
            Column("compile_s", "compiling (s)", "time"),
            Column("measure_s", "on the GPU (s)", "time"),
            Column("seed", "seed", is_printed=False),
            Column("created", "created (UTC)", is_printed=False),
            *_DATED,
        ),
        "failures": (
            _SKU,
            _OP,
            _PROVENANCE,
            Column("status", "status"),
            _TRIALS,
            Column("share_of_trials", "share of trials", "percent"),
            Column("num_problems", "problems", "count"),
            *_DATED,
            Column("reasons", "commonest reasons (trials)"),
        ),
    }
)

_MATRICES: Mapping[str, tuple[tuple[Column, ...], str, str]] = MappingProxyType(
    {
        "times": (
            (_OP, _PROBLEM, Column("library", "kernel of", is_identity=True), _POLICY),
            "_time_us",
            "{} (us)",
        ),
        "transfer_matrix": (
            (
                _OP,
                Column("from_sku", "best config of", is_identity=True),
                Column("from_provenance", "found by times", is_identity=True),
                _POLICY,
            ),
            "_cost",
            "on {} (times its own best)",
        ),
    }
)
"""First columns, the end of the names of the others, and the heading of a SKU's."""


def columns_of(name: str, frame: pd.DataFrame) -> tuple[Column, ...]:
    """The columns of a table, also of one whose columns depend on the SKUs."""
    if name in _COLUMNS:
        return _COLUMNS[name]
    first, end, heading = _MATRICES[name]
    skus = [column.removesuffix(end) for column in frame.columns if column.endswith(end)]
    kind: Kind = "time" if name == "times" else "ratio"
    return (
        *first,
        *(
            Column(f"{sku}{end}", heading.format(sku), kind, mark=f"{sku}_provenance")
            for sku in skus
        ),
    )
