"""Lifted transforms around a layer: NNX's transforms in the constructor and around the calls."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
from flax import linen as nn

from ._paths_below import below
from ._plans import LeftLinenError, Slot
from ._records import Lifted
from ._source import names_in

if TYPE_CHECKING:
    from ._method import Method

_DEFAULTS: dict[str, dict[str, Any]] = {
    "remat": {"variables": True, "rngs": True, "concrete": False, "methods": None},
    "jit": {
        "variables": True,
        "rngs": True,
        "donate_argnums": (),
        "device": None,
        "backend": None,
        "methods": None,
        "static_argnames": (),
    },
    "scan": {
        "variable_carry": False,
        "data_transform": None,
        "methods": None,
    },
    "vmap": {"methods": None},
}
PASSED = {
    "remat": {"prevent_cse": True, "policy": None},
    "jit": {},
    "scan": {"reverse": False, "unroll": 1},
    "vmap": {"axis_name": None, "spmd_axis_name": None},
}
STACKS = {"scan": "length", "vmap": "axis_size"}


class Lift:
    """What a layer under lifted transforms becomes.

    Args:
        method: the method that makes it.
        slot: where it is made.

    Raises:
        LeftLinenError: NNX's transforms do not do the same.
    """

    def __init__(self, method: Method, slot: Slot) -> None:
        self.method, self.slot = method, slot
        records = method.program.records
        chains = [records.chain(making.cls) for making in slot.makings]
        longest = max(chains, key=len)
        kinds = {tuple(each.kind for each in chain) for chain in chains}
        if kinds - {tuple(each.kind for each in longest), ()}:
            raise LeftLinenError("lifted transforms that are not always the same", slot.node)
        self.is_always = () not in kinds
        self.chain: Sequence[Lifted] = longest
        if not self.is_always and any(each.kind in STACKS for each in longest):
            raise LeftLinenError("layers that are sometimes stacked", slot.node)
        for each in longest:
            self._check(each)
        plan = method.program.plan_of(longest[-1].target)
        if plan is not None and plan.wraps:
            raise LeftLinenError("a transform around what stays Linen", slot.node)
        self.cls = self._name(longest[-1].target)
        self.is_put = False
        """Whether NNX's transforms are around its calls."""
        self.test = None if self.is_always else self._test()

    def _check(self, lifted: Lifted) -> None:
        options = lifted.options
        for name, default in _DEFAULTS[lifted.kind].items():
            if options.get(name, default) not in (default, None):
                raise LeftLinenError(f"nn.{lifted.kind} with {name}", self.slot.node)
        if lifted.is_stacking:
            axes = dict(options["variable_axes"])
            if axes.get("params") != 0 or any(axis != 0 for axis in axes.values()):
                raise LeftLinenError(
                    f"nn.{lifted.kind} whose parameters have no axis 0 of their own",
                    self.slot.node,
                )
        elif lifted.kind in STACKS and (options["split_rngs"] or {}).get("params"):
            raise LeftLinenError(f"nn.{lifted.kind} of layers that it gives up", self.slot.node)
        elif lifted.kind == "vmap" or (
            lifted.kind == "scan" and options["variable_broadcast"] != "params"
        ):
            raise LeftLinenError(f"nn.{lifted.kind} without variable_axes", self.slot.node)
        if options.get("metadata_params"):
            self.metadata(lifted)

    def metadata(self, lifted: Lifted) -> str:
        """What NNX's transform is told of the new axis.

        Raises:
            LeftLinenError: it is more than a name.
        """
        given = dict(lifted.options["metadata_params"])
        if set(given) != {nn.PARTITION_NAME} or not isinstance(given[nn.PARTITION_NAME], str):
            raise LeftLinenError(f"nn.{lifted.kind} with other metadata", self.slot.node)
        return f"transform_metadata={{nnx.PARTITION_NAME: {given[nn.PARTITION_NAME]!r}}}"

    def _name(self, cls: type) -> str:
        """What the class is called in the file."""
        references = self.method.references
        own = next((n for n, value in self.method.namespace.items() if value is cls), None)
        if own is None:
            own = next(
                (
                    ast.unparse(node)
                    for node in ast.walk(self.method.node)
                    if isinstance(node, ast.Attribute) and references.value_of(node) is cls
                ),
                None,
            )
        if own is None:
            raise LeftLinenError(f"{cls.__name__} has no name in this file", self.slot.node)
        node = ast.parse(own, mode="eval").body
        return references.text(node) or own

    def _call(self, lifted: Lifted) -> ast.Call | None:
        """The call of the transform, if it is in the method's file."""
        site = lifted.site
        if site is None or site.file != self.method.source.file:
            return None
        return self.method.source.call_at(site.span)

    def keyword(self, lifted: Lifted, name: str) -> ast.expr | None:
        """The expression of an option."""
        call = self._call(lifted)
        return next((k.value for k in call.keywords if k.arg == name), None) if call else None

    def _test(self) -> str:
        """The condition under which the transforms are there."""
        source = self.method.source
        before: ast.AST | None = self._call(self.chain[0])
        if before is None:
            raise LeftLinenError("a transform whose condition is not seen", self.slot.node)
        for each in source.ancestors(before):
            if each is self.method.node:
                break
            if isinstance(each, ast.If | ast.IfExp):
                body = each.body if isinstance(each.body, list) else [each.body]
                text = self.method.call_text(each.test)
                return text if before in body else f"not ({text})"
            before = each
        raise LeftLinenError("a transform whose condition is not seen", self.slot.node)

    def constructor(self, made: str) -> str:
        """The expression that makes the layers.

        Args:
            made: the expression that makes one.
        """
        for each in reversed(self.chain):
            if each.is_stacking:
                options = ""
                if each.options.get("metadata_params"):
                    options = f", {self.metadata(each)}"
                made = f"nnx.vmap(lambda rngs: {made}{options})(rngs.split({self._length(each)}))"
        return made

    def _length(self, lifted: Lifted) -> str:
        name = STACKS[lifted.kind]
        node = self.keyword(lifted, name)
        inside = node is not None and self.method.node in self.method.source.ancestors(node)
        if node is not None and inside:
            return self.method.init_text(node, self.slot.makings)
        value = lifted.options.get(name)
        if isinstance(value, int):
            return repr(value)
        slot, records = self.slot, self.method.program.records
        values = []
        for making in slot.makings:
            path = making.path or ()
            inside = below(
                records.variables[making.run], path, records.axes_above(making.run, path) - 1
            )
            values.append(jax.tree.leaves(inside)[0].shape[0])
        return self.method.solve(slot.makings, values, name, slot.loops, slot.node)

    def reads(self) -> set[str]:
        """The names that the call needs besides."""
        found: set[str] = set()
        for each in self.chain:
            call = self._call(each)
            for keyword in call.keywords if call is not None else ():
                if keyword.arg in PASSED[each.kind]:
                    found |= names_in(keyword.value)
        if self.test is not None:
            found |= names_in(ast.parse(self.test, mode="eval"))
        return found
