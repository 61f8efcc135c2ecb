"""Which columns of which frame the page shows, in which order, under which headings.

The CSV file beside a table has all columns of its frame.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from .tables import Column

__all__ = ["COLUMNS"]

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

COLUMNS: Mapping[str, tuple[Column, ...]] = MappingProxyType(
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
            Column("template", "template"),
            Column("config", "config"),
            _STATE,
            _TRIALS,
            _BY_STATUS,
            Column("default_status", "default ended", is_printed=False),
            Column("baseline", "baseline"),
            Column("baseline_time_us", "baseline (us)", "time", is_printed=False),
            Column("speedup_over_baseline", "speed-up over baseline", "ratio", is_printed=False),
            Column("roofline_us", "roofline (us)", "time", is_printed=False),
            Column("num_samples", "samples", "count", is_printed=False),
            *_DATED,
            Column("workload", "workload", is_printed=False),
            Column("trial_id", "trial id", is_printed=False),
        ),
        "comparison": (
            _OP,
            _PROBLEM,
            Column("base_sku", "base", is_identity=True),
            Column("base_time_us", "base time (us)", "time"),
            Column("base_provenance", "base provenance", is_identity=True),
            _SKU,
            Column("time_us", "time (us)", "time"),
            _PROVENANCE,
            Column("speedup", "times as fast as base", "ratio"),
            Column("speedup_provenance", "provenance of the ratio", is_identity=True),
            Column("bandwidth_ratio", "bandwidth alone would give", "ratio"),
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
"""Columns of the page by the name of the frame; ``progress`` is drawn, not listed."""
