"""A hash of what modules compute, blind to comments, docstrings and layout."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path

__all__ = ["source_hash"]


@cache
def source_hash(modules: Sequence[str]) -> str:
    """Sixteen hex digits over the syntax trees of the named modules, in the given order.

    A stored winner is valid only for the code it was measured with; a comment does not change it.
    """
    digest = hashlib.sha256()
    for name in modules:
        spec = find_spec(name)
        assert spec is not None
        assert spec.origin is not None, f"module {name!r} has no source"
        tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            _drop_docstring(node)
        digest.update(repr(_plain(tree)).encode())
    return digest.hexdigest()[:16]


def _plain(value: object) -> object:
    """The tree as nested tuples, without what is empty.

    ``ast.dump`` is no use here: each Python version adds fields, which are empty in old code.
    """
    if isinstance(value, ast.AST):
        fields = ((name, _plain(child)) for name, child in ast.iter_fields(value))
        return type(value).__name__, tuple(pair for pair in fields if pair[1] not in (None, ()))
    if isinstance(value, list):
        return tuple(_plain(child) for child in value)
    return value


def _drop_docstring(node: ast.AST) -> None:
    if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return
    first = node.body[0] if node.body else None
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        node.body = node.body[1:]
