"""Which Linen path is which NNX path, and the rules that say so."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping
from typing import Any

from bridge._conversion.collections import OUTPUTS

from ._method import Method
from ._plans import ClassPlan, Program, Slot
from ._records import Making, Path
from ._setup import Setup
from ._slots import name_node

_NUMBERS = re.compile(r"\d+(_\d+)*")
_NUMBER = re.compile(r"\d+")


def rules_of(program: Program, run: int) -> dict[str, str]:
    """The rules for one run, for `bridge.port`: what the names alone do not tell."""
    paths = Paths(program, run)
    leaves = _prefixes(program.records.variables[run])
    found = {path: target for path, target in paths.rules().items() if path in leaves}
    return compressed(found, leaves)


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

    Args:
        program: everything.
        run: which run.
    """

    def __init__(self, program: Program, run: int) -> None:
        self.program, self.run = program, run
        self.makings = [m for m in program.records.makings if m.run == run]
        self.slots: dict[int, tuple[ClassPlan, Slot]] = {}
        for plan in program.plans.values():
            if plan.reason is None:
                for slot in plan.slots.values():
                    for making in slot.makings:
                        self.slots[id(making)] = (plan, slot)
        self.numbers: dict[int, int] = {}
        counts: dict[tuple[Path, str], int] = {}
        for making in self.makings:
            if id(making) in self.slots and making.owner is not None:
                slot = self.slots[id(making)][1]
                if slot.is_list:
                    key = (making.owner, slot.attribute)
                    self.numbers[id(making)] = counts.get(key, 0)
                    counts[key] = counts.get(key, 0) + 1

    def rules(self) -> dict[str, str]:
        """NNX paths by Linen paths, where they differ by more than their parent's."""
        known: dict[Path, str] = {(): ""}
        found: dict[str, str] = {}
        kept: set[Path] = set()
        entries = [(self._path(m), m) for m in self.makings]
        entries = [(path, m) for path, m in entries if path]
        for path, making in sorted(entries, key=lambda e: len(e[0])):
            if path in known or any(path[:n] in kept for n in range(len(path))):
                continue
            slot = self.slots.get(id(making), (None, None))[1]
            if slot is not None and slot.linen is not None:
                # Below a `ToNNX` the paths are Linen's.
                kept.add(path)
            parent = self._parent(path, known)
            own = self._own(making, path, known)
            known[path] = own
            default = ".".join([*([parent] if parent else []), path[-1]])
            if own != default and not self._is_named_alike(path, own, parent):
                found["/".join(path)] = own
        return found

    def wrapped(self) -> set[Path]:
        """The paths of what is wrapped in `ToNNX`."""
        return {
            m.path
            for m in self.makings
            if m.path is not None and id(m) in self.slots and self.slots[id(m)][1].linen is not None
        }

    def _is_named_alike(self, path: Path, own: str, parent: str) -> bool:
        """`b.3` is what `bridge.port` takes `b_3` for."""
        return own == ".".join(
            [*([parent] if parent else []), re.sub(r"_(\d+)$", r".\1", path[-1])]
        ) and not re.match(r"[A-Z]", path[-1])

    def _path(self, making: Making) -> Path | None:
        if making.kind == "module":
            return making.path
        if making.kind in ("param", "variable") and making.owner is not None:
            return (*making.owner, str(making.name))
        return None

    def _parent(self, path: Path, known: Mapping[Path, str]) -> str:
        own = path[:-1]
        if own in known:
            return known[own]
        above = self._parent(own, known) if own else ""
        return ".".join([*([above] if above else []), own[-1]]) if own else ""

    def _own(self, making: Making, path: Path, known: Mapping[Path, str]) -> str:
        plan, slot = self.slots.get(id(making), (None, None))
        owner = making.owner if making.owner is not None else path[:-1]
        parent = known[owner] if owner in known else self._parent((*owner, ""), known)
        if plan is None or slot is None:
            names = [path[-1]]
        elif slot.outer is not None:
            return self._nested(plan, slot, making, path, known, parent)
        elif slot.method.name == "setup":
            names = [self._in_setup(plan, slot, making, path[-1])]
        else:
            names = [slot.attribute]
            if slot.is_list:
                names.append(str(self.numbers[id(making)]))
        return ".".join([*([parent] if parent else []), *names])

    def _nested(
        self,
        plan: ClassPlan,
        slot: Slot,
        making: Making,
        path: Path,
        known: Mapping[Path, str],
        parent: str,
    ) -> str:
        """What was made as an argument is where the outer module keeps it."""
        outer = slot.outer
        holder = next(
            (
                m
                for m in self.makings
                if outer is not None
                and m in outer.makings
                and m.owner == making.owner
                and m.order > making.order
            ),
            None,
        )
        if holder is None or holder.path is None or outer is None:
            return ".".join([*([parent] if parent else []), path[-1]])
        base = self._own(holder, holder.path, known)
        field = _argument_name(outer, slot, holder)
        return f"{base}.{field}"

    def _in_setup(self, plan: ClassPlan, slot: Slot, making: Making, name: str) -> str:
        setup = _setup_of(self.program, plan, slot)
        attribute = setup.attribute(slot)
        if name_node(slot) is not None and slot.kind == "module" and attribute is not None:
            return attribute
        if slot.kind != "module" and attribute is not None:
            return attribute
        for each in setup.containers():
            if name.startswith(f"{each}_"):
                rest = name[len(each) + 1 :]
                return f"{each}.{rest.replace('_', '.') if _NUMBERS.fullmatch(rest) else rest}"
        return name


def _setup_of(program: Program, plan: ClassPlan, slot: Slot) -> Setup:
    import sys

    from ._references import References

    namespace = vars(sys.modules[plan.cls.__module__])
    return Setup(Method(program, plan, slot.method, References(program, plan.source, namespace)))


def _argument_name(outer: Slot, slot: Slot, holder: Making) -> str:
    from ._layers import field_order

    if holder.cls is not None and holder.cls.__name__ == "Sequential":
        argument: Any = outer.node.args[0]
        if hasattr(argument, "elts") and slot.node in argument.elts:
            return f"layers.{argument.elts.index(slot.node)}"
        return "layers.0"

    def is_it(node: ast.AST) -> bool:
        return node is slot.node or (isinstance(node, ast.Name) and node.id == slot.variable)

    position = next((i for i, a in enumerate(outer.node.args) if is_it(a)), None)
    if position is not None and holder.cls is not None:
        return field_order(holder.cls)[position]
    return next((str(k.arg) for k in outer.node.keywords if is_it(k.value)), "inner")


def compressed(rules: Mapping[str, str], paths: Iterable[str]) -> dict[str, str]:
    """Rules that differ in their numbers alone as one, where that says no more."""
    groups: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for key, value in rules.items():
        skeleton = (_NUMBER.sub("#", key), _NUMBER.sub("#", value))
        groups.setdefault(skeleton, []).append((key, value))
    found: dict[str, str] = {}
    everything = set(paths)
    for group in groups.values():
        one = _general(group) if len(group) > 1 else None
        if one is not None:
            pattern = re.compile(one[0])
            hits = {p: m.expand(one[1]) for p in everything if (m := pattern.fullmatch(p))}
            if hits == dict(group):
                found[one[0]] = one[1]
                continue
        found.update({re.escape(key).replace("\\_", "_"): value for key, value in group})
    return found


def _general(group: list[tuple[str, str]]) -> tuple[str, str] | None:
    keys = [_NUMBER.findall(key) for key, _ in group]
    values = [_NUMBER.findall(value) for _, value in group]
    varying = [i for i in range(len(keys[0])) if len({k[i] for k in keys}) > 1]
    if not varying:
        return None
    number = {position: index + 1 for index, position in enumerate(varying)}
    key_parts, value_parts = _NUMBER.split(group[0][0]), _NUMBER.split(group[0][1])
    pattern = re.escape(key_parts[0])
    for i, part in enumerate(key_parts[1:]):
        pattern += (r"(\d+)" if i in number else keys[0][i]) + re.escape(part)
    target = value_parts[0]
    for j, part in enumerate(value_parts[1:]):
        own = [v[j] for v in values]
        if len(set(own)) == 1:
            target += own[0] + part
            continue
        source = next((i for i in varying if [k[i] for k in keys] == own), None)
        if source is None:
            return None
        target += rf"\g<{number[source]}>" if part[:1].isdigit() else rf"\{number[source]}"
        target += part
    return pattern.replace("\\_", "_"), target
