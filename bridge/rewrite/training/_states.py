"""Writes the class of a state: the model and its optimizer, with what else training changes."""

from __future__ import annotations

import ast
from collections.abc import Mapping

from bridge.rewrite.plan._refusals import NotRewritableError
from bridge.rewrite.syntax._source import is_docstring

from ._changes import Arguments, Part
from ._kinds import GONE, Kind

_PLAIN = '''class {}(nnx.Module):
    """The model and its optimizer."""

    def __init__(self, model: nnx.Module, optimizer: nnx.Optimizer) -> None:
        self.model = model
        self.optimizer = optimizer'''


def plain_state(name: str) -> str:
    """The class that takes the place of Flax's `TrainState`."""
    return _PLAIN.format(name)


def state_class(node: ast.ClassDef, kinds: Mapping[str, Kind]) -> tuple[Part, ...]:
    """The text of a class of states with fields of its own.

    `kinds` has what its fields held. Raises NotRewritableError if the class has more than fields.
    """
    arguments: list[tuple[Part, ...]] = [
        ("self",),
        ("model: nnx.Module",),
        ("optimizer: nnx.Optimizer",),
    ]
    lines: list[str] = []
    docstring: tuple[Part, ...] = ()
    for each in node.body:
        if is_docstring(each):
            docstring = ("\n    ", each, "\n")
        elif isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            name = each.target.id
            if kinds.get(name) in GONE:
                continue
            if kinds.get(name, Kind.OTHER) not in (Kind.OTHER, Kind.OPTIONAL):
                raise NotRewritableError("state-field", each, name=name)
            if not lines:
                arguments.append(("*",))
            is_static, default = _options(each.value)
            given = () if default is None else (" = ", default)
            arguments.append((f"{name}: ", each.annotation, *given))
            lines.append(f"self.{name} = {name if is_static else f'nnx.data({name})'}")
        elif not isinstance(each, ast.Pass):
            raise NotRewritableError("state-body", each, name=node.name)
    body = "".join(f"\n        {line}" for line in lines)
    return (
        f"class {node.name}(nnx.Module):",
        *docstring,
        "\n    def __init__",
        Arguments(tuple(arguments), indent=4),
        " -> None:\n        self.model = model\n        self.optimizer = optimizer",
        body,
    )


def _options(value: ast.expr | None) -> tuple[bool, ast.expr | None]:
    """Whether a field is static, and its default."""
    if not isinstance(value, ast.Call):
        return False, value
    named = {k.arg: k.value for k in value.keywords}
    node = named.get("pytree_node")
    if not {*named} <= {"pytree_node", "default"} or value.args:
        raise NotRewritableError("state-field", value, name=ast.unparse(value))
    is_static = isinstance(node, ast.Constant) and node.value is False
    return is_static, named.get("default")
