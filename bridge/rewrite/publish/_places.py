"""Places in the rest of a program that a rewritten model concerns: shown, never changed."""

from __future__ import annotations

import ast
import dataclasses
import itertools
import pathlib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from bridge.rewrite.plan._plans import ClassPlan
from bridge.rewrite.syntax._source import Source

from ._uses import ClassName, Uses

_OF_MODELS = ("init", "init_with_output", "lazy_init", "apply", "bind", "tabulate")
_STATES = ("state", "newstate", "trainstate")
_NAMES = ("model", "net", "network", "module")
_VARIABLES = re.compile(r"(^|[_.])(params|variables)$")
_SAVES = ("save_checkpoint", "save_checkpoint_multiprocess", "to_bytes", "to_state_dict")
_RESTORES = ("restore_checkpoint", "from_bytes", "from_state_dict")
# What a TrainState has, and where it is in the new program.
_FIELDS = {
    "params": "nnx.state(model, nnx.Param)",
    "step": "optimizer.step[...]",
    "opt_state": "optimizer.opt_state",
    "batch_stats": "nnx.state(model, nnx.BatchStat)",
}
_LONGEST = 60
Place = tuple[int, str]


@dataclasses.dataclass(frozen=True)
class Made:
    """A rewritten class, with how it was made where the model ran.

    `instances` has fields and sizes of each instance. `is_model` says whether it is the model's own
    class.
    """

    plan: ClassPlan
    is_model: bool
    instances: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]

    def sizes(self, call: ast.Call) -> dict[str, str]:
        """What the new constructor takes besides, as text, where the old one is called.

        A size is written if all instances that the call may make have the same; else it is `...`.
        """
        given = self._given(call)
        fitting = [
            sizes
            for fields, sizes in self.instances
            if all(_same(fields.get(name), value) for name, value in given.items())
        ]
        found: dict[str, str] = {}
        for name in self.plan.sizes:
            values = {repr(sizes.get(name)) for sizes in fitting}
            if values != {"None"}:
                found[name] = values.pop() if len(values) == 1 else "..."
        return found

    def _given(self, call: ast.Call) -> dict[str, Any]:
        """The values that a call gives to fields, with the defaults of the others."""
        nodes = dict(zip((field.name for field in self.plan.fields), call.args, strict=False))
        nodes |= {k.arg: k.value for k in call.keywords if k.arg is not None}
        is_open = any(isinstance(node, ast.Starred) for node in call.args)
        if is_open or any(k.arg is None for k in call.keywords):
            return {}
        found: dict[str, Any] = {}
        if dataclasses.is_dataclass(self.plan.cls):
            own = dataclasses.fields(self.plan.cls)
            defaults = {f.name: f.default for f in own if f.init and f.name not in nodes}
            missing = dataclasses.MISSING
            found = {n: v for n, v in defaults.items() if v is not missing}
            found = {n: v for n, v in found.items() if n not in ("parent", "name")}
        for name, node in nodes.items():
            try:
                found[name] = ast.literal_eval(node)
            except ValueError:
                continue
        return found


def _same(found: Any, told: Any) -> bool:
    # Fields may be arrays, which have no truth value.
    return found is told or repr(found) == repr(told)


def places_of(
    modules: Mapping[str, str], classes: Mapping[ClassName, Made], drawn: Collection[str] = ()
) -> list[str]:
    """Training code beside the models, each with what takes its place.

    `modules` has the files that were rewritten, with the names of their modules. `drawn` has the
    streams that calls of the model draw from, which `nnx.reseed` finds by name.
    """
    if not modules:
        return []
    names: dict[str, set[str]] = {}
    for module, name in classes:
        names.setdefault(module, set()).add(name)
    uses = Uses(modules, names)
    beside = {pathlib.Path(file).resolve().parent for file in modules}
    wanted = uses.connected() | {f for f in uses.files if pathlib.Path(f).parent in beside}
    sources = uses.parsed(wanted)
    uses.follow(sources)
    found: list[str] = []
    for file, source in sources.items():
        name = pathlib.Path(file).relative_to(uses.folder).as_posix()
        named = uses.classes_in(file, source)
        places = _Places(source, lambda n, named=named: classes.get(named(n)), drawn)  # pyright: ignore
        own = sorted(set(places.found()))
        found += [f"{name}:{line}: {text}" for line, text in own]
    return found


class _Places:
    """The places in one file.

    `class_of` gives the rewritten class that an expression names. `drawn` is as for `places_of`.
    """

    def __init__(
        self, source: Source, class_of: Callable[[ast.AST], Made | None], drawn: Collection[str]
    ) -> None:
        self.source, self.class_of, self.drawn = source, class_of, drawn
        self.made: dict[str, ast.Call] = {}
        for node in ast.walk(source.tree):
            value = node.value if isinstance(node, ast.Assign) else None
            if isinstance(value, ast.Call) and class_of(value.func) is not None:
                self.made |= {ast.unparse(target): value for target in node.targets}  # pyright: ignore

    def found(self) -> Iterator[Place]:
        found = [*self._calls()]
        yield from found
        yield from self._fields({line for line, _ in found})

    def _fields(self, listed: Collection[int]) -> Iterator[Place]:
        """Reads of a state's fields, outside of the expressions that are listed already."""
        for node in ast.walk(self.source.tree):
            if not isinstance(node, ast.Attribute) or node.attr not in _FIELDS:
                continue
            parent = self.source.parents[node]
            is_method = isinstance(parent, ast.Call) and parent.func is node
            if is_method or not isinstance(node.ctx, ast.Load) or not self._is_state(node.value):
                continue
            around = itertools.takewhile(_is_no_statement, self.source.ancestors(node))
            if not any(getattr(each, "lineno", 0) in listed for each in (node, *around)):
                yield node.lineno, f"{_short(node)}: {_FIELDS[node.attr]}"

    def _is_state(self, node: ast.expr) -> bool:
        """Whether an expression is a `TrainState`, by its name or by the annotation of it."""
        if _last(node).lower().replace("_", "") in _STATES:
            return True
        return isinstance(node, ast.Name) and any(
            isinstance(each, ast.arg)
            and each.arg == node.id
            and each.annotation is not None
            and ast.unparse(each.annotation).strip("\"'").endswith("TrainState")
            for function in self.source.ancestors(node)
            if isinstance(function, ast.FunctionDef)
            for each in ast.walk(function.args)
        )

    def _calls(self) -> Iterator[Place]:
        """What makes, calls, trains and saves the model."""
        losses: set[str] = set()
        for node in ast.walk(self.source.tree):
            if isinstance(node, ast.ClassDef):
                if any(_last(base) == "TrainState" for base in node.bases):
                    yield node.lineno, _STATE.format(node.name)
            elif isinstance(node, ast.Attribute) and self._is_of_model(node):
                text = self._of_model(node)
                if text is not None:
                    yield node.lineno, text
                    losses |= _functions_around(self.source, node)
            elif isinstance(node, ast.Call) and self._is_made_here(node):
                yield node.lineno, f"{_short(node.func)}: {self._made(node, 'key')}"
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                text = self._other(node, node.func)
                if text is not None:
                    yield node.lineno, f"{_short(node.func)}: {text}"
        yield from self._gradients(losses)

    def _gradients(self, losses: set[str]) -> Iterator[Place]:
        """Gradients of functions that call the model."""
        for node in ast.walk(self.source.tree):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            is_jax = isinstance(node.func, ast.Name) or ast.unparse(node.func).startswith("jax.")
            name = _last(node.func)
            if is_jax and name in ("grad", "value_and_grad") and _last(node.args[0]) in losses:
                given = ", ".join(map(_short, [*node.args, *node.keywords]))
                yield node.lineno, f"{_short(node.func)}: nnx.{name}({given})(model)"

    def _is_made_here(self, node: ast.Call) -> bool:
        """Whether a model is made outside the rewritten classes, and not only for one call."""
        made = self.class_of(node.func)
        if made is None or not made.is_model:
            return False
        above = self.source.parents[node]
        if isinstance(above, ast.Attribute) and above.attr in _OF_MODELS:
            return False
        around = (a for a in self.source.ancestors(node) if isinstance(a, ast.ClassDef))
        return not any(self.class_of(ast.Name(each.name)) for each in around)

    def _is_of_model(self, node: ast.Attribute) -> bool:
        if node.attr == "apply_fn":
            return isinstance(self.source.parents[node], ast.Call)
        if node.attr not in _OF_MODELS:
            return False
        holder = node.value
        if isinstance(holder, ast.Call) and self.class_of(holder.func) is not None:
            return True
        if ast.unparse(holder) in self.made or _last(holder) in _NAMES:
            return True
        call = self._call(node)
        if call is None or not call.args:
            return False
        if node.attr == "apply":
            around = (a for a in self.source.ancestors(node) if isinstance(a, ast.ClassDef))
            bases = [ast.unparse(base).split(".")[-1] for each in around for base in each.bases]
            # What a Linen module applies is a part of it.
            return _is_variables(call.args[0]) and "Module" not in bases
        above = self.source.parents[call]
        return (
            node.attr == "init"
            and isinstance(above, ast.Subscript)
            and isinstance(above.slice, ast.Constant)
            and above.slice.value == "params"
        )

    def _call(self, node: ast.Attribute) -> ast.Call | None:
        parent = self.source.parents[node]
        return parent if isinstance(parent, ast.Call) and parent.func is node else None

    def _of_model(self, node: ast.Attribute) -> str | None:
        """What a method of the Linen model becomes."""
        parent, call = self.source.parents[node], self._call(node)
        if isinstance(parent, ast.keyword) and parent.arg == "apply_fn":
            return None
        name = _short(node)
        if node.attr == "tabulate":
            return f"{name}: nnx.tabulate(model, x)"
        if node.attr == "bind":
            return f"{name}: the model has its values, and its methods are called"
        if node.attr in ("apply", "apply_fn"):
            if call is None:
                return f"{name}: a function of the model, lambda model, x: model(x), under nnx.jit"
            return f"{name}: {_applied(call)}"
        made = self._constructor(node.value, call)
        if call is None:
            made = f"nnx.jit(lambda: {made})()"
        called = ""
        if node.attr == "init_with_output" and call is not None:
            called = f"; model({', '.join(map(_short, [*call.args[1:], *call.keywords]))})"
        return f"{name}: made with its values, model = {made}{called}"

    def _constructor(self, holder: ast.expr, call: ast.Call | None) -> str:
        """What makes the model."""
        own = holder if isinstance(holder, ast.Call) else self.made.get(ast.unparse(holder))
        has_key = call is not None and call.args and not isinstance(call.args[0], ast.Starred)
        keys = _streams(call.args[0]) if call is not None and has_key else "key"
        if own is None or self.class_of(own.func) is None:
            return f"Model(..., {self._rngs(keys)})"
        return self._made(own, keys)

    def _made(self, own: ast.Call, keys: str) -> str:
        """A constructor with what NNX's takes besides."""
        given = ", ".join(map(_short, [*own.args, *own.keywords]))
        made = self.class_of(own.func)
        sizes = {} if made is None else made.sizes(own)
        more = [f"{name}={value}" for name, value in sizes.items()]
        parts = [given if len(given) <= _LONGEST else "...", *more, self._rngs(keys)]
        return f"{_short(own.func)}({', '.join(filter(None, parts))})"

    def _rngs(self, keys: str) -> str:
        """The streams of a new model, each by its name if a call draws from it."""
        named = "=" in keys
        again = keys.partition("=")[2].partition(",")[0] if named else keys
        more = [f"{each}={again}" for each in self.drawn if f"{each}=" not in keys]
        return f"rngs=nnx.Rngs({', '.join([keys, *more])})"

    def _other(self, node: ast.Call, function: ast.Attribute) -> str | None:
        """What a call around training becomes."""
        holder = _last(function.value)
        named = {k.arg: k.value for k in node.keywords}
        if function.attr == "create" and holder.endswith("TrainState"):
            tx = _short(named["tx"]) if "tx" in named else "tx"
            more = [str(k) for k in named if k not in ("apply_fn", "params", "tx")]
            rest = f"; {', '.join(more)}: in the model, or beside it" if more else ""
            return f"optimizer = nnx.Optimizer(model, {tx}, wrt=nnx.Param){rest}"
        if function.attr == "apply_gradients":
            grads = _short(named["grads"]) if "grads" in named else "grads"
            return f"optimizer.update(model, {grads})"
        if holder in ("checkpoints", "serialization"):
            if function.attr in _SAVES:
                return 'bridge.checkpoint.save(path, model, extra={"optimizer": optimizer})'
            if function.attr in _RESTORES:
                return "bridge.checkpoint.restore(path, model), with rules= for a Linen checkpoint"
        return None


_STATE = "class {}: the state is the model and the optimizer, with what else there is beside them"


def _applied(node: ast.Call) -> str:
    """A call of the new model."""
    given = {k.arg: k.value for k in node.keywords}
    method = given.get("method")
    name = "model"
    if isinstance(method, ast.Constant) and isinstance(method.value, str):
        name = f"model.{method.value}"
    elif isinstance(method, ast.Attribute):
        name = f"model.{method.attr}"
    own = [k for k in node.keywords if k.arg not in ("method", "mutable", "rngs")]
    parts = [f"{name}({', '.join(map(_short, [*node.args[1:], *own]))})"]
    mutable = given.get("mutable")
    if isinstance(mutable, ast.List | ast.Tuple):
        parts.append(f"{', '.join(map(_plain, mutable.elts))} updated in the model")
    elif mutable is not None and not (isinstance(mutable, ast.Constant) and not mutable.value):
        parts.append(f"what {_plain(mutable)} names is updated in the model")
    if "rngs" in given:
        parts.append(f"before it nnx.reseed(model, {_streams(given['rngs'], 'dropout')})")
    return "; ".join(parts)


def _streams(node: ast.expr, alone: str = "") -> str:
    """Keys by stream, as `nnx.Rngs` takes them."""
    if isinstance(node, ast.Dict) and all(isinstance(k, ast.Constant) for k in node.keys):
        pairs = zip(node.keys, node.values, strict=True)
        return ", ".join(f"{_plain(k)}={_short(v)}" for k, v in pairs if k is not None)
    if alone and isinstance(node, ast.Name | ast.Attribute | ast.Call):
        return f"**{_short(node)}"
    return _short(node)


def _functions_around(source: Source, node: ast.AST) -> set[str]:
    """The name of the innermost function around a place."""
    around: Callable[[ast.AST], Iterable[ast.AST]] = source.ancestors
    found = (each for each in around(node) if isinstance(each, ast.FunctionDef))
    innermost = next(found, None)
    return {innermost.name} if innermost is not None else set()


def _is_no_statement(node: ast.AST) -> bool:
    return not isinstance(node, ast.stmt)


def _is_variables(node: ast.expr) -> bool:
    if isinstance(node, ast.Dict):
        return any(isinstance(k, ast.Constant) and k.value == "params" for k in node.keys)
    if isinstance(node, ast.Name | ast.Attribute):
        return _VARIABLES.search(ast.unparse(node)) is not None
    return False


def _plain(node: ast.expr) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return _short(node)


def _short(node: ast.AST) -> str:
    """An expression, or dots in the place of a long one."""
    text = ast.unparse(node)
    if len(text) <= _LONGEST:
        return text
    return f"{node.arg}=..." if isinstance(node, ast.keyword) else "..."


def _last(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
