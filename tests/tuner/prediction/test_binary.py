"""Facts read from kernels that Triton really compiled, for architectures that are not at hand."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import tiny_triton
from tilescout.errors import DeviceError
from tilescout.kernels.base import CompiledBinary
from tilescout.tuner.prediction import binary
from tilescout.tuner.prediction.binary import parse_dump, read_facts

# Triton says so once a process where a kernel does not state whether to fuse.
pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr("platformdirs.user_cache_path", lambda *args, **kwargs: tmp_path / "cache")
    return tmp_path / "cache" / "binary_facts"


@pytest.mark.parametrize(
    ("arch", "block_m", "mma"),
    [
        (90, 128, "HGMMA.64x128x16.F32.BF16"),
        (90, 16, "HMMA.16816.F32.BF16"),
        (100, 128, "UTCHMMA"),
        (120, 128, "HMMA.16816.F32.BF16"),
    ],
    ids=["hopper-group", "hopper-warp", "blackwell-tensor-memory", "blackwell-consumer"],
)
def test_matrix_instruction_and_resources(arch, block_m, mma):
    facts = read_facts(tiny_triton.dot_spec(block_m, 128).compile(arch))
    assert facts.kernel == "dot_kernel"
    assert facts.mma_kind == mma
    assert facts.threads_per_block == 128
    assert 16 <= facts.registers <= 255
    assert facts.smem_bytes >= 2 * (block_m + 128) * 64 * 2
    assert (facts.tmem_columns > 0) == (arch == 100)
    assert facts.spill_bytes == 0
    mix = facts.instruction_mix
    assert mix["mma"] > 0
    assert mix["async_copy"] > 0
    assert mix["store_global"] > 0
    assert sum(mix.values()) == facts.num_instructions
    assert 0 < facts.loop_instructions < facts.num_instructions
    # One pass loads a tile of each operand: 64 x (block_m + 128) elements over 128 threads.
    assert facts.loop_load_bytes == 64 * (block_m + 128) * 2 // 128


def test_kernel_without_matrix_instruction_or_loop():
    facts = read_facts(tiny_triton.copy_spec().compile(90))
    assert facts.mma_kind == "none"
    assert "mma" not in facts.instruction_mix
    assert facts.instruction_mix["load_global"] == facts.instruction_mix["store_global"] == 2
    assert facts.loop_instructions == facts.loop_load_bytes == 0


def test_spills_show():
    free = read_facts(tiny_triton.dot_spec(16, 128, num_warps=1).compile(90))
    tight = read_facts(tiny_triton.dot_spec(16, 128, num_warps=1, maxnreg=64).compile(90))
    assert tight.registers <= 64 < free.registers
    assert tight.spill_bytes > free.spill_bytes
    assert tight.instruction_mix["store_local"] > 0
    assert tight.instruction_mix["load_local"] > 0


def test_same_binary_is_dumped_once(cache, monkeypatch):
    compiled = tiny_triton.copy_spec().compile(90)
    first = read_facts(compiled)
    monkeypatch.setattr(binary, "_dump", lambda cubin: pytest.fail("dumped again"))
    assert read_facts(compiled) == first
    assert len(list(cache.iterdir())) == 1


def test_damaged_cache_entry_is_read_anew(cache):
    compiled = tiny_triton.copy_spec().compile(90)
    first = read_facts(compiled)
    (entry,) = cache.iterdir()
    entry.write_text("{ not json")
    assert read_facts(compiled) == first
    assert entry.read_text() != "{ not json"


def test_cache_that_cannot_be_written_costs_only_time(cache):
    cache.parent.mkdir(parents=True)
    cache.write_text("a file where the folder should be")
    compiled = tiny_triton.copy_spec().compile(90)
    assert read_facts(compiled).num_instructions > 0


def test_no_device_code():
    facts = read_facts(CompiledBinary("host", b"", 128, 4096, 0))
    assert (facts.num_instructions, facts.registers, facts.smem_bytes) == (0, 0, 4096)
    assert facts.mma_kind == "none"


def test_binary_that_is_none_is_an_error():
    with pytest.raises(DeviceError, match="cuobjdump"):
        read_facts(CompiledBinary("broken", b"no ELF", 128, 0, 0))


def test_dump_without_code_is_an_error():
    with pytest.raises(DeviceError, match="no code of kernel 'k'"):
        parse_dump(CompiledBinary("k", b"x", 128, 0, 0), "Fatbin elf code:\n")


def test_missing_cuobjdump_says_what_to_do(monkeypatch):
    class Knobs:
        class nvidia:  # noqa: N801
            @property
            def cuobjdump(self):
                raise RuntimeError("Cannot find cuobjdump")

    import triton

    monkeypatch.setattr(triton.knobs, "nvidia", Knobs.nvidia())
    monkeypatch.setenv("PATH", "/nonexistent")
    binary.cuobjdump_path.cache_clear()
    try:
        with pytest.raises(DeviceError, match="TRITON_CUOBJDUMP_PATH"):
            binary.cuobjdump_path()
    finally:
        binary.cuobjdump_path.cache_clear()


def test_dump_that_hangs_ends(monkeypatch):
    def hang(*args, **kwargs):
        raise subprocess.TimeoutExpired(args[0], kwargs["timeout"])

    binary.cuobjdump_path()  # Triton, too, runs a program to find it
    monkeypatch.setattr(subprocess, "run", hang)
    with pytest.raises(DeviceError, match="longer than"):
        read_facts(CompiledBinary("k", os.urandom(8), 128, 0, 0))


@pytest.mark.parametrize(
    ("opcode", "kind"),
    [
        ("HMMA", "mma"), ("HGMMA", "mma"), ("QGMMA", "mma"), ("UTCHMMA", "mma"),
        ("UTCQMMA", "mma"), ("OMMA", "mma"), ("IMMA", "mma"), ("DMMA", "mma"),
        ("LDG", "load_global"), ("LDGSTS", "async_copy"), ("UTMALDG", "async_copy"),
        ("UBLKCP", "async_copy"), ("LDGDEPBAR", "barrier"), ("LDSM", "load_shared"),
        ("LDL", "load_local"), ("STL", "store_local"), ("STG", "store_global"),
        ("STS", "store_shared"), ("REDUX", "shuffle"), ("RED", "atomic"), ("ATOMG", "atomic"),
        ("LDTM", "tensor_memory"), ("FFMA", "float"), ("F2FP", "convert"), ("MUFU", "special"),
        ("BRA", "branch"), ("IMAD", "integer"), ("LDC", "load_constant"),
    ],
)  # fmt: skip
def test_classes_of_instructions(opcode, kind):
    assert binary._classify(opcode) == kind


LOOPS = """
 Function k:
  REG:32 STACK:8 SHARED:0 LOCAL:4 CONSTANT[0]:576
        Function : k
        /*0000*/                   MOV R1, c[0x0][0x28] ;
        /*0010*/              @!P0 LDG.E.64 R2, desc[UR4][R2.64] ;
        /*0020*/                   LDG.E.128 R4, desc[UR4][R6.64] ;
        /*0030*/                   HMMA.16816.F32 R4, R4, R6, R8 ;
        /*0040*/              @P1  BRA 0x20 ;
        /*0050*/                   LDG.E R2, desc[UR4][R2.64] ;
        /*0060*/             @!UP0 BRA 0x10 ;
        /*0070*/                   BRA 0x90 ;
        /*0080*/                   EXIT ;
        /*0090*/                   BRA 0x90;
        /*00a0*/                   NOP;
"""


def test_streaming_loop_is_the_innermost_that_loads():
    facts = parse_dump(CompiledBinary("k", b"x", 128, 0, 0), LOOPS)
    assert facts.num_instructions == 10
    assert facts.loop_instructions == 3
    assert facts.loop_load_bytes == 16
    assert facts.spill_bytes == 12


LOOP_OF_A_MERGE = """
 Function k:
  REG:32 STACK:0 SHARED:0 LOCAL:0 CONSTANT[0]:576
        Function : k
        /*0000*/                   LDGSTS.E.64 [R2], desc[UR4][R6.64] ;
        /*0010*/                   HMMA.16816.F32 R4, R4, R6, R8 ;
        /*0020*/              @P1  BRA 0x0 ;
        /*0030*/                   LDG.E.128 R4, desc[UR4][R6.64] ;
        /*0040*/                   LDG.E.128 R8, desc[UR4][R6.64] ;
        /*0050*/                   FADD R4, R4, R8 ;
        /*0060*/              @P1  BRA 0x30 ;
        /*0070*/                   EXIT ;
"""


def test_loop_with_matrix_instructions_comes_before_one_that_loads_more():
    facts = parse_dump(CompiledBinary("k", b"x", 128, 0, 0), LOOP_OF_A_MERGE)
    assert facts.loop_instructions == 3
    assert facts.loop_load_bytes == 8
