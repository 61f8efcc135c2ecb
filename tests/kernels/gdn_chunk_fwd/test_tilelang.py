"""The TileLang template without a GPU: values of the scan's CUDA on the CPU, binaries, refusals.

What the preparation leaves for the scan is made here in torch, with NaN where it leaves nothing.
"""

from __future__ import annotations

import itertools
import math
import re
import shutil
from dataclasses import dataclass, replace

import pytest
import torch
from tilelang_host_calls import LauncherOnHost
from tilelang_on_host import HostKernel
from tilescout.kernels.base import Config
from tilescout.kernels.gdn_chunk_fwd import GdnChunkProblem, tilelang_launcher, triton_launcher
from tilescout.kernels.gdn_chunk_fwd import reference as ref
from tilescout.kernels.gdn_chunk_fwd.inputs import RESET, pack
from tilescout.kernels.gdn_chunk_fwd.tilelang_config import GdnChunkTileLangConfig
from tilescout.kernels.gdn_chunk_fwd.tilelang_specs import misalignment, scan_spec
from tilescout.kernels.gdn_chunk_fwd.triton_specs import TensorTraits
from tilescout.kernels.registry import module_of, template
from tilescout.search_spaces.gdn_chunk_fwd import SPACES
from tilescout.tuner.catalog import gpu
from tilescout.tuner.compile_pool import CompilePool
from tilescout.tuner.records import TrialStatus

LENGTHS = (65, 0, 130, 1)
SPARE = 70
SMALL = GdnChunkProblem(4, sum(LENGTHS), 130, 1, 2, 64, 64, "bfloat16", state_layout="VK")
QWEN = GdnChunkProblem(1, 8192, 8192, 16, 32, 128, 128, "bfloat16")
UNIT = 8
LOG2_E = math.log2(math.e)


def config_of(problem, sku="h200", **values) -> Config:
    """What fits every device, with these values."""
    default = SPACES["tilelang"](problem, gpu(sku)).default
    small = {"chunk": 32, "scan_producer": "shared", "scan_num_stages": 2}
    if values.get("segment"):
        values |= {
            **{"transition_block_v": 32, "transition_num_warps": 4, "transition_num_stages": 1},
            **{"transition_maxnreg": 255, "transition_forget_bits": 0},
            **{"stitch_block_v": 32, "stitch_num_warps": 8, "stitch_num_stages": 1},
            **{"stitch_precision": "tf32x3"},
        }
    return default.replace(**{**small, **values})


@dataclass(frozen=True)
class Prepared:
    """What the scan reads beside q, k, v and the states."""

    decay: torch.Tensor
    left: torch.Tensor
    scores: torch.Tensor
    u: torch.Tensor


def prepare(problem, inputs, chunk, is_wy) -> Prepared:
    """Rows of no chunk are NaN, columns behind a chunk's end 0, as the Triton kernel has them."""
    tokens, heads, dtype = -(-inputs.num_tokens // 16) * 16, problem.num_v_heads, inputs.q.dtype
    group = heads // problem.num_heads

    def unset(*shape, dtype=dtype):
        return torch.full((heads, tokens, *shape), math.nan, dtype=dtype)

    made = Prepared(
        decay=unset(dtype=torch.float32),
        left=unset(problem.head_dim_k if is_wy else chunk),
        scores=unset(chunk),
        u=unset(problem.head_dim_v),
    )
    bounds = inputs.cu_seqlens.tolist()
    for first, last in itertools.pairwise(bounds):
        for begin in range(first, last, chunk):
            rows = slice(begin, min(begin + chunk, last))
            q, k = (
                x[0, rows].double().repeat_interleave(group, 1).transpose(0, 1)
                for x in (inputs.q, inputs.k)
            )
            v, beta = inputs.v[0, rows].double().transpose(0, 1), inputs.beta[0, rows].double().T
            total = (inputs.gate[0, rows].double().clamp_min(-128).T * LOG2_E).cumsum(1)
            size = total.shape[1]
            is_later = ~torch.ones(size, size, dtype=torch.bool).tril()
            decay = (total[:, :, None] - total[:, None, :]).masked_fill(is_later, -math.inf).exp2()
            lower = (beta[:, :, None] * (k @ k.mT) * decay).tril(-1)
            inverse = torch.linalg.inv(lower + torch.eye(size, dtype=lower.dtype))
            inverse = inverse * beta[:, None, :]
            made.decay[:, rows] = total.float()
            made.scores[:, rows] = 0
            made.scores[:, rows, :size] = ((q @ k.mT) * decay * inputs.scale).to(dtype)
            if is_wy:
                made.left[:, rows] = ((inverse * total.exp2()[:, None, :]) @ k).to(dtype)
                made.u[:, rows] = (inverse @ v).to(dtype)
            else:
                made.left[:, rows] = 0
                made.left[:, rows, :size] = inverse.to(dtype)
    return made


def entries(problem, inputs, span, count) -> torch.Tensor:
    """The state that enters each segment; NaN where none does."""
    unset = torch.full((problem.num_v_heads, problem.head_dim_k, problem.head_dim_v), math.nan)
    bounds, found = inputs.cu_seqlens.tolist(), []
    for i, (first, last) in enumerate(itertools.pairwise(bounds)):
        found.append(unset)
        for begin in range(first + span, last, span):
            cut = replace(
                inputs,
                cu_seqlens=torch.tensor([first, begin]),
                initial_state=inputs.initial_state[i : i + 1],
            )
            found.append(ref.chunked_reference(problem, cut, 0)[1].float())
    return torch.stack(found + [unset] * (count - len(found)))


def scan(problem, config, inputs, folder, *, is_reversed=False, change=None):
    """Outputs of the scan's kernel on the CPU."""
    typed = GdnChunkTileLangConfig(problem, config)
    is_wy = typed.form == "wy"
    traits = replace(TensorTraits.of(problem), seqlen_type="i64")
    kernel = HostKernel.of(scan_spec(typed, traits), folder, change=change)
    made = prepare(problem, inputs, typed.chunk, is_wy)
    outputs = ref.make_outputs(problem, inputs)
    outputs.out[:, sum(LENGTHS) :] = 0  # these rows are another kernel's
    count = typed.max_segments(inputs.num_tokens, inputs.num_sequences)
    span = typed.segment * typed.chunk
    named = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "out": outputs.out}
    strides = {
        f"{n}_stride_{a}": x.stride(i) for n, x in named.items() for i, a in ((1, "t"), (2, "h"))
    }
    if is_wy:
        strides |= {"v_stride_t": made.u.stride(0), "v_stride_h": made.u.stride(1)}
    values = {
        **{"Q": inputs.q, "K": inputs.k, "V": made.u if is_wy else inputs.v, "Out": outputs.out},
        **{"Bounds": inputs.cu_seqlens, "Decay": made.decay, "Left": made.left},
        **{"Scores": made.scores if typed.has_scores else None},
        **{"Initial": inputs.initial_state, "Final": outputs.final_state},
        "Entry": entries(problem, inputs, span, count) if span else None,
        "scale": inputs.scale,
        **{name: stride // UNIT for name, stride in strides.items()},
        "num_tokens": inputs.num_tokens,
        "scratch_tokens": made.decay.shape[1],
        "num_sequences": inputs.num_sequences,
        "tokens_each": inputs.num_tokens,
        "segment_chunks": typed.segment,
        "num_segments": count,
        "num_heads": problem.num_heads,
        "num_v_heads": problem.num_v_heads,
    }
    grid = (count * problem.num_v_heads * typed.v_blocks,)
    kernel(grid, values, is_reversed=is_reversed)
    return outputs


def inputs_of(problem):
    """Packed ragged sequences, gates that reset, NaN behind the last sequence."""
    inputs = pack(
        problem,
        LENGTHS,
        device="cpu",
        seed=0,
        num_spare_tokens=SPARE,
        index_dtype=torch.int64,
    )
    for x in (inputs.q, inputs.k, inputs.v):
        x[:, -SPARE:] = math.nan
    inputs.gate[0, 3:-SPARE:37, 0] = RESET
    return inputs


ROLES = {"scan_roles": "split", "scan_producer": "own_group", "scan_num_stages": 2}
VALUES = {
    "inverse": (SMALL, {"chunk": 64, "scan_num_stages": 2}),
    "inverse, a warp that loads": (SMALL, {"chunk": 32, "scan_producer": "own_warp"}),
    "wy, a warp that loads": (SMALL, {"form": "wy", "chunk": 64, "scan_producer": "own_warp"}),
    "wy, segments": (SMALL, {"form": "wy", "chunk": 32, "segment": 4}),
    "wy, two warp groups, KV": (
        replace(SMALL, head_dim_v=128, state_layout="KV", num_v_heads=1),
        {"form": "wy", "chunk": 32, "scan_block_v": 128},
    ),
    "inverse, a group that loads": (
        replace(SMALL, head_dim_v=128, num_v_heads=1),
        {"chunk": 32, "scan_block_v": 128, "scan_producer": "own_group"},
    ),
    "wy, two roles": (SMALL, {"form": "wy", "chunk": 64, **ROLES, "scan_num_turns": 2}),
    "inverse, two roles": (SMALL, {"chunk": 64, **ROLES, "scan_num_turns": 1}),
    "wy, two roles, segments": (
        SMALL,
        {"form": "wy", "chunk": 64, "segment": 4, **ROLES, "scan_num_turns": 2},
    ),
    "inverse, two roles, scores made here": (
        SMALL,
        {"chunk": 64, "scores": "computed", **ROLES, "scan_num_turns": 2},
    ),
    "wy, two roles, two groups, scores made here, segments": (
        replace(SMALL, head_dim_v=128, num_v_heads=1),
        {
            **{"form": "wy", "chunk": 64, "scores": "computed", "segment": 4, **ROLES},
            **{"scan_block_v": 128, "scan_num_turns": 1},
        },
    ),
    "inverse, two roles, two groups": (
        replace(SMALL, head_dim_v=128, num_v_heads=1),
        {"chunk": 64, **ROLES, "scan_block_v": 128, "scan_num_turns": 1},
    ),
    "mma, fp16, K 96, V 32 at a time": (
        replace(SMALL, dtype="float16", head_dim_k=96),
        {"chunk": 32, "scan_matmul": "mma", "scan_block_v": 32, "scan_producer": "own_warp"},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", VALUES)
def test_the_generated_code_matches_the_reference(case, tmp_path) -> None:
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    problem, values = VALUES[case]
    long = replace(problem, num_sequences=1, num_tokens=8192, max_seqlen=8192)
    config = config_of(long, **values)
    assert SPACES["tilelang"](long, gpu("h200")).check(config) is None
    inputs = inputs_of(problem)
    outputs = scan(problem, config, inputs, tmp_path, is_reversed="segments" in case)
    assert ref.compare(problem, inputs, outputs).reason is None


def launched(problem, config, inputs, outputs, folder):
    """What the scan's kernel would be launched with, and what it should be, by its names."""
    typed, tokens = GdnChunkTileLangConfig(problem, config), inputs.num_tokens
    with pytest.MonkeyPatch.context() as patch:
        on_host = LauncherOnHost(patch, folder)
        patch.setattr(triton_launcher, "_arch_of", lambda device: 90)
        patch.setattr(triton_launcher, "_bound", lambda *spec: lambda *values: None)
        patch.setattr(tilelang_launcher, "_load", lambda spec, arch: spec.bind(arch))
        # Scratch memory for more than this call.
        launcher = tilelang_launcher.GdnChunkTileLangLauncher(typed, inputs, 2 * tokens, 9)
        launcher.launch(inputs, outputs)
    scratch, is_wy = launcher._scratch, typed.form == "wy"
    q, k = scratch.get("q", inputs.q), scratch.get("k", inputs.k)
    token_major = {"q": q, "k": k, "out": outputs.out} | ({} if is_wy else {"v": inputs.v})
    strides = {(n, a): x.stride(i) for n, x in token_major.items() for i, a in ((1, "t"), (2, "h"))}
    if is_wy:
        strides |= {("v", a): scratch["u"].stride(i) for i, a in ((0, "t"), (1, "h"))}
    values = {
        **{"Q": q, "K": k, "V": scratch["u"] if is_wy else inputs.v, "Out": outputs.out},
        **{"Bounds": inputs.cu_seqlens, "Decay": scratch["total_decay"]},
        **{
            "Left": scratch["w" if is_wy else "inverse"],
            "Scores": scratch["scores"] if typed.has_scores else None,
        },
        **{"Initial": inputs.initial_state, "Final": outputs.final_state},
        **{"Entry": scratch["entry_state"], "scale": inputs.scale},
        **{f"{n}_stride_{a}": stride // UNIT for (n, a), stride in strides.items()},
        **{"num_tokens": tokens, "num_sequences": inputs.num_sequences, "tokens_each": tokens},
        **{"scratch_tokens": scratch["total_decay"].shape[1], "segment_chunks": typed.segment},
        "num_segments": typed.max_segments(tokens, inputs.num_sequences),
        "num_heads": problem.num_heads,
        "num_v_heads": problem.num_v_heads,
    }
    return on_host, values


@pytest.mark.slow
@pytest.mark.parametrize("case", VALUES)
def test_the_launcher_passes_what_the_program_declares(case, tmp_path) -> None:
    if shutil.which("gcc") is None:
        pytest.skip("no gcc")
    problem, values = VALUES[case]
    inputs, long = inputs_of(problem), replace(problem, num_tokens=8192, max_seqlen=8192)
    config = config_of(long, **values)
    on_host, expected = launched(
        problem, config, inputs, ref.make_outputs(problem, inputs), tmp_path
    )
    on_host.check("gdn_chunk_tilelang_scan", expected)


BROKEN = {
    "rows behind the end are not cleared": r"if \(num_left < 64\)",
    "a product is not waited for": r"tl::wait_wgmma<0>\(\);",
    "a tile is not waited for": r"ready\[\(t % 2\)\]\.wait\([^;]*;",
}


@pytest.mark.slow
@pytest.mark.parametrize("case", BROKEN)
def test_what_is_missing_is_found(case, tmp_path) -> None:
    if shutil.which("g++") is None:
        pytest.skip("no g++")

    def change(cuda: str) -> str:
        other = "if (false)" if "if" in BROKEN[case] else ""
        broken, count = re.subn(BROKEN[case], other, cuda)
        assert count
        return broken

    inputs = inputs_of(SMALL)
    config = config_of(SMALL, chunk=64, scan_num_stages=2)
    try:
        outputs = scan(SMALL, config, inputs, tmp_path, change=change)
        found = ref.compare(SMALL, inputs, outputs).reason
    except RuntimeError as error:
        found = str(error)
    assert found is not None


ONE_TILE = {"intra_tile": "chunk", "inverse": "substitution", "inverse_gate": "free"}
ARCHITECTURES = {90: "h200", 100: "b200", 120: "rtx5090"}
OWN_WARP = {"scan_producer": "own_warp", "scan_num_stages": 3}
OWN_GROUP = {"scan_producer": "own_group", "scan_num_stages": 2, "scan_block_v": 128}
THREADS = {"shared": 128, "own_warp": 160, "own_group": 384}
COMPILED = {
    "sm_90 wy": (90, {"form": "wy", "chunk": 64, "scan_num_stages": 3}),
    "sm_90 inverse, a warp that loads": (90, {"chunk": 64, **OWN_WARP}),
    "sm_90 wy, a group that loads": (90, {"form": "wy", "chunk": 64, **OWN_GROUP}),
    "sm_90 two roles, scores made here": (
        90,
        {
            "chunk": 64,
            "scores": "computed",
            **OWN_GROUP,
            "scan_roles": "split",
            "scan_num_turns": 1,
        },
    ),
    "sm_100": (100, {"chunk": 64, "segment": 32}),
    "sm_120": (120, {**OWN_WARP}),
}


@pytest.fixture(scope="module")
def results():
    """What the compile pool made of the scan of every case."""
    module = module_of("gdn_chunk_fwd")
    with CompilePool(2) as pool:
        jobs = {
            case: pool.submit(
                *("gdn_chunk_fwd", module, "tilelang", QWEN),
                *(config_of(QWEN, ARCHITECTURES[arch], **values), arch, "scan"),
            )
            for case, (arch, values) in COMPILED.items()
        }
        return {case: job.result() for case, job in jobs.items()}


@pytest.mark.slow
@pytest.mark.parametrize("case", COMPILED)
def test_the_scan_compiles_without_spills(case, results) -> None:
    arch, values = COMPILED[case]
    result, device = results[case], gpu(ARCHITECTURES[arch])
    assert result.status is TrialStatus.OK, result.reason
    (facts,) = result.facts
    assert facts.kernel == "gdn_chunk_tilelang_scan_kernel"
    writers = 128 if values.get("scan_roles") == "split" else 0
    assert facts.threads_per_block == THREADS[values.get("scan_producer", "shared")] + writers
    assert facts.spill_bytes == 0
    assert facts.mma_kind.startswith("HGMMA" if arch == 90 else "HMMA")
    assert facts.instruction_mix["async_copy"] > 0
    config = config_of(QWEN, device.sku, **values)
    assert SPACES["tilelang"](QWEN, device).check(config) is None
    small = replace(device, smem_per_block_bytes=facts.smem_bytes - 1)
    assert "bytes a block" in SPACES["tilelang"](QWEN, small).check(config)


@pytest.mark.parametrize("sku", ARCHITECTURES.values())
@pytest.mark.parametrize(("k", "v"), [(64, 64), (96, 192), (128, 128), (192, 96), (256, 256)])
def test_default_and_seeds_are_valid(k, v, sku) -> None:
    problem = replace(QWEN, head_dim_k=k, head_dim_v=v)
    device = gpu(sku)
    assert template("gdn_chunk_fwd", "tilelang").supports(problem, device) is None
    space = SPACES["tilelang"](problem, device)
    assert space.check(space.default) is None
    assert space.valid_seeds()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"scan_block_v": 32}, "less warps than the four"),
        ({"scan_num_stages": 5, "chunk": 64}, "h200 allows"),
        ({"scan_block_v": 128, "chunk": 64, "scan_producer": "own_warp"}, "registers a thread"),
        ({"scan_producer": "own_group"}, "not the two computing groups"),
        ({"scores": "computed"}, "is the work of the output's role"),
        ({"segment": 128, "chunk": 64}, "segments of 8192 tokens"),
        ({**ONE_TILE, "intra_num_warps": 1, "chunk": 64, "intra_maxnreg": 128}, "tiles of intra"),
    ],
)
def test_refusals_of_the_space_name_the_reason(changes, reason, h200) -> None:
    space = SPACES["tilelang"](QWEN, h200)
    assert reason in space.check(config_of(QWEN, **changes))


def test_columns_of_a_block_divide_v(h200) -> None:
    problem = replace(QWEN, head_dim_v=96)
    space = SPACES["tilelang"](problem, h200)
    assert space.default["scan_block_v"] == 32
    assert "no multiple of scan_block_v=64" in space.check(space.default.replace(scan_block_v=64))


def test_what_the_template_refuses_has_a_reason(h200) -> None:
    chosen = template("gdn_chunk_fwd", "tilelang")
    assert "dtype=float32" in chosen.supports(replace(QWEN, dtype="float32"), h200)
    assert "head_dim_k=80" in chosen.supports(replace(QWEN, head_dim_k=80), h200)
    ampere = replace(h200, compute_capability=(8, 0))
    assert "8.0 is not one of" in chosen.supports(QWEN, ampere)


def test_tensors_that_it_cannot_serve_are_named() -> None:
    chosen = template("gdn_chunk_fwd", "tilelang")
    inputs = inputs_of(SMALL)
    assert "no interpreter" in chosen.supports_tensors(SMALL, inputs)
    wide = torch.zeros(*inputs.q.shape[:-1], 65).bfloat16()[..., :64]
    shifted = torch.zeros(inputs.v.numel() + 4).bfloat16()[4:].view(inputs.v.shape)
    assert "no multiples of 8" in chosen.supports_tensors(SMALL, replace(inputs, q=wide))
    assert "v starts 8 bytes after" in chosen.supports_tensors(SMALL, replace(inputs, v=shifted))
    assert "the last must be 1" in misalignment(inputs.v.mT.contiguous().mT, "v")
    normalised = replace(SMALL, use_qk_l2norm=True)
    assert "interpreter" in chosen.supports_tensors(normalised, replace(inputs, q=wide))


def test_estimates_name_the_kernels_and_every_kernel_is_a_part(h200) -> None:
    chosen = template("gdn_chunk_fwd", "tilelang")
    for config in (config_of(QWEN), config_of(QWEN, segment=32)):
        specs = [spec.name for spec in chosen.kernel_specs(QWEN, config)]
        assert [estimate.kernel for estimate in chosen.estimate(QWEN, config, h200)] == specs
        parts = chosen.parts(QWEN, config)
        assert [kernel for part in parts for kernel in part.kernels] == specs
        assert parts[-1].name == "scan"
