"""Places in the rest of a program that a rewritten model concerns: shown, never changed."""

from __future__ import annotations

import ast
import pathlib
from collections.abc import Iterable, Iterator

from ._source import Source

_MOST_FILES = 300
_CREATE = "optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param), and optimizer.update(model, grads)"
_INIT = "the model is made with its values: model = {}(..., rngs=nnx.Rngs(0))"


def places_of(files: Iterable[str], names: Iterable[str]) -> list[str]:
    """Training code beside the models, each with what takes its place.

    Args:
        files: the files that were rewritten.
        names: of the rewritten classes.
    """
    found: list[str] = []
    folders = {pathlib.Path(file).parent for file in files}
    paths = sorted({p for folder in folders for p in folder.glob("*.py")})[:_MOST_FILES]
    for path in paths:
        if path.stem.endswith("_nnx"):
            continue
        try:
            source = Source(str(path))
        except (SyntaxError, UnicodeDecodeError, OSError):
            continue
        found += [f"{path.name}:{line}: {text}" for line, text in _places(source, set(names))]
    return found


def _places(source: Source, names: set[str]) -> Iterator[tuple[int, str]]:
    models = _models(source.tree, names)
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        holder, method = ast.unparse(node.func.value), node.func.attr
        if method == "create" and holder.endswith("TrainState"):
            yield node.lineno, f"{holder}.create: {_CREATE}"
        elif method == "init" and _is_model(node.func.value, models, names):
            yield node.lineno, f"{holder}.init: {_INIT.format(_class(holder, names))}"
        elif method in ("apply", "apply_fn") and (
            _is_model(node.func.value, models, names) or method == "apply_fn"
        ):
            yield node.lineno, f"{holder}.{method}: {_instead(node)}"


def _instead(node: ast.Call) -> str:
    given = {k.arg: k.value for k in node.keywords}
    method = given.get("method")
    called = "model(x)"
    if isinstance(method, ast.Constant) and isinstance(method.value, str):
        called = f"model.{method.value}(x)"
    elif isinstance(method, ast.Attribute):
        called = f"model.{method.attr}(x)"
    parts = [called]
    if "mutable" in given:
        parts.append(f"what {ast.unparse(given['mutable'])} named is updated in the model")
    if "rngs" in given:
        parts.append("the model has its streams, nnx.reseed(model, dropout=key) sets them")
    return "; ".join(parts)


def _models(tree: ast.Module, names: set[str]) -> set[str]:
    """The variables that a rewritten class was called for."""
    return {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Call)
        and _last(node.value.func) in names
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def _is_model(node: ast.expr, models: set[str], names: set[str]) -> bool:
    if isinstance(node, ast.Call):
        return _last(node.func) in names
    return isinstance(node, ast.Name) and (node.id in models or node.id == "model")


def _class(holder: str, names: set[str]) -> str:
    name = holder.split("(")[0].split(".")[-1]
    return name if name in names else "Model"


def _last(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
