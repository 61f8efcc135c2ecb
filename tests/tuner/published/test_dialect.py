from __future__ import annotations

import pytest
from tilescout.errors import UsageError
from tilescout.kernels.registry import operation_names
from tilescout.tuner.published.dialect import Dialect, dialect, dialects

PAGED = "batch=16 kv=8192 Hq=32 Hkv=8 D=128 page=16 NHD bf16"


def problem(op: str, columns: dict[str, str], library: str = "some"):
    spelling = dialect(op)
    return spelling.problem(columns, spelling.named(library))


def test_pairs_and_words_of_a_shape():
    found = problem("paged_decode", {"shape": PAGED})
    assert found.as_dict() == {
        **found.as_dict(),
        "batch": 16,
        "kv_len": 8192,
        "num_qo_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 128,
        "page_size": 16,
        "kv_layout": "NHD",
        "dtype": "bfloat16",
        "lengths": "equal",
    }


@pytest.mark.parametrize(
    ("spelled", "lengths"), [("fixed", "equal"), ("one kv, rest kv/16", "skewed")]
)
def test_values_with_spaces_are_translated(spelled, lengths):
    shape = PAGED.replace("Hq", f"lengths={spelled} Hq")
    assert problem("paged_decode", {"shape": shape}).lengths == lengths


def test_what_ours_cannot_express_is_refused_with_the_reason():
    shape = PAGED.replace("Hq", "lengths=uniform 1..kv Hq")
    with pytest.raises(UsageError, match="drawn at random"):
        problem("paged_decode", {"shape": shape})


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        pytest.param(PAGED + " int8", "int8", id="a word that is unknown"),
        pytest.param(PAGED + " sinks=4", "sinks='4' says nothing", id="a name that is unknown"),
        pytest.param("batch=16 bf16", "needs kv_len", id="a field that is missing"),
        pytest.param(PAGED.replace("8192", "many"), "kv_len='many'", id="no number"),
        pytest.param("", "says nothing", id="nothing at all"),
    ],
)
def test_shapes_that_say_too_little_or_too_much(shape, message):
    with pytest.raises(UsageError, match=message):
        problem("paged_decode", {"shape": shape})


def test_the_name_of_a_function_says_something_of_the_problem():
    columns = {"shape": "batch=4 h_qk=16 h_v=32 d=128 fp32 state"}
    name = "flashinfer:pretranspose (state [V,K], gate fused)"
    found = problem("gdn_decode", columns, name)
    assert (found.state_layout, found.gate, found.state_dtype) == ("VK", "fused", "float32")
    assert (found.head_dim_k, found.head_dim_v) == (128, 128)
    named = dialect("gdn_decode").named(name)
    assert (named.library, named.variant) == ("flashinfer", "pretranspose")
    assert problem("gdn_decode", columns, "fla:fused_recurrent").state_layout == "KV"


def test_an_unknown_function_is_its_library_and_variant():
    named = dialect("paged_decode").named("flashinfer:fa2_tc")
    assert (named.library, named.variant, named.fields) == ("flashinfer", "fa2_tc", {})


def test_operations_that_are_not_ours():
    with pytest.raises(UsageError, match="'matmul' is no operation here"):
        dialect("matmul")


def test_an_operation_without_a_dialect(toy):
    with pytest.raises(UsageError, match="configs/published"):
        dialect("toy")


# A dialect may come before its operation: until then its rows are refused.
@pytest.mark.parametrize("op", sorted(set(dialects()) & set(operation_names())))
def test_every_dialect_names_fields_of_its_problem(op):
    from dataclasses import fields

    from tilescout.kernels.registry import operation

    spelling = dialects()[op]
    known = {field.name for field in fields(operation(op).problem_type)}
    named = {f for t in spelling.names.values() for f in ([t] if isinstance(t, str) else t)}
    said = {field for word in spelling.words.values() for field in word}
    of_libraries = {f for one in spelling.libraries.values() for f in one.get("fields", {})}
    parts = (named, said, spelling.values, spelling.refused, spelling.constants, of_libraries)
    for part in (*parts, spelling.lengths.get("fields", {})):
        assert set(part) <= known


GDN = {"h_qk": "16", "h_v": "32", "head_dim": "128", "dtype": "bfloat16"}


@pytest.fixture
def packed(monkeypatch) -> Dialect:
    """The dialect of packed sequences, whether or not its operation is registered yet."""
    from tilescout.kernels import registry

    name = "gdn_chunk_fwd"
    monkeypatch.setitem(registry._OPERATIONS, name, f"tilescout.kernels.{name}")
    return dialect(name)


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        pytest.param("1x32768", (32768,), id="one sequence"),
        pytest.param("8192x4", (8192,) * 4, id="length times count"),
        pytest.param("24576+8192", (24576, 8192), id="two of unequal length"),
        pytest.param("2048", (2048,), id="a number"),
    ],
)
def test_lengths_of_packed_sequences(packed, text, lengths):
    found = packed.problem({**GDN, "seqlens": text}, packed.named("fla"))
    assert found.lengths == lengths


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("8192+24576", r"has the lengths 24576\+8192", id="another order"),
        pytest.param("8k_2seq", "the lengths are not given", id="a name instead of lengths"),
        pytest.param("4096+", "the lengths are not given", id="a length that is missing"),
    ],
)
def test_lengths_that_our_problem_does_not_have(packed, text, message):
    with pytest.raises(UsageError, match=message):
        packed.problem({**GDN, "seqlens": text}, packed.named("fla"))


def test_the_library_says_the_layout_of_the_state(packed):
    layouts = {
        name: packed.problem({**GDN, "seqlens": "4096"}, packed.named(name)).state_layout
        for name in ("fla", "flash_qla", "flashinfer")
    }
    assert layouts == {"fla": "KV", "flash_qla": "KV", "flashinfer": "VK"}
