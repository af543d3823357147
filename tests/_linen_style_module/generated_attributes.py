"""Classes with attributes of every kind and of every name, on Linen's, the peer's and this base."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.nnx import bridge as peer
from hypothesis import strategies as st

import bridge

X = np.array([[1.0, 2.0, 3.0], [-1.0, 0.5, 2.0]], np.float32)
INIT = nn.initializers.normal(0.5)
BASES = {nn: nn.Module, peer: peer.Module, bridge: bridge.Module}

# Linen's own members cannot be fields, and an assignment in `setup` breaks Linen with most of them.
_OF_LINEN = {n for n in dir(nn.Module) if n[0] != "_"}
_OF_NNX = {n for kind in (bridge.Module, peer.Module) for n in dir(kind) if n[0] != "_"}
_OWN = {n for n in dir(bridge.Module) if n.startswith("bridge__")}
_OWN |= {"attr_priorities", "path", "scope", "variables"}
PLAIN = ("layers", "features", "blocks", "gain", "x0", "_hidden", "layers_0")
ASSIGNED = sorted({*PLAIN} | (_OF_NNX - _OF_LINEN - _OWN))
DECLARED = sorted({*ASSIGNED, *_OF_LINEN, *_OF_NNX, "name"} - _OWN)


class Part(NamedTuple):
    """Something that a generated module has.

    Attributes:
      kind: `plain`, `array`, `none`; `leaf`, `flax`, `block` (a submodule), `list`, `dict` (of
        leaves), `alias` (an earlier submodule), `mixed` (a list with an earlier submodule);
        `param`, `renamed` (a parameter of another name), `tree` (one whose value is nested),
        `state` (a variable).
      name: the attribute or the variable.
      value: a number that the part is made with.
      block: the module, if it is one.
    """

    kind: str
    name: str
    value: int = 1
    block: Any = None


class Block(NamedTuple):
    """A generated class and how it is constructed.

    Attributes:
      fields: (part, whether the field has a default, whether it is left out by the caller).
      members: names that the class has, as `name = None`.
      setup: what `setup` assigns.
      compact: what the compact method declares; parts without a name get Linen's.
    """

    fields: tuple[tuple[Part, bool, bool], ...]
    members: tuple[str, ...]
    setup: tuple[Part, ...]
    compact: tuple[Part, ...]


SUBMODULES = ("leaf", "flax", "list", "dict", "block")


@st.composite
def blocks(draw, *, depth=2):
    """Generates a Block that Linen accepts."""
    numbers = st.integers(1, 3)

    def part(kinds, names):
        kind = draw(st.sampled_from(kinds))
        block = draw(blocks(depth=depth - 1)) if kind == "block" else None
        return Part(kind, names, draw(numbers), block)

    nested = ("block",) if depth > 1 else ()
    names = draw(st.lists(st.sampled_from(ASSIGNED), max_size=6, unique=True))
    count = draw(st.integers(0, len(names)))
    fields, held = [], False
    for name in names[:count]:
        kinds = ("plain", "none", "leaf", "flax", "list", "dict") + ("alias", "mixed") * held
        made = part(kinds, name)
        held = held or made.kind in SUBMODULES
        has_default = draw(st.booleans())
        is_left = has_default and made.kind == "plain" and draw(st.booleans())
        fields.append((made, has_default, is_left))
    # Fields without a default come first, so a submodule may no longer be an earlier one.
    fields.sort(key=lambda field: field[1])
    first = next((i for i, field in enumerate(fields) if field[0].kind in SUBMODULES), 9)
    fields[:first] = [
        (made._replace(kind="leaf") if made.kind in ("alias", "mixed") else made, *rest)
        for made, *rest in fields[:first]
    ]
    assigned = []
    for name in names[count:]:
        kinds = ("plain", "array", "leaf", "flax", "list", "dict", "param", "renamed", "tree")
        made = part((*kinds, *nested) + ("alias", "mixed") * held, name)
        held = held or made.kind in SUBMODULES
        assigned.append(made)
    members = [name for name in names[count:] if draw(st.booleans())]
    free = [name for name in DECLARED if name not in _taken(fields, assigned)]
    declared = []
    for name in draw(st.lists(st.sampled_from(free), max_size=3, unique=True)):
        kinds = ("leaf", "leaf", "param", "tree", "state", *nested)
        declared.append(part(kinds, draw(st.sampled_from([name, name, ""]))))
    declared = [
        p if p.name or p.kind in ("leaf", "block") else p._replace(name=f"v{index}")
        for index, p in enumerate(declared)
    ]
    return Block(tuple(fields), tuple(members), tuple(assigned), tuple(declared))


def _taken(fields, assigned):
    """The names of submodules and variables that fields and `setup` make in Linen."""
    taken = set()
    for made in (*(field[0] for field in fields), *assigned):
        if made.kind in ("leaf", "flax", "block", "param", "tree"):
            taken.add(made.name)
        elif made.kind == "renamed":
            taken.add(f"{made.name}_param")
        elif made.kind in ("list", "mixed"):
            taken |= {f"{made.name}_0", f"{made.name}_1"}
        elif made.kind == "dict":
            taken |= {f"{made.name}_a", f"{made.name}_b_0"}
    return taken


@functools.cache
def leaf(b):
    """The class of the submodules at the bottom."""

    class Leaf(BASES[b]):
        factor: float = 1.0

        @b.compact
        def __call__(self, x):
            return jnp.tanh(x * self.factor * jnp.asarray(self.param("w", INIT, (1, 3))))

    return Leaf


def made_of(part, b, held, **kwargs):
    """What a part is, but for parameters; `held` are the submodules so far."""
    kind, number = part.kind, part.value
    make = leaf(b)
    if kind in ("leaf", "list", "dict"):
        one = make(factor=float(number), **kwargs)
        if kind == "leaf":
            return one
        other = make(factor=0.5, **kwargs)
        return [one, other] if kind == "list" else {"a": one, "b": [other, number]}
    if kind == "flax":
        return nn.Dense(3, **kwargs)
    if kind == "block":
        return model(part.block, b, **kwargs)
    if kind == "alias":
        return held[number % len(held)]
    if kind == "mixed":
        return [held[number % len(held)], make(factor=float(number), **kwargs)]
    return {"plain": number, "array": jnp.full((1, 3), 1.0 * number), "none": None}[kind]


def submodules(value):
    """The modules in what an attribute holds."""
    if isinstance(value, list | tuple):
        return [module for item in value for module in submodules(item)]
    if hasattr(value, "items") and not callable(value):
        return [module for _, item in sorted(value.items()) for module in submodules(item)]
    return [value] if callable(value) else []


def used(value, x):
    """A vector that depends on all of what an attribute holds."""
    for module in submodules(value):
        x = module(x)
    if value is None or submodules(value):
        return x
    return x * sum(jnp.asarray(item) for item in jax.tree.leaves(value))


def tree(number):
    return {"a": jnp.ones((1, 3)) * number, "b": {"c": (jnp.ones((1, 3)),)}}


def declared(self, part, name):
    if part.kind == "tree":
        return self.param(name, lambda key: tree(part.value))
    return self.param(name, INIT, (1, 3))


@functools.cache
def class_of(block, b):
    """The class of a Block; equal blocks have one class, as in a program."""

    def setup(self):
        held = [m for part, _, _ in block.fields for m in submodules(getattr(self, part.name))]
        for part in block.setup:
            if part.kind in ("param", "renamed", "tree"):
                name = f"{part.name}_param" if part.kind == "renamed" else part.name
                setattr(self, part.name, declared(self, part, name))
            else:
                value = made_of(part, b, held)
                setattr(self, part.name, value)
                if part.kind not in ("plain", "array"):
                    held += submodules(getattr(self, part.name))

    def call(self, x):
        for part in (*(field[0] for field in block.fields), *block.setup):
            value = getattr(self, part.name)
            x = used(value.get_value() if hasattr(value, "get_value") else value, x)
        for part in block.compact:
            name = {"name": part.name} if part.name else {}
            if part.kind in ("leaf", "block"):
                x = made_of(part, b, (), **name)(x)
            elif part.kind == "state":
                state = self.variable("stats", part.name, lambda: jnp.zeros((1, 3)))
                if not self.is_initializing():
                    state.value = state.value + part.value
                x = x + state.value
            else:
                value = declared(self, part, part.name)
                x = used(value.get_value() if hasattr(value, "get_value") else value, x)
        return x

    space: dict[str, Any] = dict.fromkeys(block.members)
    space["__annotations__"] = {part.name: Any for part, _, _ in block.fields}
    for part, has_default, _ in block.fields:
        if has_default:
            space[part.name] = part.value if part.kind == "plain" else None
    space |= {"setup": setup, "__call__": b.compact(call), "__module__": __name__}
    return type(BASES[b])("Generated", (BASES[b],), space)


def model(block, b, **kwargs):
    """The model of a Block."""
    held: list[Any] = []
    values = {}
    outside = {} if "parent" in kwargs else {"parent": None}
    for part, _, is_left in block.fields:
        if not is_left:
            values[part.name] = made_of(part, b, held, **(outside if b is not peer else {}))
            held += [] if part.kind in ("plain", "none") else submodules(values[part.name])
    return class_of(block, b)(**values, **kwargs)
