"""A GPU for tests, so that no figure of ``configs/gpus`` changes what they expect."""

from __future__ import annotations

from tilescout.kernels.device import DeviceSpec

H200 = DeviceSpec(
    sku="h200",
    name="NVIDIA H200",
    architecture="hopper",
    compute_capability=(9, 0),
    num_sms=132,
    memory_bytes=141 * 10**9,
    l2_bytes=60 * 2**20,
    smem_per_block_bytes=227 * 1024,
    smem_per_sm_bytes=228 * 1024,
    registers_per_sm=65536,
    max_threads_per_sm=2048,
    max_blocks_per_sm=32,
    bandwidth_gbps=4800.0,
    peak_tflops={"bfloat16": 989.0, "float16": 989.0, "float32": 67.0},
    clock_mhz=1980.0,
)
