"""The space of the chunked forward: seeds, parts, refusals, estimates, and that it compiles."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest
from tilescout.kernels.base import Config
from tilescout.kernels.gdn_chunk_fwd import GdnChunkProblem
from tilescout.kernels.registry import template
from tilescout.search_spaces.gdn_chunk_fwd import triton_space
from tilescout.search_spaces.parts import PartScope, algorithms, part_space
from tilescout.tuner.catalog import gpu

PROBLEM = GdnChunkProblem(1, 8192, 8192, 16, 32, 128, 128, "bfloat16")


def triton():
    return template("gdn_chunk_fwd", "triton")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("k", "v"), [(64, 64), (128, 128), (96, 192), (192, 96), (256, 256)])
def test_default_seeds_and_draws_are_valid_everywhere(k, v, dtype) -> None:
    problem = replace(PROBLEM, head_dim_k=k, head_dim_v=v, dtype=dtype)
    rng = random.Random(0)
    for name in ("h200", "b200", "rtx5090"):
        space = triton_space(problem, gpu(name))
        assert len(space.valid_seeds()) >= 3
        for config in (*space.valid_seeds(), *(space.sample(rng) for _ in range(20))):
            assert space.check(config) is None


def test_what_cannot_work_is_refused(h200) -> None:
    space = triton_space(PROBLEM, h200)
    cut = next(c for c in space.valid_seeds() if c["segment"])
    short = triton_space(replace(PROBLEM, num_tokens=512, max_seqlen=512), h200)
    assert "the longest sequence has 512" in short.check(cut.replace(chunk=64, segment=8))
    assert short.check(cut.replace(chunk=64, segment=4)) is None
    one_tile = {"intra_tile": "chunk", "inverse": "substitution", "inverse_gate": "free"}
    default = space.default.replace(**one_tile, scan_num_stages=2)
    wide = default.replace(scan_block_v=128, scan_num_warps=2)
    assert "registers a thread for the tiles of scan" in space.check(wide)
    assert "tiles of intra" in space.check(default.replace(chunk=128, intra_num_warps=1))
    assert "blocks of 16 rows" in space.check(space.default.replace(chunk=128))
    deep = default.replace(chunk=128, scan_num_stages=4, intra_num_warps=8, output_num_warps=8)
    assert "scan: " in space.check(deep)


def test_refusals_of_a_product_that_nobody_can_look_through_are_a_sample(h200) -> None:
    space = triton_space(PROBLEM, h200)
    assert space.product_size() > 10**12
    counts = space.refusals()
    assert all(count > 0 for count in counts.values())
    rng = random.Random(2)
    boxes = list(space._boxes())
    sizes = [math.prod(map(len, options)) for _, options in boxes]
    draws = [
        Config.of("triton", {n: rng.choice(o) for n, o in zip(*box, strict=True)})
        for box in rng.choices(boxes, sizes, k=4000)
    ]
    share = sum(space.check(config) is not None for config in draws) / len(draws)
    assert abs(sum(counts.values()) / space.product_size() - share) < 0.05


def test_parameters_of_parts_belong_to_parts_that_the_algorithm_has(h200) -> None:
    problem = replace(PROBLEM, use_qk_l2norm=True)
    seen = set()
    for algorithm in algorithms(triton_space(problem, h200)):
        base = algorithm.space.default
        parts = [part.name for part in triton().parts(problem, base)]
        assert set(algorithm.part_names) == set(parts), str(algorithm)
        kernels = [spec.name for spec in triton().kernel_specs(problem, base)]
        assert kernels == [k for part in triton().parts(problem, base) for k in part.kernels]
        seen.add(tuple(parts))
        for part in parts[:1]:
            narrow = part_space(algorithm, PartScope.of(algorithm, part, base))
            assert narrow.count() > 1
    assert len(seen) == 4


@pytest.mark.parametrize("lengths", [(1, 8192, 8192), (8, 8192, 1024), (3, 9000, 8000)])
def test_estimates_follow_the_launches(lengths, h200) -> None:
    problem = GdnChunkProblem(*lengths, 16, 32, 128, 128, "bfloat16", use_qk_l2norm=True)
    rng = random.Random(1)
    space = triton_space(problem, h200)
    for config in (*space.valid_seeds(), *(space.sample(rng) for _ in range(20))):
        estimates = triton().estimate(problem, config, h200)
        names = [part.kernels[0] for part in triton().parts(problem, config)]
        launches = itertools.chain(*([n] * (1 + n.endswith("norm_kernel")) for n in names))
        assert [e.kernel for e in estimates] == list(launches)
        for e in estimates:
            assert e.num_programs > 0
            assert e.bytes_moved > 0
            assert e.longest_share >= 1.0
        # Nothing is read or written less often than the operation must.
        assert sum(e.bytes_moved for e in estimates) > problem.bytes_moved // 2


def test_cutting_shortens_the_chain_and_fusing_saves_traffic(h200) -> None:
    space = triton_space(PROBLEM, h200)
    base = space.default

    def scan(config):
        return next(e for e in triton().estimate(PROBLEM, config, h200) if "scan" in e.kernel)

    cut = next(c for c in space.valid_seeds() if c["segment"] and c["algorithm"] == "separate")
    assert scan(cut).serial_loads < scan(base).serial_loads / 3
    fused = next(c for c in space.valid_seeds() if c["algorithm"] == "fused" and not c["segment"])
    total = [sum(e.bytes_moved for e in triton().estimate(PROBLEM, c, h200)) for c in (fused, base)]
    assert total[0] < total[1]


@pytest.mark.parametrize(("arch", "sku"), [(90, "h200"), (100, "b200"), (120, "rtx5090")])
def test_default_and_a_cut_fused_config_compile_for_every_architecture(arch, sku) -> None:
    device = gpu(sku)
    problem = replace(PROBLEM, use_qk_l2norm=True)
    space = triton_space(problem, device)
    cut = next(c for c in space.valid_seeds() if c["segment"] and c["algorithm"] == "fused")
    compiled = set()
    for config in (space.default, cut):
        for spec in triton().kernel_specs(problem, config):
            binary = spec.compile(arch)
            assert binary.cubin[:4] == b"\x7fELF"
            assert binary.threads_per_block == 32 * spec.num_warps
            assert binary.smem_bytes <= device.smem_per_block_bytes, spec.name
            compiled.add(spec.name)
    assert len(compiled) == 7


def test_what_the_template_refuses_has_a_reason(h200) -> None:
    odd = replace(PROBLEM, head_dim_v=80)
    assert "head_dim_v=80 is not one of 64, 96, 128, 192, 256" in triton().supports(odd, h200)
    assert triton().supports(PROBLEM, h200) is None
    old = replace(h200, compute_capability=(8, 0))
    assert "compute capability 8.0 is below 9.0" in triton().supports(PROBLEM, old)


def test_a_transition_that_shared_memory_cannot_hold_is_refused() -> None:
    space = triton_space(replace(PROBLEM, head_dim_k=256), gpu("h200"))
    assert not any(config["segment"] for config in space.valid_seeds())
    cut = next(c for c in triton_space(PROBLEM, gpu("h200")).valid_seeds() if c["segment"])
    assert "256 x 256 in fp32, takes 262144 bytes" in str(space.check(cut))


def test_a_stitch_that_shared_memory_cannot_hold_is_refused(h200) -> None:
    """Bytes as Triton 3.9's binaries ask for: 294912, 221184, 196608 on sm_90, 155648 on sm_120."""
    space, small = triton_space(PROBLEM, h200), triton_space(PROBLEM, gpu("rtx5090"))
    cut = next(c for c in space.valid_seeds() if c["segment"]).replace(stitch_num_stages=3)
    wide = cut.replace(stitch_block_v=64, stitch_precision="tf32")
    assert "stitch: 294912 bytes" in str(space.check(wide))
    assert space.check(cut.replace(stitch_block_v=16, stitch_precision="tf32")) is None
    assert space.check(cut.replace(stitch_block_v=32, stitch_precision="tf32x3")) is None
    assert "stitch: " in str(small.check(cut.replace(stitch_block_v=16, scan_num_stages=1)))
    # 262144 with the states in two parts, where one product of fp32 fits: 229376.
    split = cut.replace(stitch_block_v=64, stitch_precision="tf32x3")
    assert "stitch: 262144 bytes" in str(space.check(split))
    assert space.check(split.replace(stitch_precision="ieee")) is None
    assert space.check(split.replace(stitch_block_v=32)) is None


def test_a_scan_with_its_output_has_room_for_the_new_values(h200) -> None:
    """Triton 3.9's binary for sm_90 asks for 239116 bytes; its tiles alone are 229376."""
    space = triton_space(PROBLEM, h200)
    fused = next(
        c for c in space.valid_seeds() if c["algorithm"] == "fused" and c["form"] == "wy"
    ).replace(chunk=64, scan_block_v=64, scores="computed", scan_num_warps=8, scan_maxnreg=255)
    assert "scan: 237568 bytes" in str(space.check(fused.replace(scan_num_stages=4)))
    held = fused.replace(scan_num_stages=3)
    assert space.check(held) is None
    sizes = {
        config["scan_num_stages"]: next(
            spec.compile(90).smem_bytes
            for spec in triton().kernel_specs(PROBLEM, config)
            if "scan" in spec.name
        )
        for config in (held, fused.replace(scan_num_stages=4))
    }
    assert sizes[3] <= h200.smem_per_block_bytes < sizes[4]
