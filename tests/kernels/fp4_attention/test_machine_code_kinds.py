"""Products are read from machine code at every compile of a candidate; another kind fails it."""

from __future__ import annotations

import sys
from dataclasses import fields

import pytest
from fp4_bwd_calls import problem_of as backward_of
from fp4_calls import config_of, problem_of
from tilescout.errors import DeviceError, UnsupportedError
from tilescout.kernels.fp4_attention import (
    machine_code_kinds,
    tilelang_native_template,
    tilelang_template,
)
from tilescout.kernels.fp4_attention.machine_code_kinds import (
    CodeCheckedSpec,
    code_checked,
    kinds_in_binary,
    kinds_in_sass,
)
from tilescout.kernels.fp4_attention.mma_kinds import CheckedTritonKernelSpec
from tilescout.kernels.fp4_attention.triton_specs import (
    Fp4AttentionTritonConfig,
    TensorTraits,
    attention_spec,
    dequantize_spec,
)
from tilescout.kernels.registry import module_of, template
from tilescout.kernels.triton_spec import TritonKernelSpec
from tilescout.search_spaces.registry import joint_space
from tilescout.tuner.catalog import gpu
from tilescout.tuner.compile_pool import compile_config
from tilescout.tuner.records import TrialStatus

SIZES = {"num_qo_heads": 24, "num_kv_heads": 24, "query_len": 4096, "kv_len": 4096}
INSTRUCTIONS = {
    "OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X R4, R4, R44.reuse, RZ, R30, R183, URZ": "nvfp4",
    "OMMA.SF.16864.F32.E2M1.E2M1.E8 R104, R104, R44, RZ, R30, R183, URZ": "mxfp4",
    "UTCOMMA.4X gdesc[UR4], gdesc[UR6], tmem[UR8], tmem[UR10], idesc[UR11], UP0": "nvfp4",
    "UTCOMMA.BLOCK16 gdesc[UR4], gdesc[UR6], tmem[UR8], tmem[UR10], idesc[UR11]": "nvfp4",
    "@!UP1 UTCOMMA gdesc[UR4], gdesc[UR6], tmem[UR8], tmem[UR10], idesc[UR11]": "mxfp4",
    "QMMA.16832.F32.E4M3.E4M3 R4, R8, R2, R4": "fp8",
    "UTCQMMA gdesc[UR4], gdesc[UR6], tmem[UR8], tmem[UR10], idesc[UR11], UP0": "fp8",
    "QGMMA.64x128x32.F32.E4M3.E4M3 R24, gdesc[UR4], R24, gsb0": "fp8",
    "HMMA.16816.F32.BF16 R4, R8, R2, R4": "16-bit",
    "UTCHMMA gdesc[UR4], gdesc[UR6], tmem[UR8], tmem[UR10], idesc[UR11], UP0": "16-bit",
    "@P0 HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24, gsb0": "16-bit",
    "HMMA.1688.F32.TF32 R4, R8, R2, R4": "tf32",
    "IMMA.16832.S8.S8 R4, R8.ROW, R2.COL, R4": "IMMA",
}


def native(mode: str = "nvfp4"):
    return problem_of(**SIZES, head_dim=128, mode=mode, products="native", out_dtype="bfloat16")


def compiled(problem, config, sku: str):
    module = module_of(problem.op)
    return compile_config(
        problem.op, module, config.template, problem, config, gpu(sku).arch, reads_code=False
    )


@pytest.mark.parametrize("instruction", INSTRUCTIONS)
def test_kinds_are_read_from_instructions(instruction: str) -> None:
    code = f"        /*18c0*/                   {instruction} ;\n"
    code += "        /*18d0*/                   FFMA R2, R4, R6, R8 ;\n"
    assert kinds_in_sass(code) == {INSTRUCTIONS[instruction]}


def test_code_without_matrix_instructions_has_no_kind() -> None:
    assert kinds_in_sass("        /*0010*/   FFMA R2, R4, R6, R8 ; // an OMMA would be here\n") == (
        frozenset()
    )
    binary = dequantize_spec("nvfp4").compile(120)
    with pytest.raises(UnsupportedError, match="multiplies in no matrix instruction"):
        CodeCheckedSpec(dequantize_spec("nvfp4"), frozenset({"nvfp4"})).compile(120)
    assert CodeCheckedSpec(dequantize_spec("nvfp4"), frozenset()).compile(120) == binary


def test_a_downgrade_that_only_the_machine_code_shows_fails() -> None:
    # 64 rows on sm_100: Triton multiplies in 16 bits. The check of its PTX is left out here.
    problem = native("direct")
    typed = Fp4AttentionTritonConfig.of(config_of(problem, 64, 64, choice="hardware"))
    checked = attention_spec(problem, typed, TensorTraits())
    assert isinstance(checked, CheckedTritonKernelSpec)
    plain = TritonKernelSpec(**{f.name: getattr(checked, f.name) for f in fields(TritonKernelSpec)})
    assert code_checked(plain) is plain
    message = (
        "the machine code of fp4_attention_native_kernel for sm_100 multiplies in 16-bit, its mode "
        "declares mxfp4, nvfp4: the compiler took another"
    )
    with pytest.raises(UnsupportedError, match=message):
        CodeCheckedSpec(plain, checked.mma_kinds).compile(100)
    assert CodeCheckedSpec(plain, frozenset({"16-bit"})).compile(100).cubin


def test_what_was_found_is_kept(monkeypatch) -> None:
    cubin = dequantize_spec("mxfp4").compile(120).cubin
    assert kinds_in_binary(cubin) == frozenset()
    monkeypatch.setattr(
        machine_code_kinds, "_disassembled", lambda cubin: pytest.fail("disassembled again")
    )
    assert kinds_in_binary(cubin) == frozenset()


def test_code_that_cannot_be_read_is_an_error_and_not_kept() -> None:
    for _ in range(2):
        with pytest.raises(DeviceError, match="nvdisasm failed on a compiled kernel"):
            kinds_in_binary(b"no binary")


def test_a_machine_without_a_disassembler_says_so(monkeypatch, tmp_path) -> None:
    machine_code_kinds.nvdisasm_path.cache_clear()
    monkeypatch.setitem(sys.modules, "triton.knobs", None)
    monkeypatch.delattr("triton.knobs", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    try:
        with pytest.raises(DeviceError, match=r"install triton >= 3\.6"):
            machine_code_kinds.nvdisasm_path()
    finally:
        machine_code_kinds.nvdisasm_path.cache_clear()


@pytest.mark.parametrize("mode", ["nvfp4", "direct", "fp8_p"])
@pytest.mark.parametrize("sku", ["b200", "b300", "rtx5090"])
@pytest.mark.slow
def test_candidates_of_native_templates_are_checked(sku: str, mode: str, monkeypatch) -> None:
    problem = native(mode)
    config = joint_space(problem, gpu(sku), ["triton_native"]).default
    assert compiled(problem, config, sku).status is TrialStatus.OK
    monkeypatch.setattr(machine_code_kinds, "kinds_in_binary", lambda _: frozenset({"16-bit"}))
    result = compiled(problem, config, sku)
    assert result.status is TrialStatus.COMPILE_ERROR
    assert "multiplies in 16-bit, its mode declares" in result.reason


TILELANG = {
    "tilelang_native": (tilelang_native_template, "rtx5090", "native", "nvfp4"),
    "tilelang_emulated": (tilelang_template, "h200", "emulated", "16-bit"),
}


@pytest.mark.parametrize("name", TILELANG)
@pytest.mark.slow
def test_candidates_of_tilelang_are_checked(name: str, monkeypatch) -> None:
    module, sku, products, kind = TILELANG[name]
    problem = problem_of(**SIZES, head_dim=128, mode="nvfp4", products=products)
    config = joint_space(problem, gpu(sku), [name]).default
    assert compiled(problem, config, sku).status is TrialStatus.OK
    (*_, spec) = template(problem.op, name).kernel_specs(problem, config)
    assert kinds_in_binary(spec.compile(gpu(sku).arch).cubin) == {kind}
    # The same binary under a mode that would declare another product.
    monkeypatch.setattr(module, "declared_kinds", lambda _: frozenset({"mxfp4"}))
    result = compiled(problem, config, sku)
    assert result.status is TrialStatus.COMPILE_ERROR
    assert f"multiplies in {kind}, its mode declares mxfp4" in result.reason


def test_backward_passes_with_native_scores_are_checked() -> None:
    chosen = template("fp4_attention_bwd", "triton")
    for products, sku in (("native", "rtx5090"), ("emulated", "h200")):
        problem = backward_of(query_len=4096, kv_len=4096, head_dim=128, products=products)
        config = joint_space(problem, gpu(sku)).default
        checked = [
            isinstance(spec, CodeCheckedSpec) for spec in chosen.kernel_specs(problem, config)
        ]
        assert any(checked) == (products == "native")
        assert not all(checked)  # what prepares operands multiplies nothing
