"""Statements of Python source: a tenth of what `ast.walk` visits, where expressions do not matter."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


def statements(tree: ast.AST) -> Iterator[ast.stmt]:
    """Yield every statement below a node, at any depth."""
    left: list[ast.AST] = [tree]
    while left:
        for child in ast.iter_child_nodes(left.pop()):
            if isinstance(child, ast.stmt):
                yield child
            elif not isinstance(child, ast.ExceptHandler | ast.match_case):
                continue
            left.append(child)
