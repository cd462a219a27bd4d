"""Threads that begin with different modules of the package are not in each other's way."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import lossd

ROOT = Path(lossd.__file__).parent
MODULES = sorted(path for path in ROOT.rglob("*.py") if path.stem not in ("__init__", "__main__"))


def run_on_import(node: ast.AST) -> Iterator[ast.AST]:
    """The statements that an import of the module runs: none in functions, none for type checkers alone."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            continue
        yield child
        yield from run_on_import(child)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_waits_for_no_package_that_it_is_in(path: Path) -> None:
    """`from package import module` waits until another thread has imported the package, which waits for this module:
    Python ends that by giving one of them a module in pieces. `import package.module as module` does not wait."""
    parts = ("lossd", *path.relative_to(ROOT).with_suffix("").parts)
    packages = {".".join(parts[:end]) for end in range(1, len(parts))}
    statements = run_on_import(ast.parse(path.read_text(encoding="utf-8")))
    names = [node.module for node in statements if isinstance(node, ast.ImportFrom)]
    assert not packages.intersection(names)
