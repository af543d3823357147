"""The sizes of arrays as text of a constructor: expressions, and variables that it keeps."""

from __future__ import annotations

import ast
import functools
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from bridge.rewrite.observe._records import Making
from bridge.rewrite.syntax._source import Edit, is_none, is_self, names_in, operand

from ._flow import (
    Chained,
    Choice,
    Computed,
    Each,
    Facts,
    Flow,
    Given,
    Item,
    Kept,
    Last,
    List,
    Made,
    Part,
    Size,
    Sum,
    Total,
    Update,
    Written,
    bound_in_all,
    is_same,
    parts_of,
    variables_of,
)
from ._function_plans import called_function
from ._layers import field_order
from ._plans import Slot
from ._references import References
from ._refusals import NotRewritableError

# What is weaker than `+` is in parentheses in it; a product is not.
_SUM = ast.Compare


class Loop(NamedTuple):
    """The text of a loop: `for {target} in {values}`."""

    target: str
    values: str

    @property
    def item(self) -> str:
        """What the loop binds, where it is one of several."""
        return f"({self.target})" if "," in self.target else self.target


class Chain(NamedTuple):
    """A list of layers that is made in a loop, which keeps the size that each passes on.

    `statement` is the statement of `setup` that has the list, or its branches. `before` is what is
    set before that. `turns` is what is set behind each layer, by what makes the layer; empty if
    nothing is.
    """

    statement: ast.stmt
    before: tuple[str, ...]
    turns: Mapping[ast.Call, str]


class KeptSizes:
    """What the flow of a method's arrays says, as text of its constructor.

    `names` has the variables that the constructor keeps, by the names of the program's variables
    beside them.
    """

    def __init__(self, method: Any) -> None:
        self._method = method
        self._source, self._plan = method.source, method.plan
        self._candidates = self._of_call = method.sizes.candidates
        self.names: dict[str, str] = {}
        self._chained: dict[ast.Call, str] = {}

    @functools.cached_property
    def flow(self) -> Flow:
        """Where the sizes of the method's arrays come from; of `setup`, those of the call."""
        method, is_apart = self._method, self._method.is_setup
        call = self._plan.methods.get("__call__")
        if is_apart and call is not None:
            method = type(method)(
                method.program, self._plan, call, method.references, method.made_by
            )
            self._of_call = method.sizes.candidates
        taint = method.taint

        def touches(node: ast.AST) -> bool:
            # `setup` has none of the names of the call.
            return taint.touches(node) or (is_apart and bool(names_in(node) & taint.pure))

        attributes, lists = self._made_by_setup()
        return Flow(
            method.node,
            Facts(
                taint.arguments,
                {slot.node: slot for slot in (*method.slots, *method.own_slots)},
                method.source,
                method.references,
                touches,
                taint.names,
                self._returned_by,
                self._argument,
                self._candidates.output_argument,
                self._candidates.keeps_size,
                attributes,
                lists,
                is_apart,
                self._is_function,
                method.lines,
                self._rank,
            ),
        )

    def _rank(self, node: ast.expr) -> int | None:
        """How many dimensions the array of a name has, where that is the same in each run."""
        if not isinstance(node, ast.Name):
            return None
        ranks, file = self._method.program.records.ranks, self._source.file
        statement: ast.AST = self._source.statement_of(node)
        while isinstance(statement, ast.stmt):
            found = ranks.get((file, statement.lineno, node.id))
            if found is not None:
                return next(iter(found)) if len(found) == 1 else None
            # It did not run: as before the branch, if nothing in it has set the name.
            around = self._source.parents[statement]
            if not isinstance(around, ast.If):
                return None
            block = around.body if statement in around.body else around.orelse
            if node.id in bound_in_all(block[: block.index(statement)]):
                return None
            statement = around
        return None

    def _made_by_setup(self) -> tuple[dict[str, Made], dict[str, Made]]:
        """The layers of `setup` by attribute, and those in lists that comprehensions make."""
        attributes: dict[str, list[Slot]] = {}
        lists: dict[str, list[Slot]] = {}
        others: set[str] = set()
        for slot in self._method.slots if self._method.is_setup else ():
            name = slot.stored or ""
            if slot.kind == "module" and slot.is_alone:
                attributes.setdefault(name, []).append(slot)
            elif name and not slot.is_alone:
                lists.setdefault(name, []).append(slot)
                others |= set() if self._is_one_loop(slot) else {name}
        made = {name: self._one_of(slots) for name, slots in attributes.items()}
        return made, {n: self._one_of(slots) for n, slots in lists.items() if n not in others}

    def _is_one_loop(self, slot: Slot) -> bool:
        """Whether a slot makes all of a list: `self.layers = [nn.Dense(n) for n in sizes]`."""
        around = self._source.parents[slot.node]
        if not isinstance(around, ast.ListComp) or around.elt is not slot.node:
            return False
        statement = self._source.parents[around]
        is_simple = len(around.generators) == 1 and not around.generators[0].ifs
        blocks = itertools.takewhile(
            lambda each: each is not self._method.node, self._source.ancestors(statement)
        )
        return (
            is_simple
            and isinstance(statement, ast.Assign)
            and is_self(statement.targets[0])
            and all(isinstance(each, ast.If) for each in blocks)
        )

    def _one_of(self, slots: Sequence[Slot]) -> Made:
        """What branches make, of which only one runs."""
        ways = [[*self._source.ancestors(slot.node)] for slot in slots]
        choices = [e for e in ways[0] if isinstance(e, ast.If | ast.IfExp) and e in ways[-1]]
        if len(slots) != 2 or not choices:
            return Made(tuple(slots))
        (choice,) = choices[:1]
        body = choice.body if isinstance(choice.body, list) else [choice.body]
        first = [slot for slot, way in zip(slots, ways, strict=True) if {slot.node, *way} & {*body}]
        if len(first) != 1:
            return Made(tuple(slots))
        rest = [slot for slot in slots if slot is not first[0]]
        return Made((*first, *rest), choice.test)

    def chains(self) -> list[Chain]:
        """The lists of `setup` whose layers pass a size on."""
        found = []
        for group, name in self._chained.items():
            first, passed = self.flow.chains[group]
            text = self._text(first)
            top = min(map(self._top, passed), key=lambda each: each.lineno)
            # Some keep the size.
            texts = {made: self._text(each) for made, each in passed.items()}
            turns = {m: "" if text == name else f"{name} = {text}" for m, text in texts.items()}
            found.append(Chain(top, () if text == name else (f"{name} = {text}",), turns))
        return found

    def _top(self, made: ast.Call) -> ast.stmt:
        """The statement of the method that an expression is in."""
        inside: ast.AST = made
        for each in self._source.ancestors(made):
            if each is self._method.node:
                break
            inside = each
        return inside  # pyright: ignore

    def given_to(
        self, slot: Slot, argument: int | str, sizes: Sequence[tuple[Making, Any]]
    ) -> str | None:
        """The last dimension of what a slot is called with, None if it is not followed.

        `argument` is a position or a name in the call. `sizes` has the dimension for each time that
        the slot ran.
        """
        size = self.flow.inputs.get(slot.node, {}).get(argument)
        if any(self._value(size, making) not in (None, value) for making, value in sizes):
            # One of two arrays that are combined was repeated, for instance.
            return None
        line = self._source.statement_of(slot.node).lineno
        if not self._method.is_setup and self._changes(variables_of(size), slot.node):
            # A layer that is made before its input grows, and called behind that.
            slot.place = self._place_at_call(slot)
            if slot.place is None:
                return None
        chained = [e.made for e in parts_of(size) if isinstance(e, Chained)]
        lists = [self.flow.chains[made].passed for made in chained]
        others = [each for own in lists if slot.node not in own for each in own]
        if any(self._source.statement_of(each).lineno >= line for each in others):
            # A list that is made further down has no size yet.
            return None
        return self._text_of(size)

    def _value(self, size: Any, making: Making) -> Any:
        """What a size was at one time; None where more than the time has to be known."""
        match size:
            case Given(argument=name):
                shape = self._of_call.given_shapes(making).get(name)
                return shape[-1] if shape else None
            case Written(node=node):
                found = self._method.values(node, [making])
                return None if found is None else found[0]
            case Sum() | Part() | Last() | Choice():
                return _value_of(size, [self._value(each, making) for each in size.parts])
        return None

    def _changes(self, variables: set[str], made: ast.Call) -> bool:
        """Whether sizes change between where a layer is made and where it is called first."""
        first = self._source.statement_of(made).lineno
        call = self.flow.called.get(made)
        last = call.lineno if call is not None else first
        return any(
            each.variable in variables and first < each.statement.lineno < last
            for each in self.flow.updates
        )

    def _place_at_call(self, slot: Slot) -> ast.stmt | None:
        """The statement of a layer's first call, if the layer can as well be made there."""
        made, call = self._source.statement_of(slot.node), self.flow.called[slot.node]
        called = self._source.statement_of(call)
        block = next(
            (
                own
                for name in ("body", "orelse", "finalbody")
                if made in (own := getattr(self._source.parents[made], name, ()))
            ),
            (),
        )
        is_plain = isinstance(made, ast.Assign) and made.value is slot.node
        if not is_plain or called not in block:
            return None
        between = block[block.index(made) + 1 : block.index(called)]
        reads = {slot.variable} & set().union(*map(names_in, between))
        return None if reads or bound_in_all(between) & names_in(slot.node) else called

    def number(self, node: ast.expr) -> str | None:
        """What `x.shape[-1]`, or a number that is computed from it, is."""
        return None if self._method.is_setup else self._text_of(self.flow.dimensions.get(node))

    def last_of(self, node: ast.expr) -> str | None:
        """The last dimension of `x.shape`, where it is followed."""
        return None if self._method.is_setup else self._text_of(self.flow.shapes.get(node))

    def has_updates(self, node: ast.AST) -> bool:
        """Whether the constructor sets a variable of its own inside a statement."""
        inside = set(ast.walk(node))
        updates = self.flow.updates if self.names else ()
        own = [e for e in updates if not isinstance(e.size, Each) and e.statement in inside]
        return any(each.variable in self.names for each in own)

    def loop_over(self, target: ast.expr, values: ast.expr) -> Loop | None:
        """The loop over a list of sizes beside one over a list of arrays."""
        if not isinstance(target, ast.Name) or not isinstance(values, ast.Name):
            return None
        wanted = target.id, Each(values.id)
        updates = self.flow.updates if self.names else ()
        if target.id not in self.names or wanted not in [(e.variable, e.size) for e in updates]:
            return None
        return Loop(self.names[target.id], self.names[values.id])

    def updates(self, statement: ast.stmt, *, before: bool) -> list[str]:
        """What the constructor does before or behind a statement, to keep sizes."""
        found: list[str] = []
        for each in self.flow.updates if self.names else ():
            name = self.names.get(each.variable)
            if name is None or each.statement is not statement or each.is_before is not before:
                continue
            if isinstance(each.size, Each):
                continue
            text = self._text(each.size)
            found.append(f"{name}.append({text})" if each.appends else f"{name} = {text}")
        return found

    def _text_of(self, size: Any) -> str | None:
        if not isinstance(size, Size):
            return None
        needed, updates = self._needed(variables_of(size))
        if needed & self.flow.broken:
            return None
        before, chained = dict(self.names), dict(self._chained)
        for variable in sorted(needed):
            self.names.setdefault(variable, self._name_beside(variable))
        try:
            for update in updates:
                self._text(update.size)
            return self._text(size)
        except NotRewritableError:
            self.names, self._chained = before, chained
            return None

    def _needed(self, variables: set[str]) -> tuple[set[str], list[Update]]:
        """The variables that some need, themselves included, and what sets all of them."""
        needed = set(variables)
        while True:
            # What is taken out of a list is gone from it, whoever needs it.
            updates = [
                each
                for each in self.flow.updates
                if each.variable in needed
                or any(
                    isinstance(e, Item) and e.index is None and e.variable in needed
                    for e in parts_of(each.size)
                )
            ]
            more = needed | {u.variable for u in updates}
            more |= set().union(set(), *(variables_of(each.size) for each in updates))
            if more == needed:
                return needed, updates
            needed = more

    def _name_beside(self, variable: str) -> str:
        taken = {field.name for field in self._plan.fields}
        taken |= self._method.taint.pure | self._method.taint.names
        taken |= {*self._plan.sizes, *self.names.values(), *self._chained.values()}
        taken |= {each.name for each in self._method.sizes.running}
        own = [each for each in self.flow.updates if each.variable == variable]
        is_list = any(isinstance(each.size, List | Each) for each in own)
        names = [f"{variable}_features", f"{variable}_size", f"{variable}_size_2"]
        if variable.endswith("_in"):
            names.insert(0, variable)
        if not is_list and not (variable.endswith("_in") and not self._method.is_setup):
            names.insert(0, "features_in")
        return next(name for name in names if name not in taken)

    def _text(self, size: Any) -> str:
        """A size as the constructor computes it.

        Raises NotRewritableError if it needs what only the call knows.
        """
        text = self._method.init_text
        match size:
            case Given(argument=name):
                return self._last_given(name)
            case Written(node=ast.Constant() as node):
                # The default of a field may be in another file.
                return ast.unparse(node)
            case Written(node=node, makings=makings):
                return text(node, makings)
            case Part(parts=(whole,), count=count):
                return _part(self._text(whole), count)
            case Last(parts=(sequence,)):
                return f"{operand(self._text(sequence), ast.Subscript)}[-1]"
            case Kept(variable=variable) | Each(variable=variable):
                return self.names[variable]
            case Item(variable=variable, index=index):
                taken = ".pop()" if index is None else f"[{text(index, ())}]"
                return f"{self.names[variable]}{taken}"
            case Total(variable=variable):
                return f"sum({self.names[variable]})"
            case Sum(parts=parts):
                return " + ".join(operand(self._text(each), _SUM) for each in parts)
            case Computed(node=node, parts=parts, places=places, source=source):
                pairs = zip(places, parts, strict=True)
                texts = [(e, operand(self._text(own), type(source.parents[e]))) for e, own in pairs]
                edits = [source.edit(each, own) for each, own in texts]
                if source is self._source:
                    known = [e for e in ast.iter_child_nodes(node) if e not in places]
                    edits += [edit for each in known for edit in self._known_edits(each)]
                found = source.render(node, edits)
                if any(
                    isinstance(ast.parse(own, mode="eval").body, ast.Constant) for _, own in texts
                ):
                    found = _folded(found)
                self._method.used |= self._method.names_of(found)
                return found
            case Chained(made=made):
                first, passed = self.flow.chains[made]
                known = self._chained.get(first.made) if isinstance(first, Chained) else None
                if made not in self._chained:
                    self._text(first)
                    own = next(slot for slot in self._method.slots if slot.node is made)
                    self._chained[made] = known or self._name_beside(f"{own.attribute}_in")
                    for each in passed.values():
                        self._text(each)
                return self._chained[made]
            case Choice(parts=(test, then, otherwise)):
                asked = self._text(test)
                if asked in ("True", "False"):
                    return self._text(then if asked == "True" else otherwise)
                chosen, asked = (operand(each, ast.IfExp) for each in (self._text(then), asked))
                return f"{chosen} if {asked} else {self._text(otherwise)}"
        return f"[{', '.join(map(self._text, size.parts))}]"

    def _known_edits(self, node: ast.AST) -> Iterator[Edit]:
        """What changes in an expression that a constructor knows."""
        yield from self._method.references.edits(node)
        yield from self._method.init_edits(node, ())

    def _last_given(self, name: str) -> str:
        """The constructor argument for the last dimension of an argument of the call."""
        owners = {(m.run, m.owner): m for slot in self._method.slots for m in slot.makings}
        found = [(m, self._of_call.given_shapes(m).get(name)) for m in owners.values()]
        if not found or not all(shape for _, shape in found):
            raise NotRewritableError("needs-call", self._method.node, name=name)
        makings: Sequence[Making] = [making for making, _ in found]
        values = [shape[-1] for _, shape in found if shape]
        return self._method.sizes.last_of_argument(name, makings, values)

    def _returned_by(self, slot: Slot) -> tuple[Size, list[str]] | None:
        """What the call of a class of the program returns, in its own words."""
        method = self._method
        classes = {method.program.records.base_of(making.cls) for making in slot.makings}
        plan = method.program.plan_of(next(iter(classes))) if len(classes) == 1 else None
        call = plan.call if plan is not None else None
        if plan is None or call is None or plan is self._plan or plan.layer is not None:
            return None
        if plan.returns is None:
            # A class may make itself.
            plan.returns = ()
            namespace = vars(sys.modules[plan.cls.__module__])
            references = References(method.program, plan.source, namespace)
            made_in = plan.methods.get("setup", call)
            other = type(method)(method.program, plan, made_in, references, method.made_by)
            plan.returns = tuple(other.kept.flow.returned)
        found = plan.returns
        is_one = bool(found) and all(is_same(each, found[0]) for each in found)
        return (found[0], plan.call_arguments) if is_one and isinstance(found[0], Size) else None

    def _is_function(self, slot: Slot) -> bool:
        plan = called_function(self._method.program, slot)
        return plan is not None and plan.call is not None

    def _argument(self, slot: Slot, field: str) -> ast.expr | None:
        """What the constructor in a slot is given for a field; a constant that is its default."""
        node, making = slot.constructor, slot.makings[0]
        bound = self._candidates.partial_behind(node.func, making)
        keywords = [*node.keywords, *(bound.keywords if bound is not None else ())]
        for keyword in keywords:
            if keyword.arg == field:
                return keyword.value
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        function = making.env.get(name, self._method.references.value_of(node.func))
        if bound is None and isinstance(function, functools.partial):
            # What is bound in another place is not known here.
            return None
        program = self._method.program
        cls = program.records.base_of(making.cls)
        plan = program.plan_of(cls)
        if cls is None or plan is None or any(k.arg is None for k in keywords):
            return None
        arguments = [*(bound.args[1:] if bound is not None else ()), *node.args]
        given = dict(zip(field_order(cls), arguments, strict=False))
        if field in given or any(isinstance(each, ast.Starred) for each in arguments):
            return given.get(field)
        own = next((each for each in plan.fields if each.name == field), None)
        default = own.node.value if own is not None else None
        return default if isinstance(default, ast.Constant) else None


def _value_of(size: Sum | Part | Last | Choice, values: Sequence[Any]) -> Any:
    """What a size is that is made of sizes with these values; None where more has to be known."""
    match size, values:
        case Sum(), _:
            return None if None in values else sum(values)
        case Part(count=count), [int() as whole]:
            return whole // count
        case Last(), [tuple() | list() as sequence] if sequence:
            return sequence[-1]
        case Choice(), [test, then, otherwise] if test is not None:
            return then if test else otherwise
    return None


def _part(text: str, count: int) -> str:
    """An equal part of a size: of `2 * n`, one of two is `n`."""
    node = ast.parse(text, mode="eval").body
    if isinstance(node, ast.Constant):
        return repr(node.value // count)  # pyright: ignore
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        for factor, other in ((node.left, node.right), (node.right, node.left)):
            if isinstance(factor, ast.Constant) and factor.value == count:
                return ast.unparse(other)
    return f"{operand(text, ast.BinOp)} // {count}"


def _folded(text: str) -> str:
    """An expression with constants in the place of fields: `None or n` is `n`."""
    return ast.unparse(_Folding().visit(ast.parse(text, mode="eval")))


class _Folding(ast.NodeTransformer):
    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        self.generic_visit(node)
        if isinstance(node.op, ast.Or):
            node.values = [e for e in node.values[:-1] if not is_none(e)] + node.values[-1:]
        return node if len(node.values) > 1 else node.values[0]

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        self.generic_visit(node)
        test = node.test
        if isinstance(test, ast.Constant) and isinstance(test.value, bool):
            return node.body if test.value else node.orelse
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        self.generic_visit(node)
        match node:
            case ast.Compare(
                left=ast.Constant(value=value),
                ops=[ast.Is() | ast.IsNot() as comparison],
                comparators=[ast.Constant(value=None)],
            ):
                return ast.Constant((value is None) == isinstance(comparison, ast.Is))
        return node
