"""Reads every module's imports: they go one way, and heavy libraries stay where they belong."""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = ("errors", "kernels", "search_spaces", "tuner", "ops")
PACKAGES = (*LAYERS[1:], "configs")
ROOT_MODULES = {"__init__.py", "__main__.py", "errors.py"}
ENTRY_POINTS = {"tilescout", "tilescout.__main__"}
"""Above all layers: one resolves public names lazily, the other starts the command line."""
HEAVY = {"optuna", "sqlalchemy", "alembic", "pandas"}


def module_files() -> dict[str, Path]:
    files = [ROOT / name for name in ROOT_MODULES]
    for package in PACKAGES:
        files += (ROOT / package).rglob("*.py")
    return {module_name(path): path for path in files}


def module_name(path: Path) -> str:
    parts = ("tilescout", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = module_files()


def imported_names(module: str, nodes: list[ast.AST]) -> set[str]:
    """Dotted names that import statements among ``nodes`` load, relative ones made absolute."""
    package = module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0]
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                names.add(inner if inner in MODULES else base)
    return names


def tree(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


def all_imports(module: str) -> set[str]:
    """What the module may ever import: statements anywhere in it, and names given as text."""
    nodes = list(ast.walk(tree(module)))
    named = {
        node.value
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in MODULES
    }
    return imported_names(module, nodes) | (named - {"tilescout"})


def load_time_imports(module: str) -> set[str]:
    """What importing the module imports: its statements outside functions and type checking."""
    found: list[ast.AST] = []
    pending: list[ast.AST] = list(tree(module).body)
    while pending:
        node = pending.pop()
        is_typing_only = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or is_typing_only:
            continue
        found.append(node)
        pending += ast.iter_child_nodes(node)
    return imported_names(module, found)


def load_time_closure(module: str) -> set[str]:
    """Everything that importing ``module`` loads, other packages by their dotted name."""
    seen: set[str] = set()
    pending = {module}
    while pending:
        name = pending.pop()
        seen.add(name)
        if name in MODULES:
            # Importing a module runs the packages above it first.
            parents = {name.rsplit(".", depth)[0] for depth in range(1, name.count(".") + 1)}
            pending |= (load_time_imports(name) | parents) - seen
    return seen


def layer(module: str) -> str:
    return module.split(".")[1]


@pytest.mark.parametrize("module", sorted(set(MODULES) - ENTRY_POINTS))
def test_imports_never_point_to_a_higher_layer(module):
    if layer(module) == "configs":
        assert not all_imports(module)
        return
    allowed = {"configs", *LAYERS[: LAYERS.index(layer(module)) + 1]}
    ours = {name for name in all_imports(module) if name.startswith("tilescout.")}
    assert {name for name in ours if layer(name) not in allowed} == set()


def test_imports_have_no_cycle():
    graph = {module: all_imports(module) & set(MODULES) for module in set(MODULES) - ENTRY_POINTS}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"modules import each other: {' -> '.join(error.args[1])}")


@pytest.mark.parametrize("module", sorted(set(MODULES) - ENTRY_POINTS))
def test_siblings_are_imported_relatively(module):
    absolute = [
        node
        for node in ast.walk(tree(module))
        if (isinstance(node, ast.Import) and any("tilescout" in a.name for a in node.names))
        or (isinstance(node, ast.ImportFrom) and "tilescout" in (node.module or ""))
    ]
    assert [ast.unparse(node) for node in absolute] == []


@pytest.mark.parametrize(
    ("library", "folder"),
    [
        ("optuna", "tilescout.tuner.search"),
        ("sqlalchemy", "tilescout.tuner.store"),
        ("alembic", "tilescout.tuner.store"),
    ],
)
def test_a_library_is_imported_in_one_folder_only(library, folder):
    users = {
        module
        for module in MODULES
        if any(name.split(".")[0] == library for name in all_imports(module))
    }
    assert users, f"nothing imports {library}: drop it or this test"
    assert {module for module in users if not module.startswith(folder)} == set()


@pytest.mark.parametrize("module", ["tilescout.tuner.dispatch", "tilescout.ops"])
def test_dispatch_loads_none_of_the_tuners_libraries(module):
    loaded = {name.split(".")[0] for name in load_time_closure(module)}
    assert loaded & HEAVY == set()
    assert "tilescout.kernels.base" in load_time_closure(module)


def test_dispatch_loads_none_of_them_when_it_really_runs():
    code = (
        "import sys, tilescout, tilescout.tuner.dispatch;"
        f"print(sorted({HEAVY!r} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_package_itself_loads_nothing():
    code = "import sys, tilescout; print(sorted(m for m in sys.modules if 'tilescout.' in m))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_root_holds_only_three_modules():
    assert {path.name for path in ROOT.glob("*.py")} == ROOT_MODULES


def test_tilelang_templates_do_not_postpone_annotations():
    """``T.prim_func`` reads annotations as values, so they must not become text."""
    offenders = [
        module
        for module in MODULES
        if any(name.split(".")[0] == "tilelang" for name in load_time_imports(module))
        and "__future__" in load_time_imports(module)
    ]
    assert offenders == []
