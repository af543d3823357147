"""Local lists that statements make longer."""

from __future__ import annotations

import ast


def is_growth(node: ast.AST) -> bool:
    """Whether an expression is `layers.append(...)`, or the like."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("append", "extend", "insert")
        and isinstance(node.func.value, ast.Name)
    )


def grown_name(statement: ast.AST) -> str | None:
    """The local variable whose list a statement makes or makes longer."""
    target: ast.AST | None = None
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target = statement.targets[0]
    elif isinstance(statement, ast.AugAssign | ast.AnnAssign):
        target = statement.target
    elif isinstance(statement, ast.Expr) and is_growth(statement.value):
        target = statement.value.func.value  # pyright: ignore
    return target.id if isinstance(target, ast.Name) else None
