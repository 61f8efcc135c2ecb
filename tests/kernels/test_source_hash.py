"""The hash of a template's code: blind to what cannot change a kernel, and to Python's version."""

from __future__ import annotations

import pytest
from tilescout.kernels.source_hash import source_hash

BASE = '''
"""A module."""
BLOCK = 16


def kernel(x, *, n: int = 2):
    """Doubles."""
    return x * n  # why
'''
SAME = {
    "comment": BASE.replace("# why", "# another reason"),
    "docstrings": BASE.replace("Doubles", "Twice").replace("A module", "Ours"),
    "layout": BASE.replace("x * n", "(x  *  n)").replace("\n\n\n", "\n"),
}
OTHER = {
    "constant": BASE.replace("16", "32"),
    "default": BASE.replace("= 2", "= 3"),
    "operator": BASE.replace("x * n", "x + n"),
    "name": BASE.replace("kernel", "kernels"),
}


@pytest.fixture
def hash_of(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)

    def hash_text(text: str) -> str:
        name = f"hashed_{abs(hash(text))}"
        (tmp_path / f"{name}.py").write_text(text)
        return source_hash((name,))

    return hash_text


@pytest.mark.parametrize("text", SAME.values(), ids=SAME)
def test_what_cannot_change_a_kernel_does_not_count(hash_of, text: str) -> None:
    assert text != BASE
    assert hash_of(text) == hash_of(BASE)


@pytest.mark.parametrize("text", OTHER.values(), ids=OTHER)
def test_what_changes_a_kernel_counts(hash_of, text: str) -> None:
    assert hash_of(text) != hash_of(BASE)


def test_every_python_version_gives_this_hash(hash_of) -> None:
    # ast.dump would not: Python 3.12 shows type parameters even where there are none.
    assert hash_of(BASE) == "927d362b6d20993b"
