"""Follows the last dimension of arrays through a compact method, where it has several origins.

An array that is set in a branch or in a loop, or taken out of a list, has a size that no single
expression of the program gives. The constructor keeps such a size in a variable beside those of
the program: it is set before the branch or loop, and at the end of each block that sets the array.
A list of arrays becomes a list of sizes, which grows and shrinks as the program's does.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeGuard

import jax
import jax.numpy as jnp
from flax import linen as nn

from bridge.rewrite.observe._records import Making, Shape
from bridge.rewrite.syntax._evaluate import KNOWN_CALLS
from bridge.rewrite.syntax._source import Source, binding, bound_in, is_self, items_of, only_value
from bridge.rewrite.syntax._taint import SAME_ITEMS

from ._plans import Slot
from ._references import References

# Functions of `jax.nn` whose result has another last dimension, or one less.
_OTHER = {"glu", "one_hot", "logsumexp", "logmeanexp", "scaled_dot_general", "scaled_matmul"}
# Functions whose result has the last dimension of their first argument.
_KEEPING: tuple[Any, ...] = (
    *(getattr(jax.nn, name) for name in dir(jax.nn) if name[0] != "_" and name not in _OTHER),
    *(jnp.tanh, jnp.abs, jnp.exp, jnp.log, jnp.sqrt, jnp.square, jnp.sin, jnp.cos, jnp.clip),
    *(jnp.asarray, jnp.array, jnp.maximum, jnp.minimum, jnp.where, jnp.nan_to_num),
    *(nn.avg_pool, nn.max_pool),
    *(jax.lax.stop_gradient, jax.lax.with_sharding_constraint),
)
_REDUCING = (jnp.mean, jnp.sum, jnp.max, jnp.min, jnp.prod, jnp.var, jnp.std)
_READING = (ast.Attribute, ast.Subscript)
_OPERATORS = (ast.operator, ast.unaryop, ast.boolop, ast.cmpop, ast.expr_context)
_COMPUTING = (ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.IfExp, ast.Compare)
_REDUCING_METHODS = frozenset({"mean", "sum", "max", "min", "prod", "var", "std"})
_KEEPING_METHODS = frozenset({"astype", "copy", "clip"})


class Size:
    """Where the last dimension of an array comes from.

    `parts` are the sizes that it is made of.
    """

    parts: tuple[Any, ...] = ()


@dataclasses.dataclass(frozen=True)
class Given(Size):
    """The last dimension of an argument of the method."""

    argument: str


@dataclasses.dataclass(frozen=True)
class Written(Size):
    """An expression of the program, as a constructor was given it."""

    node: ast.expr
    makings: tuple[Making, ...] = dataclasses.field(compare=False)
    source: Source = dataclasses.field(compare=False)

    @property
    def text(self) -> str:
        """What tells expressions apart."""
        return ast.dump(self.node)


@dataclasses.dataclass(frozen=True)
class Kept(Size):
    """A variable that the constructor keeps beside an array of the program."""

    variable: str


@dataclasses.dataclass(frozen=True)
class Item(Size):
    """An item of a list of sizes, by its index; without one, the item that is taken out."""

    variable: str
    index: ast.expr | None


@dataclasses.dataclass(frozen=True)
class Each(Size):
    """The items of a list of sizes, one after the other, as a loop takes them."""

    variable: str


@dataclasses.dataclass(frozen=True)
class Total(Size):
    """All items of a list of sizes together."""

    variable: str


@dataclasses.dataclass(frozen=True)
class OfOthers(Size):
    """A size that is made of others."""

    parts: tuple[Any, ...] = dataclasses.field()


class List(OfOthers):
    """The sizes of the arrays in a new list."""


class Sum(OfOthers):
    """The size of arrays beside each other on their last axis."""


class Last(OfOthers):
    """The last item of a sequence of the program, as in `x.reshape((len(x), *self.shape))`."""


class Choice(OfOthers):
    """By a condition that a constructor knows, or a sequence with items, one of two sizes."""


@dataclasses.dataclass(frozen=True)
class Part(OfOthers):
    """One of the equal parts that an array is split into on its last axis."""

    count: int


@dataclasses.dataclass(frozen=True)
class Computed(OfOthers):
    """An expression of the program, with sizes in the places of some of its parts."""

    node: ast.expr
    places: tuple[ast.expr, ...]
    source: Source = dataclasses.field(compare=False)

    @property
    def text(self) -> str:
        """What tells expressions apart."""
        return ast.dump(self.node)


@dataclasses.dataclass(frozen=True)
class Chained(Size):
    """What the layers of a list pass on, each to the next; behind the last one, what is left.

    `made` is the expression in `setup` that makes each of them; of several branches, the first.
    """

    made: ast.Call


@dataclasses.dataclass(frozen=True, eq=False)
class Made:
    """What a name is that is called as a layer.

    `slots` are the expressions that make it, of which one ran. `test` is the condition for the
    first of two.
    """

    slots: tuple[Slot, ...]
    test: ast.expr | None = None


# What is known of a name: a size, a layer that is called later, that it is a list, or nothing.
Known: TypeAlias = "Size | Made | ast.FunctionDef | type[list[Any]] | None"


class Following(NamedTuple):
    """What the layers of a list pass on.

    `first` is the size that the first layer is given, and `passed` has the size that each layer
    passes on, by what makes it.
    """

    first: Size
    passed: Mapping[ast.Call, Size]


class Update(NamedTuple):
    """A statement of the constructor that follows one of the program.

    Attributes:
        variable: the name of the array in the program.
        size: what is assigned or appended; `Each` for what a loop binds.
        statement: the statement of the program.
        is_before: whether it comes before that statement.
        appends: whether the variable is a list that becomes longer.
    """

    variable: str
    size: Size
    statement: ast.stmt
    is_before: bool = False
    appends: bool = False


class Facts(NamedTuple):
    """What a flow asks of the method that it is in.

    Attributes:
        arguments: the arguments of the method.
        slots: the expressions that make layers.
        source: the file.
        references: the names of the file.
        touches: whether an expression depends on the call.
        depending: the names that do.
        returned: slot -> what a class of the program returns, in its own words, and the names of
            the arguments of its call; None if that is not known.
        argument: (slot, field) -> the argument of its constructor, None if it is given none.
        output: slot -> the argument of its constructor that is its output size, if there is one.
        keeps: slot -> whether its output has the last dimension of what it is called with.
        attributes: the layers that `setup` makes, by attribute.
        lists: the layers that it makes in lists, by attribute.
        is_apart: whether the layers are made elsewhere, where no variable follows a call.
        is_function: slot -> whether it is the call of a function that makes layers.
        lines: the lines of the file that ran.
        rank: a name -> how many dimensions its array has there, None if that is not known.
    """

    arguments: Sequence[str]
    slots: Mapping[ast.Call, Slot]
    source: Source
    references: References
    touches: Callable[[ast.AST], bool]
    depending: Collection[str]
    returned: Callable[[Slot], tuple[Size, list[str]] | None]
    argument: Callable[[Slot, str], ast.expr | None]
    output: Callable[[Slot], ast.expr | None]
    keeps: Callable[[Slot], bool]
    attributes: Mapping[str, Made]
    lists: Mapping[str, Made]
    is_apart: bool
    is_function: Callable[[Slot], bool]
    lines: Collection[int]
    rank: Callable[[ast.expr], int | None]


class Flow:
    """Where the last dimensions of a method's arrays come from.

    Attributes:
        inputs: by slot, the sizes that its first call is given: by position and by name.
        called: by slot, its first call.
        dimensions: the sizes that expressions such as `x.shape[-1]` are.
        shapes: the last sizes of expressions such as `x.shape`.
        updates: what the constructor does beside the program, in order.
        broken: the lists that are used in a way that is not followed.
        returned: the sizes that the method returns.
        chains: by what makes the layers of a list that are called one after the other, what they
            pass on.
    """

    def __init__(self, method: ast.FunctionDef, facts: Facts) -> None:
        self._method, self._facts = method, facts
        self._kept: set[str] = set()
        # The names that nothing is known of in a loop, for it sets them to what is not followed.
        self._lost: set[tuple[ast.For, str]] = set()
        while True:
            before = set(self._kept), set(self._lost)
            self.returned: list[Size | None] = []
            self.chains: dict[ast.Call, Following] = {}
            self.inputs: dict[ast.Call, dict[int | str, Known]] = {}
            self.called: dict[ast.Call, ast.Call] = {}
            self.dimensions: dict[ast.expr, Size] = {}
            self.shapes: dict[ast.expr, Size] = {}
            self.updates: list[Update] = []
            self._names: dict[str, Known] = {each: Given(each) for each in facts.arguments}
            # By variable, the expression whose value it surely has.
            self._held: dict[str, Written] = {}
            self._numbers: set[str] = set()
            self.broken: set[str] = set()
            self._taken: list[str] = []
            self._block(method.body)
            if (self._kept, self._lost) == before:
                break
            if self._kept != before[0]:
                # What is kept from now on may be known in the loops.
                self._lost = before[1]
        self.returned = [self._from_outside(each) for each in self.returned]
        self.updates = [each for each in self.updates if self._is_read(each)]

    # Statements.

    def _block(self, statements: Sequence[ast.stmt]) -> bool:
        """Follows the statements of a block; whether the next statement behind it is reached."""
        for statement in statements:
            self._taken = []
            number = len(self.updates)
            is_followed = self._statement(statement)
            if not isinstance(statement, ast.If | ast.For | ast.With | ast.Match):
                kept = [e for u in self.updates[number:] for e in parts_of(u.size) if _is_taken(e)]
                # What is taken out of a list by an expression that is not understood.
                if len(kept) != len(self._taken):
                    self.broken |= {*self._taken}
            if not is_followed:
                return False
        return True

    def _is_dead(self, node: ast.stmt) -> bool:
        """Whether a statement never ran and makes layers: the new program raises there."""
        if node.lineno in self._facts.lines:
            return False
        made = (e for e in ast.walk(node) if isinstance(e, ast.Call) and e not in self._facts.slots)
        return any(self._facts.references.makes_layer(each.func) for each in made)

    def _statement(self, node: ast.stmt) -> bool:
        if self._is_dead(node):
            return False
        match node:
            case ast.Assign():
                for target in node.targets:
                    self._assign(target, node.value, node)
            case ast.AnnAssign(value=ast.expr() as value):
                self._assign(node.target, value, node)
            case ast.AugAssign(target=ast.Name(id=name)):
                before, added = self._names.get(name), self._size(node.value)
                is_array = isinstance(before, Size) and name not in self._numbers
                self._bind(name, _beside(before, added) if is_array else None, node)
            case ast.Expr():
                self._expression(node.value, node)
            case ast.If():
                self._size(node.test)
                is_known = self._is_told(node.test)
                return self._branches(node, [node.body, node.orelse], is_known, node.test)
            case ast.Match():
                return self._match(node)
            case ast.For():
                self._for(node)
            case ast.With():
                return self._block(node.body)
            case ast.Return():
                found = None if node.value is None else self._size(node.value)
                self.returned.append(found)
                return False
            case ast.Raise() | ast.Continue() | ast.Break():
                return False
            case ast.FunctionDef(decorator_list=[]) if not any(map(_is_nonlocal, ast.walk(node))):
                self._names[node.name] = node
            case _:
                for each in ast.walk(node):
                    if isinstance(each, ast.stmt):
                        self._forget(bound_in(each), node)
        return True

    def _assign(self, target: ast.expr, value: ast.expr, node: ast.stmt) -> None:
        if isinstance(target, ast.Name):
            if self._is_new_list(target, value, node):
                return
            is_depending = target.id in self._facts.depending
            number = self._told(value) if is_depending else None
            self._note_all(value)
            self._bind(target.id, self._known(value) if number is None else number, node)
            if number is not None:
                self._numbers.add(target.id)
        elif isinstance(target, ast.Tuple | ast.List):
            parts = target.elts
            if isinstance(value, ast.Tuple) and len(value.elts) == len(parts):
                known = [self._known(each) for each in value.elts]
                for each, own, new in zip(parts, known, value.elts, strict=True):
                    if isinstance(each, ast.Name) and not self._is_new_list(each, new, node):
                        self._bind(each.id, own, node)
                return
            own, part = self._shape_of(value), self._part(value)
            if own is None and part is None:
                self._size(value)
            self._forget(bound_in(target), node)
            for each in parts if part is not None else ():
                if isinstance(each, ast.Name):
                    self._bind(each.id, part, node)
            last = parts[-1] if parts else None
            if own is not None and isinstance(last, ast.Name):
                self._bind(last.id, own, node)
                self._numbers.add(last.id)
        else:
            self._size(value)

    def _is_new_list(self, target: ast.Name, value: ast.expr, node: ast.stmt) -> bool:
        """Whether a name becomes a list of arrays, which then is one of sizes."""
        is_list = isinstance(value, ast.List) and self._is_list(target.id)
        if not is_list or self._facts.is_apart or not isinstance(value, ast.List):
            return False
        sizes = tuple(map(self._size, value.elts))
        self._rebind(target.id, node)
        self._names[target.id] = list if None not in sizes else None
        self.updates.append(Update(target.id, List(sizes), node))
        return True

    def _expression(self, node: ast.expr, statement: ast.stmt) -> None:
        """A statement that is an expression, such as `hs.append(x)`."""
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
            and self._names.get(node.func.value.id) is list
        ):
            name, does = node.func.value.id, node.func.attr
            size = self._size(node.args[0]) if len(node.args) == 1 else None
            if does == "append" and size is not None:
                self.updates.append(Update(name, size, statement, appends=True))
                return
            self.broken.add(name)
            return
        self._size(node)

    def _match(self, node: ast.Match) -> bool:
        self._size(node.subject)
        known = [node.subject, *(case.guard for case in node.cases if case.guard is not None)]
        for case in node.cases:
            self._forget(bound_in(case.pattern), node)
        blocks = [case.body for case in node.cases]
        last = node.cases[-1]
        is_whole = isinstance(last.pattern, ast.MatchAs) and last.pattern.pattern is None
        if not is_whole or last.guard is not None:
            blocks.append([])
        return self._branches(node, blocks, not any(map(self._facts.touches, known)))

    def _branches(
        self,
        node: ast.stmt,
        blocks: Sequence[list[ast.stmt]],
        is_known: bool,
        test: ast.expr | None = None,
    ) -> bool:
        """Follows a statement that runs one of several blocks.

        One of `blocks` runs; an empty one means that perhaps nothing does. With `is_known`, a
        constructor knows which one runs. `test` is the condition of the first of two.
        """
        known = dict(self._names)
        self._keep_before(node, set().union(*map(bound_in_all, blocks)))
        # Inside of the branches a size still is what it is known by, but by a variable set here.
        changed = {name for name, value in self._names.items() if value is not known.get(name)}
        before = {
            name: value
            if known.get(name) is None or variables_of(known[name]) & changed
            else known[name]
            for name, value in self._names.items()
        }
        ends: list[dict[str, Known]] = []
        held, held_at_ends = self._held, list[dict[str, Written]]()
        number = len(self.updates)
        for block in blocks:
            self._names, self._held = dict(before), dict(held)
            if self._block(block):
                self._end(block, before)
                ends.append(self._names)
                held_at_ends.append(self._held)
        if not ends:
            return False
        self._held = {n: v for n, v in held_at_ends[0].items() if _is_one(n, v, held_at_ends)}
        if not is_known:
            # The constructor cannot follow: lists and sizes are unknown if the branches differ.
            grown = {each.variable for each in self.updates[number:]}
            self._names = {
                name: value if name not in grown and _is_one(name, value, ends) else None
                for name, value in ends[0].items()
            }
            return True
        self._names = dict(ends[0])
        for name in set().union(*ends):
            if not _is_one(name, ends[0].get(name), ends):
                self._merge(name, [each.get(name) for each in ends], test)
        return True

    def _for(self, node: ast.For) -> None:
        self._size(node.iter)
        if self._facts.is_apart:
            self._chain(node)
            return
        bound = bound_in_all(node.body) | bound_in(node.target)
        self._keep_before(node, bound)
        self._let_go(bound)
        for name in bound:
            if (node, name) in self._lost:
                self._names[name] = None
        before = dict(self._names)
        items = [*items_of(node.target, node.iter, SAME_ITEMS)]
        lists = {item: name for item, name in map(self._list_item, items) if name}
        can_follow = not node.orelse and not any(
            self._facts.touches(values) for item, values in items if item not in lists
        )
        can_follow &= not any(isinstance(e, ast.Break | ast.Continue) for e in ast.walk(node))
        number = len(self.updates)
        self._forget(bound_in(node.target), node)
        for item, name in lists.items():
            self._names[item.id] = Kept(item.id)
            self.updates.append(Update(item.id, Each(name), node))
        if self._block(node.body):
            self._end(node.body, {})
        self._let_go(bound)
        after = self._names
        grown = {each.variable for each in self.updates[number:]}
        self.broken |= grown & {*lists.values()}
        self._names = dict(before)
        for name in set(before) | set(after):
            old, new = before.get(name), after.get(name)
            if not can_follow:
                is_same = name not in grown and old is not list and _is_one(name, old, [after])
                if not is_same:
                    self._lose(node, name)
            elif old is not list and not (_is_one(name, old, [after]) and _is_stable(new, bound)):
                self._merge(name, [old, new])
                if self._names[name] is None:
                    self._lose(node, name)
        for name in bound_in(node.target):
            self._names[name] = None

    def _list_item(self, item: tuple[ast.expr, ast.expr]) -> tuple[Any, str]:
        """What a loop binds, and the name of the list of arrays that it loops over, if any."""
        target, values = item
        name = values.id if isinstance(values, ast.Name) else ""
        is_item = isinstance(target, ast.Name) and self._names.get(name) is list
        return target, name if is_item else ""

    def _chain(self, node: ast.For) -> None:
        """A loop over a list of layers of `setup`, or another one, that leaves nothing known."""
        bound = bound_in_all(node.body) | bound_in(node.target)
        before = {**self._names, **dict.fromkeys(bound_in(node.target))}
        layers: dict[str, Made] = {}
        for item, values in items_of(node.target, node.iter):
            attribute = values.attr if isinstance(values, ast.Attribute) and is_self(values) else ""
            made = self._facts.lists.get(attribute)
            if isinstance(item, ast.Name) and made is not None:
                layers[item.id] = made
        layers |= self._numbered(node)
        is_broken = any(isinstance(e, ast.Break | ast.Continue) for e in ast.walk(node))
        if is_broken or node.orelse:
            layers.clear()
        # The first list passes a size on; what is called beside it has the sizes of the same turn.
        main = next(iter(layers), "")
        before |= layers
        turns = [{main: Made((slot,))} for slot in layers[main].slots] if layers else [{}]
        known = set(self.inputs)
        ends = [self._turn(node, {**before, **turn}) for turn in turns]
        changed = [n for n in bound if not _is_one(n, before.get(n), ends)]
        after = before | dict.fromkeys([*changed, *bound_in(node.target), *layers])
        changed = [n for n in changed if isinstance(before.get(n), Size)]
        followed = {slot.node for turn in turns for made in turn.values() for slot in made.slots}
        if followed and len(changed) == 1:
            (name,) = changed
            chained = Chained(layers[main].slots[0].node)
            for each in self.inputs.keys() - known:
                del self.inputs[each]
            ends = [self._turn(node, {**before, name: chained, **turn}) for turn in turns]
            made = [slot.node for slot in layers[main].slots]
            passed = {n: e.get(name) for n, e in zip(made, ends, strict=True)}
            first = before[name]
            if isinstance(first, Size) and all(isinstance(e, Size) for e in passed.values()):
                self.chains[chained.made] = Following(first, passed)  # pyright: ignore
                after[name] = chained
        for each in self.inputs.keys() - known:
            if each not in followed or len(changed) > 1 or (changed and after[changed[0]] is None):
                self.inputs[each] = {}
        self._names = after

    def _numbered(self, node: ast.For) -> dict[str, Made]:
        """The lists of layers that a loop takes by number: `self.layers[i]` of `i in range(n)`."""
        counts = node.iter if isinstance(node.iter, ast.Call) else None
        if counts is None or not _is_range(counts) or len(counts.args) > 1:
            return {}
        found: dict[str, Made] = {}
        for each in ast.walk(node):
            if isinstance(each, ast.Subscript) and is_self(each.value):
                made = self._facts.lists.get(each.value.attr)  # pyright: ignore
                if made is not None and ast.dump(each.slice) == _loaded(node.target):
                    found[ast.unparse(each)] = made
        return found

    def _turn(self, node: ast.For, names: Mapping[str, Known]) -> dict[str, Known]:
        """What the names are after a turn of a loop, given what they are before it."""
        self._names = dict(names)
        self._block(node.body)
        return self._names

    def _lose(self, node: ast.For, name: str) -> None:
        self._lost.add((node, name))
        self._names[name] = None

    def _merge(self, name: str, values: list[Known], test: ast.expr | None = None) -> None:
        """Says that a name has one of several sizes from here on."""
        is_size = all(isinstance(each, Size) for each in values)
        if is_size and self._facts.is_apart and test is not None and len(values) == 2:
            self._names[name] = Choice((self._written(test), *values))
            return
        if not is_size or self._facts.is_apart:
            self._names[name] = None
            return
        self._kept.add(name)
        self._names[name] = Kept(name)

    def _keep_before(self, node: ast.stmt, bound: set[str]) -> None:
        """Sets the variables of what a block sets, or what is written with it, before the block."""
        written = {
            name
            for name, value in self._names.items()
            if isinstance(value, Size) and not _is_stable(value, bound)
        }
        for name in sorted((bound | written) & self._kept):
            value = self._names.get(name)
            if isinstance(value, Size) and value != Kept(name):
                self._set(Update(name, value, node, is_before=True))

    def _end(self, block: Sequence[ast.stmt], before: Mapping[str, Known]) -> None:
        """Sets the variables of what a block has set, at its end."""
        for name in sorted(bound_in_all(block) & self._kept):
            value = self._names.get(name)
            if isinstance(value, Size) and value not in (Kept(name), before.get(name)):
                self._set(Update(name, value, block[-1]))

    def _set(self, update: Update) -> None:
        """Sets a variable; others that are known by it need one of their own."""
        own, size = update.variable, update.size
        held = self._held.pop(own, None)
        if isinstance(size, Written):
            self._held[own] = size
        if held is not None and is_same(held, size):
            self._names[own] = Kept(own)
            return
        self.updates.append(update)
        for name, value in self._names.items():
            if name != own and Kept(own) in parts_of(value):
                self._kept.add(name)
                self._names[name] = None
        self._names[own] = Kept(own)

    def _let_go(self, bound: Collection[str]) -> None:
        """Forgets what is held by variables that a loop may set, or is written with its names."""
        self._held = {
            name: value
            for name, value in self._held.items()
            if name not in bound and _is_stable(value, {*bound})
        }

    def _is_read(self, update: Update) -> bool:
        """Whether what an update sets is read behind it, or in another turn of a loop."""
        if update.appends or isinstance(update.size, List | Each):
            return True
        statement, variable = update.statement, update.variable
        around = [statement, *self._facts.source.ancestors(statement)]
        loops = {each for each in around if isinstance(each, ast.For | ast.While)}
        inputs = [(self.called[s], e) for s, given in self.inputs.items() for e in given.values()]
        others = [(each.statement, each.size) for each in self.updates if each is not update]
        begin = statement.lineno if update.is_before else (statement.end_lineno or 0) + 1
        return any(
            place.lineno >= begin or not loops.isdisjoint(self._facts.source.ancestors(place))
            for place, size in (*inputs, *self.dimensions.items(), *self.shapes.items(), *others)
            if variable in variables_of(size)
        )

    # What a method returns, without the variables of its constructor.

    def _from_outside(self, size: Size | None) -> Size | None:
        """A size in terms of the fields and arguments of the class, None if it has no such form."""
        match size:
            case Kept(variable=variable):
                return self._in_branches_and_loops(variable)
            case Chained(made=made):
                first, passed = self.chains[made]
                around = self._facts.source.parents[made]
                is_one = len(passed) == 1 and isinstance(around, ast.ListComp)
                if not is_one or not isinstance(around, ast.ListComp):
                    return None
                loop = around.generators[0]
                return self._behind_loop(loop, bound_in(loop.target), passed[made], first)
            case OfOthers():
                return _of(size, [self._from_outside(each) for each in size.parts])
        return size

    def _in_branches_and_loops(self, variable: str) -> Size | None:
        """What a variable is at the end, by the statements of the method that set it."""
        found: Size | None = None
        for update in (each for each in self.updates if each.variable == variable):
            size, block = update.size, self._facts.source.parents[update.statement]
            if update.appends or isinstance(size, List) or variables_of(size):
                return None
            top = block if isinstance(block, ast.For | ast.If) else update.statement
            if top not in self._method.body:
                return None
            if top is update.statement:
                found = size
            elif found is None:
                return None
            elif isinstance(block, ast.For):
                bound = bound_in_all(block.body) | bound_in(block.target)
                found = self._behind_loop(block, bound, size, found)
            elif isinstance(block, ast.If):
                sizes = (size, found) if update.statement in block.body else (found, size)
                found = _chosen(self._written(block.test), *sizes)
            if found is None:
                return None
        return found

    def _behind_loop(
        self, loop: ast.For | ast.comprehension, bound: set[str], size: Size, first: Size
    ) -> Size | None:
        """What the last iteration of a loop leaves behind, or what was there without one.

        The loop sets the names `bound`. `size` is what each turn leaves, in the words of the loop,
        and `first` is what was there before.
        """
        items = [*items_of(loop.target, loop.iter, ("list", "tuple"))]
        if len(items) != 1 or self._facts.touches(loop.iter):
            return None
        ((item, values),) = items
        count = values.args[0] if _is_range(values) and len(values.args) == 1 else None
        if isinstance(count, ast.Call) and ast.unparse(count.func) == "len":
            count = count.args[0]
        turns = self._written(values if count is None else count)
        if _is_stable(size, bound):
            return _chosen(turns, size, first)
        node = size.node if isinstance(size, Written) else None
        is_item = node is not None and ast.unparse(node) == ast.unparse(item)
        numbers = {*bound_in(loop.target)} - ({*bound_in(item)} if count is None else set())
        is_item_by_number = (
            isinstance(node, ast.Subscript)
            and isinstance(node.slice, ast.Name)
            and node.slice.id in numbers
            and ast.dump(node.value) == ast.dump(turns.node)
        )
        is_last = (is_item and count is None) or is_item_by_number
        return _chosen(turns, _last_item(turns), first) if is_last else None

    # Names.

    def _bind(self, name: str, value: Known, node: ast.stmt) -> None:
        self._rebind(name, node)
        self._numbers.discard(name)
        is_other = any(isinstance(e, Kept) and e.variable != name for e in parts_of(value))
        of_list = any(isinstance(each, Item | Total) for each in parts_of(value))
        if of_list or (is_other and name in self._kept):
            # The list, or the other variable, is another one later.
            self._kept.add(name)
            self._set(Update(name, value, node))  # pyright: ignore
            return
        self._names[name] = value

    def _rebind(self, name: str, node: ast.stmt) -> None:
        """Sets the variables of what was written with a name that gets another value."""
        self._held = {n: v for n, v in self._held.items() if _is_stable(v, {name})}
        for other, value in list(self._names.items()):
            if other == name or not isinstance(value, Size) or _is_stable(value, {name}):
                continue
            if self._facts.is_apart:
                self._names[other] = None
            elif other in self._kept:
                self._set(Update(other, value, node, is_before=True))
            else:
                self._kept.add(other)
                self._names[other] = None

    def _forget(self, names: Iterable[str], node: ast.stmt) -> None:
        for name in names:
            self._rebind(name, node)
            self._names[name] = None

    def _is_list(self, name: str) -> bool:
        """Whether a name is a list that the method makes longer or takes items out of."""
        return any(
            isinstance(each, ast.Attribute)
            and each.attr in ("append", "pop")
            and isinstance(each.value, ast.Name)
            and each.value.id == name
            for each in ast.walk(self._method)
        )

    # Expressions.

    def _known(self, node: ast.expr) -> Known:
        slot = self._facts.slots.get(node) if isinstance(node, ast.Call) else None
        if slot is not None and slot.kind == "module":
            self._note_all(node)
            return Made((slot,))
        made = self._names.get(ast.unparse(node)) if isinstance(node, ast.Subscript) else None
        return made if isinstance(made, Made) else self._size(node)

    def _size(self, node: ast.expr) -> Size | None:
        """The last dimension of what an expression computes, None if it is not known."""
        match node:
            case ast.Name():
                found = None if node.id in self._numbers else self._names.get(node.id)
                return found if isinstance(found, Size) else None
            case ast.Call():
                return self._call(node)
            case ast.BinOp(op=ast.MatMult()):
                self._size(node.left)
                return self._size(node.right)
            case ast.BinOp():
                return _beside(self._size(node.left), self._size(node.right))
            case ast.UnaryOp():
                return self._size(node.operand)
            case ast.IfExp():
                self._size(node.test)
                sizes = self._size(node.body), self._size(node.orelse)
                return self._one_of(sizes, None if self._facts.touches(node.test) else node.test)
            case ast.Subscript(value=ast.Name(id=name)) if self._names.get(name) is list:
                is_known = not self._facts.touches(node.slice) and not isinstance(
                    node.slice, ast.Slice
                )
                return Item(name, node.slice) if is_known else None
            case ast.Subscript():
                own = self._size(node.value)
                self._children(node.slice)
                return own if _keeps_last_index(node.slice, self._facts.rank(node.value)) else None
        self._children(node)
        return None

    def _children(self, node: ast.AST) -> None:
        """Looks for calls of layers inside what is not understood."""
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self._note(child)
                self._size(child)
            elif isinstance(child, ast.keyword):
                self._size(child.value)

    def _note_all(self, node: ast.expr) -> None:
        """Notes the numbers in an expression, such as the arguments of a constructor."""
        for each in ast.walk(node):
            if isinstance(each, ast.expr):
                self._note(each)

    def _note(self, node: ast.expr) -> None:
        number, last = self._number(node), self._shape_of(node)
        if number is not None:
            self.dimensions[node] = number
        if last is not None:
            self.shapes[node] = last

    def _number(self, node: ast.expr) -> Size | None:
        """What `x.shape[-1]`, a name of it, or a number computed from it is; else None."""
        if isinstance(node, ast.Name):
            found = self._names.get(node.id)
            is_number = node.id in self._numbers and self._facts.touches(node)
            return found if is_number and isinstance(found, Size) else None
        if isinstance(node, ast.Subscript) and _is_last(node.slice):
            return self._shape_of(node.value)
        is_call = isinstance(node, ast.Call) and ast.unparse(node.func) in KNOWN_CALLS
        if not (is_call or isinstance(node, _COMPUTING)) or not self._facts.touches(node):
            return None
        parts = node.args if isinstance(node, ast.Call) else ast.iter_child_nodes(node)
        places = tuple(e for e in parts if isinstance(e, ast.expr) and self._facts.touches(e))
        numbers = tuple(map(self._number, places))
        if None in numbers or any(map(_takes_out, numbers)):
            return None
        return Computed(numbers, node, places, self._facts.source)

    def _is_told(self, test: ast.expr) -> bool:
        """Whether a constructor knows a condition: one on sizes that are followed, too."""
        if not self._facts.touches(test) or test in self.dimensions or test in self.shapes:
            return True
        if not self._facts.is_apart and (_is_dimension(test) or self._is_unpacked(test)):
            # One that is not followed becomes an argument of the constructor.
            return True
        match test:
            case ast.Compare():
                return all(map(self._is_told, (test.left, *test.comparators)))
            case ast.BoolOp():
                return all(map(self._is_told, test.values))
            case ast.UnaryOp():
                return self._is_told(test.operand)
        return False

    def _is_unpacked(self, node: ast.expr) -> bool:
        """Whether a name is a dimension, as each of `batch, width, _ = x.shape`."""
        places = binding(self._method, node.id) if isinstance(node, ast.Name) else []
        return (
            len(places) == 1
            and isinstance(places[0], ast.Assign)
            and (_is_dimension(places[0].value) or _is_shape(places[0].value))
        )

    def _shape_of(self, node: ast.expr) -> Size | None:
        """The last item of `x.shape`, None for another expression."""
        if isinstance(node, ast.Attribute) and node.attr == "shape":
            found = self._size(node.value)
            return None if found is None or _takes_out(found) else found
        return None

    def _part(self, node: ast.expr) -> Size | None:
        """The size of each array that `jnp.split` makes of one, None for another expression."""
        is_split = isinstance(node, ast.Call) and node.args != []
        if not is_split or self._facts.references.value_of(node.func) is not jnp.split:  # pyright: ignore
            return None
        given = dict(zip(("ary", "indices_or_sections", "axis"), node.args, strict=False))  # pyright: ignore
        given |= {str(each.arg): each.value for each in node.keywords}  # pyright: ignore
        count = _number(given.get("indices_or_sections"))
        whole = self._size(given["ary"]) if count and _is_last(given.get("axis")) else None
        return None if whole is None or not count else Part((whole,), count)

    def _call(self, node: ast.Call) -> Size | None:
        made = self._made(node.func)
        if made is not None:
            sizes = [self._of_layer(slot, node) for slot in made.slots]
            return self._one_of(sizes, made.test)
        own = self._facts.slots.get(node)
        if own is not None and own.kind == "module" and self._facts.is_function(own):
            return self._of_layer(own, node)
        if own is not None and own.kind == "param":
            self._note_all(node)
            return self._of_shape(node.args[2]) if len(node.args) > 2 else None
        function = node.func
        if isinstance(function, ast.Attribute) and not is_self(function):
            found = self._method_call(node, function)
            if found is not None:
                return found
        inner = self._names.get(function.id) if isinstance(function, ast.Name) else None
        if isinstance(inner, ast.FunctionDef):
            return self._entered(inner, node)
        value = self._facts.references.value_of(function)
        if value is not None and value in (jnp.concatenate, jnp.hstack, jax.lax.concatenate):
            return self._concatenated(node)
        sizes = [self._size(each) for each in node.args]
        for keyword in node.keywords:
            self._size(keyword.value)
        first = sizes[0] if sizes else None
        if value is jax.image.resize:
            return self._of_shape(node.args[1]) if len(node.args) > 1 else None
        if value is jax.nn.one_hot:
            given = [*node.args[1:2], *(k.value for k in node.keywords if k.arg == "num_classes")]
            return self._told(given[0]) if given else None
        if value is jnp.reshape and len(node.args) > 1:
            return self._of_shape(node.args[1])
        if value in _REDUCING and not _takes_last(node, node.args[1:]):
            return first
        if str(getattr(value, "__module__", "")).partition(".")[0] == "einops":
            return first if _keeps_last_axis(node) else None
        if value in (jnp.where, jnp.maximum, jnp.minimum):
            return next((each for each in sizes if each is not None), None)
        if _is_keeping(value) or self._is_activation(function):
            return first
        return None

    def _entered(self, function: ast.FunctionDef, node: ast.Call) -> Size | None:
        """What a function inside of the method returns, followed with what this call gives it."""
        given = [self._size(each) for each in node.args]
        named = {each.arg: self._size(each.value) for each in node.keywords}
        arguments = function.args
        names = [each.arg for each in (*arguments.posonlyargs, *arguments.args)]
        own = {*names, *(each.arg for each in arguments.kwonlyargs)}
        before, returned = dict(self._names), self.returned
        self.returned = []
        sizes = dict(zip(names, given, strict=False)) | named
        for name in own:
            value = sizes.get(name)
            is_kept = any(isinstance(each, Kept) for each in parts_of(value))
            self._names[name] = None if is_kept else value
        self._block(function.body)
        found, self.returned = self.returned, returned
        for name in own | set().union(*(bound_in(each) for each in function.body)):
            # A variable that the function keeps has another value behind it.
            self._names[name] = None if name in self._kept else before.get(name)
        return found[0] if found and all(each == found[0] for each in found) else None

    def _is_activation(self, function: ast.expr) -> bool:
        """Whether a field that is called is a function that keeps the last dimension."""
        if not is_self(function):
            return False
        made = [*self._facts.attributes.values(), *self._facts.lists.values()]
        slots = [*self._facts.slots.values(), *(slot for each in made for slot in each.slots)]
        found = [
            making.fields.get(function.attr)  # pyright: ignore
            for slot in slots
            for making in slot.makings
        ]
        # What is None here is an activation for others: nothing else stands between two layers.
        return bool(found) and all(each is None or _is_keeping(each) for each in found)

    def _method_call(self, node: ast.Call, function: ast.Attribute) -> Size | None:
        owner = function.value
        if isinstance(owner, ast.Name) and self._names.get(owner.id) is list:
            if function.attr == "pop" and not node.args and not node.keywords:
                self._taken.append(owner.id)
                return Item(owner.id, None)
            self.broken.add(owner.id)
            return None
        if self._facts.references.value_of(owner) is not None:
            return None
        if function.attr in _KEEPING_METHODS:
            return self._size(owner)
        if function.attr in _REDUCING_METHODS and not _takes_last(node, node.args):
            return self._size(owner)
        if function.attr == "reshape" and node.args:
            self._size(owner)
            shape = node.args[0] if len(node.args) == 1 else ast.Tuple(node.args, ast.Load())
            return self._of_shape(shape)
        return None

    def _of_shape(self, shape: ast.expr) -> Size | None:
        """The last dimension that a shape says."""
        if not isinstance(shape, ast.Tuple | ast.List) or not shape.elts:
            return None
        last = shape.elts[-1]
        # As many dimensions as before: the last one of these.
        if isinstance(last, ast.Subscript) and _number(last.slice) == len(shape.elts) - 1:
            return self._shape_of(last.value)
        return self._told(last)

    def _told(self, node: ast.expr) -> Size | None:
        """A number that a constructor can compute; None for one that is left open, such as -1."""
        if isinstance(node, ast.Starred):
            return None if self._facts.touches(node) else Last((self._written(node.value),))
        if self._facts.touches(node):
            return self._number(node)
        return None if _number(node) == -1 else self._written(node)

    def _written(self, node: ast.expr) -> Written:
        return Written(node, (), self._facts.source)

    def _concatenated(self, node: ast.Call) -> Size | None:
        axis = next((k.value for k in node.keywords if k.arg in ("axis", "dimension")), None)
        if axis is None and len(node.args) > 1:
            axis = node.args[1]
        parts = node.args[0] if node.args else None
        if isinstance(parts, ast.Name) and self._names.get(parts.id) is list:
            return Total(parts.id) if axis is not None and _is_last(axis) else None
        if not isinstance(parts, ast.List | ast.Tuple):
            self._children(node)
            return None
        sizes = [self._size(each) for each in parts.elts]
        number = _number(axis)
        if number is None or not sizes:
            return None
        ranks = {rank for each in parts.elts if (rank := self._facts.rank(each)) is not None}
        if number == -1 or ranks == {number + 1}:
            return None if None in sizes else Sum(tuple(sizes))
        if number < 0 or number == 0 or (len(ranks) == 1 and number + 1 < max(ranks)):
            # The other axes are all the same.
            return functools.reduce(_beside, sizes)
        return None

    def _one_of(self, sizes: Sequence[Size | None], test: ast.expr | None) -> Size | None:
        """One of the sizes, the first one where a condition holds."""
        first = sizes[0]
        if first is None or all(is_same(each, first) for each in sizes):
            return first
        is_known = test is not None and len(sizes) == 2 and None not in sizes
        return Choice((self._written(test), *sizes)) if is_known and test is not None else None

    def _made(self, function: ast.expr) -> Made | None:
        """What is called, if it is a layer."""
        if isinstance(function, ast.Call):
            slot = self._facts.slots.get(function)
            if slot is not None and slot.kind == "module":
                self._note_all(function)
                return Made((slot,))
        if isinstance(function, ast.Name | ast.Subscript):
            found = self._names.get(ast.unparse(function))
            return found if isinstance(found, Made) else None
        return self._facts.attributes.get(function.attr) if is_self(function) else None  # pyright: ignore

    def _of_layer(self, slot: Slot, node: ast.Call) -> Size | None:
        given: dict[int | str, Known] = {}
        for number, each in enumerate(node.args):
            given[number] = self._once(self._size(each), slot, number, node)
        for keyword in node.keywords:
            if keyword.arg is not None:
                name = keyword.arg
                given[name] = self._once(self._size(keyword.value), slot, name, node)
        if slot.node not in self.inputs:
            self.inputs[slot.node], self.called[slot.node] = given, node
        summary = self._facts.returned(slot)
        if summary is not None:
            return self._of_caller(summary[0], summary[1], slot, given)
        output = self._facts.output(slot)
        if output is not None:
            noted = self.dimensions.get(output)
            return (
                noted
                if noted is not None
                else Written(output, tuple(slot.makings), self._facts.source)
            )
        first = given.get(0)
        if isinstance(first, Size) and self._facts.keeps(slot):
            return first
        return None

    def _of_caller(
        self, size: Size, names: Sequence[str], slot: Slot, given: Mapping[int | str, Known]
    ) -> Size | None:
        """A size in the words of a class's own method, in those of who makes the class.

        `size` is what the class's method returns, and `names` are the arguments of that method. The
        class is made at `slot`. `given` has the sizes that it is called with.
        """
        match size:
            case Computed():
                return self._in_words_of_caller(size, names, slot, given)
            case OfOthers(parts=parts):
                return _of(size, [self._of_caller(each, names, slot, given) for each in parts])
            case Given(argument=argument):
                found = given.get(argument) or given.get(names.index(argument))
                return found if isinstance(found, Size) else None
            case Written(node=ast.Constant()):
                return size
            case Written(node=node, source=source):
                if is_self(node):
                    return self._of_field(node, slot)
                computed = Computed((), node, (), source)
                return self._in_words_of_caller(computed, names, slot, given)
        return None

    def _of_field(self, node: Any, slot: Slot) -> Size | None:
        """What a field is in the words of who makes the class."""
        given = self._facts.argument(slot, node.attr)
        if given is None:
            return None
        noted = self.dimensions.get(given)
        return (
            noted if noted is not None else Written(given, tuple(slot.makings), self._facts.source)
        )

    def _in_words_of_caller(
        self, size: Computed, names: Sequence[str], slot: Slot, given: Mapping[int | str, Known]
    ) -> Size | None:
        """An expression of a class with what its fields and sizes are for who makes it."""
        own = dict(zip(size.places, size.parts, strict=True))
        found: dict[Any, Size] = {}
        stack: list[ast.AST] = [size.node]
        while stack:
            node = stack.pop()
            part: Size | None = None
            if node in own:
                part = self._of_caller(own[node], names, slot, given)  # pyright: ignore
            elif is_self(node):
                part = self._of_field(node, slot)
            elif isinstance(node, ast.Name) and node.id in KNOWN_CALLS:
                continue
            elif isinstance(node, ast.Name) and (value := _value_of(size.source, node)):
                local = Computed((), value, (), size.source)
                part = self._in_words_of_caller(local, names, slot, given)
            elif isinstance(node, (*_COMPUTING, *_OPERATORS, *_READING, ast.Call, ast.Constant)):
                stack += ast.iter_child_nodes(node)
                continue
            if part is None:
                return None
            found[node] = part
        return Computed(tuple(found.values()), size.node, tuple(found), size.source)

    def _once(self, size: Known, slot: Slot, argument: int | str, node: ast.Call) -> Known:
        """A size that takes an item out of a list, in a variable of its own."""
        if not isinstance(size, Size) or not _takes_out(size):
            return size
        name = f"{slot.attribute}_{argument}" if argument else slot.attribute
        variable = f"{name}_in"
        statement = self._facts.source.statement_of(node)
        self._set(Update(variable, size, statement, is_before=True))
        return Kept(variable)


def _is_nonlocal(node: ast.AST) -> bool:
    return isinstance(node, ast.Nonlocal)


def parts_of(size: Any) -> Iterator[Any]:
    """A size and those that it is made of."""
    yield size
    for each in size.parts if isinstance(size, Size) else ():
        yield from parts_of(each)


def _of(size: OfOthers, parts: Sequence[Size | None]) -> Size | None:
    """A size that is made of other parts, None where one of them is not known."""
    known = [each for each in parts if each is not None]
    if len(known) < len(parts):
        return None
    if isinstance(size, Choice):
        return _chosen(*known)
    return (
        _last_item(*known) if isinstance(size, Last) else dataclasses.replace(size, parts=(*known,))
    )


def _last_item(sequence: Size) -> Size:
    """The last item of a sequence, which the program may have written out."""
    node = sequence.node if isinstance(sequence, Written) else None
    items = node.elts if isinstance(node, ast.Tuple | ast.List) else []
    if not isinstance(sequence, Written) or not items or isinstance(items[-1], ast.Starred):
        return Last((sequence,))
    return dataclasses.replace(sequence, node=items[-1])


def _chosen(test: Size, then: Size, otherwise: Size) -> Size:
    """One of two sizes, the first one where a condition holds, or a sequence has items."""
    node = test.node if isinstance(test, Written) else None
    if isinstance(then, Choice) and is_same(then.parts[0], test):
        then = then.parts[1]
    if isinstance(otherwise, Choice) and is_same(otherwise.parts[0], test):
        otherwise = otherwise.parts[2]
    if isinstance(node, ast.Constant):
        return then if node.value else otherwise
    items = node.elts if isinstance(node, ast.Tuple | ast.List) else []
    has_items = any(not isinstance(each, ast.Starred) for each in items)
    return then if has_items or is_same(then, otherwise) else Choice((test, then, otherwise))


def _is_range(node: ast.expr) -> TypeGuard[ast.Call]:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "range"


def variables_of(size: Any) -> set[str]:
    """The names of the program beside which a size needs variables."""
    return {e.variable for e in parts_of(size) if isinstance(e, Kept | Item | Each | Total)}


def has_several_origins(size: Any) -> bool:
    """Whether no single expression of the program gives a size."""
    return any(isinstance(each, Kept | Item | Each | Total | Choice) for each in parts_of(size))


def bound_in_all(statements: Sequence[ast.stmt]) -> set[str]:
    """The names that statements bind, in inner blocks too."""
    return {
        name
        for statement in statements
        for each in ast.walk(statement)
        if isinstance(each, ast.stmt)
        for name in bound_in(each)
    }


def _value_of(source: Source, name: ast.Name) -> ast.expr | None:
    """The expression that a local variable stands for, None if it is none."""
    method = next((a for a in source.ancestors(name) if isinstance(a, ast.FunctionDef)), None)
    return None if method is None else only_value(method, name.id)


def _loaded(target: ast.expr) -> str:
    """What a name that a loop binds is where it is read."""
    return ast.dump(ast.parse(ast.unparse(target), mode="eval").body)


def _is_taken(size: Any) -> bool:
    return isinstance(size, Item) and size.index is None


def _takes_out(size: Any) -> bool:
    return any(map(_is_taken, parts_of(size)))


def _beside(a: Any, b: Any) -> Any:
    """The size of two arrays that are combined element by element."""
    if not isinstance(a, Size):
        return b if isinstance(b, Size) else None
    if not isinstance(b, Size) or is_same(a, b):
        return a
    return b if has_several_origins(a) else a


def is_same(a: Any, b: Any) -> bool:
    """Whether two sizes are surely the same at one place."""
    if type(a) is not type(b) or isinstance(a, Item):
        return False
    if isinstance(a, OfOthers | Written):
        own, other = ([getattr(e, n, None) for n in ("text", "count")] for e in (a, b))
        is_alike = own == other and len(a.parts) == len(b.parts)
        return is_alike and all(map(is_same, a.parts, b.parts))
    return a == b


def _is_one(name: str, value: Known, ends: Sequence[Mapping[str, Known]]) -> bool:
    """Whether a name is the same at several ends."""
    return all(each.get(name) is value or is_same(each.get(name), value) for each in ends)


def _is_stable(size: Any, bound: set[str]) -> bool:
    """Whether a size means the same when names get other values."""
    for each in parts_of(size):
        nodes = [getattr(each, name, None) for name in ("node", "index")]
        # Sizes stand in the place of these.
        places = {*each.places} if isinstance(each, Computed) else set[ast.expr]()
        if any(_names_outside(node, places) & bound for node in nodes if node is not None):
            return False
    return True


def _names_outside(node: ast.AST, parts: set[ast.expr]) -> set[str]:
    """The names in an expression, but for those in parts of it."""
    if node in parts:
        return set()
    own = {node.id} if isinstance(node, ast.Name) else set[str]()
    return own.union(*(_names_outside(each, parts) for each in ast.iter_child_nodes(node)))


def _is_keeping(value: Any) -> bool:
    try:
        return any(value is each for each in _KEEPING)
    except TypeError:
        return False


def _number(node: ast.expr | None) -> int | None:
    try:
        found = ast.literal_eval(node) if node is not None else None
    except ValueError:
        return None
    return found if isinstance(found, int) else None


def _is_last(node: ast.expr | None) -> bool:
    return _number(node) == -1


def _keeps_last_index(index: ast.expr, rank: int | None) -> bool:
    """Whether an index such as that of `x[:, 0]` leaves the last axis as it is.

    `rank` is how many dimensions the array has, None if that is not known.
    """
    items = index.elts if isinstance(index, ast.Tuple) else [index]
    last = items[-1] if items else None
    is_ellipsis = isinstance(last, ast.Constant) and last.value is ...
    is_whole = isinstance(last, ast.Slice) and not (last.lower or last.upper or last.step)
    if is_ellipsis or is_whole:
        return True
    added = [each for each in items if isinstance(each, ast.Constant) and each.value is None]
    taken = [each for each in items if isinstance(each, ast.Slice) or _number(each) is not None]
    is_simple = len(added) + len(taken) == len(items)
    return is_simple and rank is not None and len(taken) < rank


def _takes_last(node: ast.Call, rest: Sequence[ast.expr]) -> bool:
    """Whether a reduction may take the last axis."""
    axis = next((k.value for k in node.keywords if k.arg == "axis"), rest[0] if rest else None)
    if axis is None or any(k.arg == "keepdims" for k in node.keywords):
        return True
    if _are_axes_before_last(axis):
        return False
    try:
        found = ast.literal_eval(axis)
    except ValueError:
        return True
    axes = found if isinstance(found, tuple | list) else (found,)
    # An axis from the front may be the last one of an array of few.
    return not all(isinstance(each, int) and each not in (-1,) and each < 3 for each in axes)


def _are_axes_before_last(node: ast.expr) -> bool:
    """Whether axes are counted up to the last one, as in `tuple(range(1, x.ndim - 1))`."""
    is_sequence = isinstance(node, ast.Call) and ast.unparse(node.func) in ("list", "tuple")
    if is_sequence and isinstance(node, ast.Call) and len(node.args) == 1:
        node = node.args[0]
    if not _is_range(node) or len(node.args) != 2:
        return False
    start, stop = node.args
    return (
        (_number(start) or 0) >= 0
        and isinstance(stop, ast.BinOp)
        and isinstance(stop.op, ast.Sub)
        and isinstance(stop.left, ast.Attribute)
        and stop.left.attr == "ndim"
        and (_number(stop.right) or 0) >= 1
    )


def _keeps_last_axis(node: ast.Call) -> bool:
    """Whether a call of einops, such as `rearrange(x, "b h w c -> b (h w) c")`, keeps it."""
    pattern = node.args[1] if len(node.args) > 1 else None
    text = pattern.value if isinstance(pattern, ast.Constant) else None
    if not isinstance(text, str) or text.count("->") != 1:
        return False
    before, after = (side.split()[-1:] for side in text.split("->"))
    return before == after and before != [] and before[0].isidentifier()


def last_of(value: Any) -> int | None:
    """The last dimension of a recorded array."""
    return value.shape[-1] if isinstance(value, Shape) and value.shape else None


def _is_shape(node: ast.expr) -> bool:
    """Whether an expression is `x.shape`."""
    return isinstance(node, ast.Attribute) and node.attr == "shape"


def _is_dimension(node: ast.expr) -> bool:
    """Whether an expression is `x.shape[1]`."""
    return isinstance(node, ast.Subscript) and _is_shape(node.value)
