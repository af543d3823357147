"""Expressions for sizes that hold in every record.

An expression counts as confirmed if it held for two values or more. One that was only seen to be
equal for a single value is used too, and told: the proof covers the configuration that was traced.
What no expression gives becomes an argument of the constructor.
"""

from __future__ import annotations

import ast
import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from bridge.rewrite.observe._records import Making
from bridge.rewrite.syntax._source import binding, bound_in, names_in

from ._candidates import Candidate, Candidates
from ._plans import CACHE, ClassPlan, SizeArgument

# What Flax's layers take the axes of sequences and of images for, by rank and axis from behind.
_AXES = {(3, -2): "length", (4, -2): "width", (4, -3): "height"}


@dataclasses.dataclass
class Running:
    """A size that changes from turn to turn of a loop.

    Attributes:
        name: the local variable.
        first: its value before the loop.
        following: its value for the next turn.
        loop: the innermost loop around it, where it is updated.
        outermost: the loop that it is set before.
        behind: the statement it is updated behind, None for the end of the loop.
    """

    name: str
    first: str
    following: str
    loop: ast.For
    outermost: ast.AST
    behind: ast.stmt | None


class Sizes:
    """The sizes of one method's slots.

    `candidates` has what can be known there. New constructor arguments are added to `plan`.
    """

    def __init__(self, candidates: Candidates, plan: ClassPlan) -> None:
        self.candidates, self.plan = candidates, plan
        self.running: list[Running] = []
        # The loops that take the sizes of an argument, one in each branch.
        self.iterators: dict[str, list[ast.AST]] = {}
        self._known: dict[Any, str] = {}
        # The dimensions that constructor arguments are the sizes of.
        self._dimensions: dict[str, Any] = {}

    def solve(
        self,
        makings: Sequence[Making],
        values: Sequence[Any],
        hint: str,
        loops: Sequence[ast.AST] = (),
        at: ast.AST | None = None,
        allowed: set[str] | None = None,
    ) -> str:
        """An expression for a size.

        `makings` has every execution of the place `at` where the size is needed, and `values` the
        size at each of them. `hint` is what the constructor argument is called if there is no
        expression. `loops` are those around the place. `allowed` has the local names that may be
        used; by default all that a constructor knows.
        """
        key = (id(at), hint, tuple(map(repr, values)))
        if key not in self._known:
            names = self.candidates.taint.pure if allowed is None else allowed
            self._known[key] = self._solve(makings, values, hint, loops, at, set(names))
        return self._known[key]

    def argument(
        self, wanted: tuple[str, int], makings: Sequence[Making], values: Sequence[Any], names: Any
    ) -> str | None:
        """The size of a dimension of an argument, None if it is not that of the first call.

        `wanted` is the argument's name, and the dimension from behind. `makings` has every
        execution of the place where the size is needed, and `values` the size at each of them.
        `names` has the local names that may be used.
        """
        found = self._holding(makings, values, set(names))
        own = [each for each in found if each.argument == wanted]
        return self._dimension(own[0], makings, values) if own else None

    def last_of_argument(self, name: str, makings: Sequence[Making], values: Sequence[Any]) -> str:
        """The constructor argument for the last dimension of an argument of the call."""
        return self._dimension(Candidate("", None, 0, (name, -1)), makings, values)

    def named(self, makings: Sequence[Making], values: Sequence[Any], names: Any) -> str | None:
        """A name or a field of the method that is a size, None if there is none."""
        found = [each for each in self._holding(makings, values, set(names)) if each.text]
        found = [each for each in found if each.text not in self.plan.sizes and not each.certain]
        return self._chosen(found, makings, values, len({repr(v) for v in values}))

    def given(self, name: str, makings: Sequence[Making], values: Sequence[Any]) -> str:
        """A constructor argument that has a value of its own at each execution of a place."""
        return self._add(name, makings, values)

    def _solve(self, makings: Any, values: Any, hint: str, loops: Any, at: Any, names: Any) -> str:
        if hint.startswith(CACHE):
            # Only the caller knows how much it decodes; a field is as large by chance.
            return self._argument(makings, values, hint, loops)
        distinct = len({repr(v) for v in values})
        found = self._holding(makings, values, names)
        best = self._chosen(found, makings, values, distinct, hint)
        if best is not None:
            return self._behind_loop(found, best, loops)
        parts = self._of_parts(makings, values, names)
        if parts is not None:
            return parts
        is_loop = bool(loops) and isinstance(loops[-1], ast.For)
        place = (makings, values, hint, loops, at, names)
        running = self._running(*place) if is_loop else None
        return running or self._argument(makings, values, hint, loops)

    def _of_parts(self, makings: Any, values: Any, names: set[str]) -> str | None:
        """Sizes of as many dimensions each time, an expression for each of them."""
        if not all(isinstance(each, tuple) for each in values) or len(set(map(len, values))) > 1:
            return None
        texts: list[str] = []
        for own in zip(*values, strict=True):
            distinct = len({repr(each) for each in own})
            text = self._chosen(self._holding(makings, own, names), makings, own, distinct)
            if text is None:
                return None
            texts.append(text)
        return f"({', '.join(texts)}{',' if len(texts) == 1 else ''})"

    def _holding(self, makings: Any, values: Any, names: set[str]) -> list[Candidate]:
        """The candidates that hold in every record."""
        left: dict[Any, Candidate] | None = None
        for making, value in zip(makings, values, strict=True):
            here: dict[Any, Candidate] = {}
            for each in self.candidates.at(making, names):
                if _same(each.value, value):
                    key = each.argument or each.text
                    known = here.get(key, each)
                    here[key] = dataclasses.replace(
                        each,
                        rank=min(each.rank, known.rank),
                        certain=each.certain or known.certain,
                        loop=known.loop or each.loop,
                    )
            left = (
                here
                if left is None
                else {
                    key: dataclasses.replace(
                        each,
                        rank=max(each.rank, here[key].rank),
                        certain=each.certain and here[key].certain,
                    )
                    for key, each in left.items()
                    if key in here
                }
            )
            if not left:
                return []
        return sorted((left or {}).values(), key=lambda each: each.rank)

    def _chosen(
        self, found: list[Candidate], makings: Any, values: Any, distinct: int, hint: str = ""
    ) -> str | None:
        if not found:
            return None
        # A constant that the layer before was given is where the size comes from.
        certain = [each for each in found if distinct > 1 or each.certain]
        best = (certain or found)[0]
        if distinct < 2 and not best.certain:
            self.plan.seen.append(best.text or f"{best.argument}")
        if best.argument is not None:
            return self._dimension(best, makings, values, hint)
        return best.text

    def _behind_loop(self, found: list[Candidate], text: str, loops: Any) -> str:
        """The size that a loop leaves behind, which holds also if the loop never turns."""
        loop = next((each.loop for each in found if each.text == text), None)
        for each in self.running:
            if each.loop is loop and loop not in loops and each.following == text:
                return each.name
        return text

    def _dimension(self, best: Candidate, makings: Any, values: Any, hint: str = "") -> str:
        name, index = best.argument  # pyright: ignore
        arguments = self.candidates.taint.arguments
        is_first = not arguments or name == arguments[0]
        is_last = index == -1
        words = ["in_features"] if is_first and (is_last or hint.endswith("features")) else []
        words += [f"{name}_features"] if is_last else []
        words += [word for word in (unpacked(self.candidates.method, name, index),) if word]
        rank = len(self.candidates.given_shapes(makings[0]).get(name, ()))
        if is_first and (rank, index) in _AXES:
            words.append(_AXES[rank, index])
        words.append(f"{name}_{_AXES.get((rank, index), f'dim{rank + index}')}")
        # Two dimensions are two arguments, also where they are equal by chance.
        text = next(
            w for w in words if self._dimensions.setdefault(w, best.argument) == best.argument
        )
        return self._add(text, makings, values)

    def _add(self, name: str, makings: Any, values: Any) -> str:
        """A constructor argument with these values."""
        taken = {field.name for field in self.plan.fields} | self.candidates.taint.pure
        base, number = name, 2
        while True:
            own = self.plan.sizes.setdefault(name, SizeArgument(name, {})).values
            wanted = {(m.run, m.owner or ()): v for m, v in zip(makings, values, strict=True)}
            fits = all(own.get(key, value) == value for key, value in wanted.items())
            if fits and name not in taken:
                own.update(wanted)
                return name
            if not own:
                del self.plan.sizes[name]
            name, number = f"{base}_{number}", number + 1

    def _argument(self, makings: Any, values: Any, hint: str, loops: Any) -> str:
        grouped: dict[Any, list[Any]] = {}
        firsts: dict[Any, Making] = {}
        for making, value in zip(makings, values, strict=True):
            grouped.setdefault((making.run, making.owner), []).append(value)
            firsts.setdefault((making.run, making.owner), making)
        if all(len({repr(v) for v in each}) == 1 for each in grouped.values()):
            return self._add(hint, makings, values)
        name = self._add(hint, list(firsts.values()), [tuple(each) for each in grouped.values()])
        known = self.iterators.setdefault(name, [])
        known += () if loops[0] in known else (loops[0],)
        return f"next({name})"

    def _running(
        self,
        makings: Any,
        values: Any,
        hint: str,
        loops: Any,
        at: Any,
        names: set[str],
    ) -> str | None:
        groups: dict[Any, list[tuple[Making, Any]]] = {}
        for making, value in zip(makings, values, strict=True):
            groups.setdefault((making.run, making.owner), []).append((making, value))
        if not any(len(group) > 1 for group in groups.values()):
            return None
        of_loops = set().union(
            *(bound_in(loop.target) for loop in loops if hasattr(loop, "target"))
        )
        inside = set().union(set(), *(bound_in(each) for each in loops[0].body))
        firsts = [group[0] for group in groups.values()]
        before = self._holding(
            [m for m, _ in firsts], [v for _, v in firsts], names - of_loops - inside
        )
        following = self._following(list(groups.values()), names)
        if following is None:
            return None
        first_makings, first_values = [m for m, _ in firsts], [v for _, v in firsts]
        distinct = len({repr(v) for v in first_values})
        start = self._chosen(before, first_makings, first_values, distinct, hint)
        if start is None:
            start = self._add(hint, first_makings, first_values)
        loop = loops[-1]
        statement = self.plan.source.statement_of(at)
        behind = None if statement in loop.body else statement
        if behind is None:
            # What the next turn needs has its value here, and another one at the end.
            later = loop.body[loop.body.index(statement) + 1 :]
            rebound = set().union(set(), *(bound_in(each) for each in later))
            if names_in(ast.parse(following, mode="eval")) & rebound:
                behind = statement
        for known in self.running:
            if (known.first, known.following, known.loop) == (start, following, loop):
                return known.name
        name = "features_in" if not self.running else f"features_in_{len(self.running) + 1}"
        self.running.append(Running(name, start, following, loop, loops[0], behind))
        return name

    def _following(self, groups: Any, names: set[str]) -> str | None:
        left: dict[str, int] | None = None
        for group in groups:
            for (making, _), (after, value) in itertools.pairwise(group):
                here: dict[str, int] = {}
                turn = self.candidates.between(making, after)
                found = [
                    *self.candidates.outs(making, turn, names),
                    *self.candidates.at(making, names),
                ]
                for each in found:
                    if each.text and _same(each.value, value):
                        here[each.text] = min(each.rank, here.get(each.text, 99))
                left = (
                    here
                    if left is None
                    else {
                        text: max(rank, here[text]) for text, rank in left.items() if text in here
                    }
                )
        return min(left, key=lambda text: left[text]) if left else None


def unpacked(method: ast.FunctionDef, argument: str, index: int) -> str | None:
    """The program's own word for a dimension, as in `batch, height, width, _ = x.shape`."""
    for node in ast.walk(method):
        if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Tuple):
            continue
        value, names = node.value, node.targets[0].elts
        is_shape = isinstance(value, ast.Attribute) and value.attr == "shape"
        of = value.value if isinstance(value, ast.Attribute) else None
        if not is_shape or not isinstance(of, ast.Name) or of.id != argument:
            continue
        first = min((each.lineno for each in binding(method, argument)), default=node.lineno)
        behind = names[index:] if -index <= len(names) else ()
        if first < node.lineno or not behind:
            continue
        if not all(isinstance(each, ast.Name) for each in behind):
            continue
        name = behind[0].id  # pyright: ignore
        return name if len(name) > 1 and not name.startswith("_") else None
    return None


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return tuple(a) == tuple(b)
    return type(a) is not bool and type(b) is not bool and a == b
