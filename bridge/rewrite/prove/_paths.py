"""Maps Linen paths to NNX paths, and writes the rules for them."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from typing import Any

from flax import linen as nn
from flax import nnx

from bridge._conversion.collections import OUTPUTS
from bridge.port._rule_text import rules_of as compressed
from bridge.rewrite.observe._records import Making, Path
from bridge.rewrite.observe._snapshots import path_of
from bridge.rewrite.plan._computed import Computed
from bridge.rewrite.plan._function_plans import FunctionPlan
from bridge.rewrite.plan._layers import field_order
from bridge.rewrite.plan._plans import ClassPlan, Program, Slot
from bridge.rewrite.plan._slots import held_attributes, name_node, slots_of_run

_NUMBERS = re.compile(r"\d+(_\d+)*")


def rules_of(program: Program, run: int, model: Any = None) -> dict[str, str]:
    """The rules for one run, for `bridge.port`: what the names alone do not tell.

    The new model may hold one module at several paths.
    """
    paths = Paths(program, run, model)
    leaves = _prefixes(program.records.variables[run])
    found = {path: target for path, target in paths.rules().items() if path in leaves}
    return compressed(found.items(), found.items(), leaves)


def _prefixes(variables: Mapping[str, Any]) -> set[str]:
    """The paths of all scopes and leaves."""
    found: set[str] = set()

    def walk(tree: Any, path: Path) -> None:
        if path:
            found.add("/".join(path))
        if isinstance(tree, Mapping):
            for name, inner in tree.items():
                walk(inner, (*path, str(name)))

    for collection, tree in variables.items():
        if collection not in OUTPUTS:
            walk(tree, ())
    return found


class Paths:
    """The NNX paths of one run.

    `model` is the new model, None if nothing in it is shared.
    """

    def __init__(self, program: Program, run: int, model: Any = None) -> None:
        self.program, self.run, self.model = program, run, model
        self._first = {} if model is None else first_paths(model)
        self.makings = [m for m in program.records.makings if m.run == run]
        self.slots = slots_of_run(program, run)
        self._owners = {path: m.owner for m in self.makings if (path := self._path(m))}
        self._depths: dict[Path, int] = {}
        self.numbers: dict[int, int] = {}
        counts: dict[tuple[Path, str], int] = {}
        for making in self.makings:
            if id(making) in self.slots and making.owner is not None:
                slot = self.slots[id(making)][1]
                held = None if slot.is_alone else slot.stored
                if slot.is_list or held is not None:
                    key = (making.owner, held or slot.attribute)
                    self.numbers[id(making)] = counts.get(key, 0)
                    counts[key] = counts.get(key, 0) + 1

    def rules(self) -> dict[str, str]:
        """NNX paths by Linen paths, where they differ by more than their parent's."""
        return self._followed()[1]

    def places(self) -> dict[Path, str]:
        """The NNX paths of all modules, parameters and variables by their Linen paths."""
        return self._followed()[0]

    def _followed(self) -> tuple[dict[Path, str], dict[str, str]]:
        """`places` and `rules`."""
        found: dict[str, str] = {}
        known: dict[Path, str] = {(): ""}
        kept: set[Path] = set()
        entries = [(self._path(m), m) for m in self.makings]
        entries = [(path, m) for path, m in entries if path]
        for path, making in sorted(entries, key=lambda e: self._depth(e[0])):
            if path in known or any(path[:n] in kept for n in range(len(path))):
                continue
            slot = self.slots.get(id(making), (None, None))[1]
            if slot is not None and slot.is_wrapped:
                # Below a `ToNNX` the paths are Linen's.
                kept.add(path)
            parent = self._parent(path, known)
            own = known[path] = self._shared(self._own(making, path, known))
            default = ".".join([*([parent] if parent else []), path[-1]])
            if own != default and not self._is_named_alike(path, own, parent):
                found["/".join(path)] = own
        return known, found

    def _depth(self, path: Path) -> int:
        """How many modules are around a path; what functions make is in theirs besides."""
        if not path:
            return 0
        if path not in self._depths:
            owner = self._owners.get(path) or ()
            # A module that was handed on may be owned by one that it holds.
            self._depths[path] = len(path)
            self._depths[path] = 1 + max(self._depth(path[:-1]), self._depth(owner))
        return self._depths[path]

    def _shared(self, own: str) -> str:
        """The path that NNX takes for the one of a module that the model holds several times."""
        return self._first.get(id(node_at(self.model, own)), own) if self._first else own

    def wrapped(self) -> set[Path]:
        """The paths of what is wrapped in `ToNNX`."""
        return {
            m.path
            for m in self.makings
            if m.path is not None and id(m) in self.slots and self.slots[id(m)][1].is_wrapped
        }

    def _is_named_alike(self, path: Path, own: str, parent: str) -> bool:
        """`b.3` is what `bridge.port` takes `b_3` for."""
        return own == ".".join(
            [*([parent] if parent else []), re.sub(r"_(\d+)$", r".\1", path[-1])]
        ) and not re.match(r"[A-Z]", path[-1])

    def _path(self, making: Making) -> Path | None:
        if making.kind == "module":
            return making.path
        if making.kind in ("param", "variable") and making.scope is not None:
            return (*making.scope, str(making.name))
        return None

    def _parent(self, path: Path, known: Mapping[Path, str]) -> str:
        own = path[:-1]
        if own in known:
            return known[own]
        above = self._parent(own, known) if own else ""
        return ".".join([*([above] if above else []), *self._in_field(own)]) if own else ""

    def _own(self, making: Making, path: Path, known: Mapping[Path, str]) -> str:
        plan, slot = self.slots.get(id(making), (None, None))
        owner = making.owner if making.owner is not None else path[:-1]
        parent = known[owner] if owner in known else self._parent((*owner, ""), known)
        if isinstance(plan, FunctionPlan) and plan.returns_layers:
            return self._returned(making, path, known, parent)
        if plan is None or slot is None:
            names = self._in_field(path)
        elif slot.outer is not None:
            return self._nested(slot, making, path, known, parent)
        elif slot.method.name == "setup" and path[:-1] != owner and slot.kind == "module":
            # It was given to others; the first of them has it in Linen.
            return ".".join([*filter(None, [self._parent(path, known)]), *self._in_field(path)])
        elif slot.method.name == "setup":
            names = [self._in_setup(plan, slot, making, path[-1])]
        else:
            names = [slot.attribute]
            if slot.is_list:
                names.append(str(self.numbers[id(making)]))
        return ".".join([*([parent] if parent else []), *names])

    def _in_field(self, path: Path) -> list[str]:
        """The names of a module that its owner was given: `layers_0` is in the list `layers`."""
        owner = self.program.records.instances.get((self.run, path[:-1]))
        for name, value in owner.fields.items() if owner is not None else ():
            if path[-1].startswith(f"{name}_"):
                keys = _keys(value, path[-1][len(name) + 1 :])
                if keys:
                    return [name, *keys]
        return [path[-1]]

    def _returned(self, making: Making, path: Path, known: Mapping[Path, str], parent: str) -> str:
        """What a function returned is where its call is; `setup` names it by itself."""
        caller = next(m for m in self.makings if m.path == making.owner)
        slot = self.slots[id(caller)][1] if id(caller) in self.slots else None
        if slot is not None and slot.method.name == "setup":
            return ".".join([*filter(None, [self._parent(path, known)]), path[-1]])
        return ".".join([parent, *(making.place or ())])

    def _nested(
        self, slot: Slot, making: Making, path: Path, known: Mapping[Path, str], parent: str
    ) -> str:
        """What was made as an argument is where the outer module keeps it."""
        outer = slot.outer
        holder = next(
            (
                m
                for m in self.makings
                if outer is not None
                and self.slots.get(id(m), (None, None))[1] is outer
                and m.owner == making.owner
                and m.order > making.order
            ),
            None,
        )
        if holder is None or holder.path is None or outer is None:
            return ".".join([*([parent] if parent else []), path[-1]])
        base = self._own(holder, holder.path, known)
        field = _argument_name(outer, slot, holder, making)
        # In a wrapper the names are Linen's.
        return f"{base}.{field.replace('.', '_') if outer.is_wrapped else field}"

    def _in_setup(self, plan: ClassPlan, slot: Slot, making: Making, name: str) -> str:
        if Computed(plan, slot.method).makes(slot):
            return slot.attribute
        is_named = name_node(slot) is not None
        if slot.stored is not None and slot.is_alone and (is_named or slot.kind != "module"):
            return slot.stored
        containers = held_attributes(self.program, plan, slot.method)
        is_held = slot.stored is not None and not slot.is_alone
        if is_named and is_held and containers.get(str(slot.stored)) == "List":
            # The program named what is in the list, each for itself.
            place = _place_in_list(plan, slot)
            return f"{slot.stored}.{self.numbers[id(making)] if place is None else place}"
        for each in containers:
            if name.startswith(f"{each}_"):
                rest = name[len(each) + 1 :]
                return f"{each}.{rest.replace('_', '.') if _NUMBERS.fullmatch(rest) else rest}"
        return name


def _keys(value: Any, name: str) -> list[str]:
    """The keys of a module in lists and dicts, which Linen joins in its name."""
    items: Any = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    for key, each in items:
        if name == str(key) and isinstance(each, nn.Module):
            return [name]
        if name.startswith(f"{key}_"):
            inner = _keys(each, name[len(str(key)) + 1 :])
            if inner:
                return [str(key), *inner]
    return []


def _place_in_list(plan: ClassPlan, slot: Slot) -> int | None:
    """The place of a slot in a list that is written out."""
    around = plan.source.parents[slot.node]
    return around.elts.index(slot.node) if isinstance(around, ast.List | ast.Tuple) else None


def _argument_name(outer: Slot, slot: Slot, holder: Making, making: Making) -> str:
    if holder.cls is nn.Sequential:
        layers = list(holder.made["layers"])
        own = [isinstance(e, nn.Module) and path_of(e) == making.path for e in layers]
        return f"layers.{own.index(True) if True in own else 0}"

    def is_it(node: ast.AST) -> bool:
        return node is slot.node or (isinstance(node, ast.Name) and node.id == slot.variable)

    position = next((i for i, a in enumerate(outer.node.args) if is_it(a)), None)
    if position is not None and holder.cls is not None:
        return field_order(holder.cls)[position]
    return next((str(k.arg) for k in outer.node.keywords if is_it(k.value)), "inner")


def first_paths(model: Any) -> dict[int, str]:
    """The paths of the modules that are held several times, by their ids."""
    first: dict[int, str] = {}
    shared: dict[int, str] = {}

    def walk(node: Any, path: tuple[str, ...]) -> None:
        if id(node) in first:
            shared[id(node)] = first[id(node)]
            return
        first[id(node)] = ".".join(path)
        # NNX takes attributes in this order.
        for name, child in sorted(_children(node), key=lambda each: each[0]):
            walk(child, (*path, str(name)))

    walk(model, ())
    return shared


def _children(node: Any) -> list[tuple[Any, Any]]:
    return [(name, child) for name, child in nnx.iter_children(node) if _is_inner(child)]


def _is_inner(node: Any) -> bool:
    return isinstance(node, nnx.Module | nnx.List | nnx.Dict)


def node_at(model: Any, path: str) -> Any:
    """What is at a dotted path, None if nothing is."""
    node = model
    for name in path.split(".") if path else ():
        try:
            if isinstance(node, nnx.List):
                node = node[int(name)]
            else:
                node = node[name] if isinstance(node, nnx.Dict) else getattr(node, name)
        except (AttributeError, IndexError, KeyError, ValueError):
            return None
    return node
