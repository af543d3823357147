"""NNX modules that are generated, and that change themselves when they are called.

A module is made of a spec, nested tuples. What a call does to it is a sequence of changes; each
finds its target among what is there at that moment, in the order of the paths, so a native module
and a wrapped one do the same.
"""

import jax.numpy as jnp
from flax import nnx
from hypothesis import strategies as st

TYPES = {"cache": nnx.Cache, "stat": nnx.BatchStat, "other": nnx.Variable}
CONTAINERS = ("node", "list", "dict", "plain list", "plain dict")


def made(spec):
    """What a spec stands for."""
    kind, content = spec
    if kind in TYPES:
        return TYPES[kind](jnp.float32(content))
    if kind == "array":
        return jnp.float32(content)
    if kind == "none":
        return None
    if kind == "node":
        return Node(content)
    if kind == "list":
        return nnx.List([nnx.data(made(child)) for child in content])
    if kind == "plain list":
        return [made(child) for child in content]
    items = {f"k{i}": made(child) for i, child in enumerate(content)}
    if kind == "plain dict":
        return items
    return nnx.Dict({key: nnx.data(item) for key, item in items.items()})


class Node(nnx.Module):
    """An object with children, and a count in a Python attribute."""

    def __init__(self, children):
        self.count = 0
        for i, child in enumerate(children):
            setattr(self, f"a{i}", nnx.data(made(child)))


class Changing(Node):
    """A module that a call changes; its output depends on all of its state."""

    def __init__(self, children, changes):
        super().__init__(children)
        self.changes = changes

    def __call__(self, x):
        for name, at in self.changes:
            CHANGES[name](self, at, x)
        output = x
        for weight, (_, _, value) in enumerate(places(self)):
            if isinstance(value, nnx.Variable) and not isinstance(value, nnx.Intermediate):
                output = output + (weight + 1) * value[...]
            elif isinstance(value, jnp.ndarray):
                output = output + (weight + 1) * value
            elif isinstance(value, Node):
                output = output + (weight + 1) * value.count
        return output + 1000 * self.count


def places(root):
    """(parent, key, value) of everything below a module, in the order of the paths."""
    found = []
    if isinstance(root, nnx.Pytree):
        own = {"count", "changes", "_length"}
        items = {k: v for k, v in vars(root).items() if k not in own and k[:7] != "_pytree"}
    elif isinstance(root, dict):
        items = root
    elif isinstance(root, list):
        items = dict(enumerate(root))
    else:
        return found
    for key in sorted(items, key=lambda k: (len(str(k)), str(k))):
        found.append((root, key, items[key]))
        found += places(items[key])
    return found


def put(parent, key, value):
    if isinstance(parent, nnx.Pytree):
        setattr(parent, key, nnx.data(value))
    else:
        parent[key] = value


def chosen(root, at, wanted):
    """One of the places that are wanted, None if there are none."""
    found = [place for place in places(root) if wanted(place[2])]
    return found[at % len(found)] if found else None


def is_variable(value):
    return isinstance(value, nnx.Variable) and not isinstance(value, nnx.Intermediate)


def set_value(root, at, x):
    if place := chosen(root, at, is_variable):
        place[2].set_value(place[2][...] + x)


def replace_variable(root, at, x):
    if place := chosen(root, at, is_variable):
        parent, key, value = place
        put(parent, key, value.var_type(value[...] * 2 + x))


def replace_type(root, at, x):
    if place := chosen(root, at, is_variable):
        parent, key, value = place
        other = nnx.BatchStat if value.var_type is nnx.Cache else nnx.Cache
        put(parent, key, other(value[...] + 1))


def swap(root, at, x):
    found = [place for place in places(root) if is_variable(place[2])]
    if len(found) > 1:
        (parent, key, value), (other, other_key, other_value) = found[at % len(found)], found[-1]
        put(parent, key, other_value)
        put(other, other_key, value)


def share(root, at, x):
    found = [place for place in places(root) if is_variable(place[2])]
    if found:
        put(root, "shared", found[at % len(found)][2])


def replace_array(root, at, x):
    if place := chosen(root, at, lambda v: isinstance(v, jnp.ndarray)):
        put(place[0], place[1], place[2] + x)


def replace_node(root, at, x):
    if place := chosen(root, at, lambda v: isinstance(v, Node)):
        put(place[0], place[1], Node((("cache", 3), ("list", (("stat", 4),)))))


def fill_none(root, at, x):
    if place := chosen(root, at, lambda v: v is None):
        put(place[0], place[1], nnx.Cache(x + 1))


def add_variable(root, at, x):
    if place := chosen(root, at, lambda v: isinstance(v, Node | nnx.List | nnx.Dict | dict | list)):
        add(place[2], nnx.Cache(x + 2))
    else:
        add(root, nnx.Cache(x + 2))


def add_node(root, at, x):
    if place := chosen(root, at, lambda v: isinstance(v, Node | nnx.List | nnx.Dict | dict | list)):
        add(place[2], Node((("stat", 5),)))
    else:
        add(root, Node((("stat", 5),)))


def add(parent, value):
    if isinstance(parent, nnx.List | list):
        parent.append(value)
    else:
        keys = vars(parent) if isinstance(parent, nnx.Pytree) else parent
        put(parent, next(k for i in range(99) if (k := f"n{i}") not in keys), value)


def remove(root, at, x):
    # Flax 0.12.8 moves the items of an `nnx.List` with `del`, and leaves the last one behind.
    found = [
        place
        for place in places(root)
        if not isinstance(place[2], nnx.Intermediate) and not isinstance(place[0], nnx.List)
    ]
    if found:
        parent, key, _ = found[at % len(found)]
        if isinstance(parent, nnx.Pytree):
            delattr(parent, key)
        else:
            del parent[key]


def count(root, at, x):
    place = chosen(root, at, lambda v: isinstance(v, Node))
    node = place[2] if place else root
    node.count += 1


def sow(root, at, x):
    place = chosen(root, at, lambda v: isinstance(v, Node))
    (place[2] if place else root).sow(nnx.Intermediate, "sown", x)


CHANGES = {
    change.__name__: change
    for change in (
        set_value,
        replace_variable,
        replace_type,
        swap,
        share,
        replace_array,
        replace_node,
        fill_none,
        add_variable,
        add_node,
        remove,
        count,
        sow,
    )
}
# Leaves at their addresses tell these.
TOLD = ("set_value", "replace_variable", "replace_array", "fill_none", "add_variable", "sow")
# Nothing is created by these.
UNMAKING = (
    "set_value",
    "replace_variable",
    "replace_type",
    "swap",
    "replace_array",
    "remove",
    "count",
    "sow",
)

_leaves = st.tuples(st.sampled_from([*TYPES, "array", "none"]), st.integers(0, 9))
_specs = st.recursive(
    _leaves,
    lambda inner: st.tuples(st.sampled_from(CONTAINERS), st.lists(inner, max_size=3).map(tuple)),
    max_leaves=6,
)
modules = st.lists(_specs, max_size=4).map(tuple)


def changes(names=tuple(CHANGES)):
    """Sequences of changes, each with a number that picks its target."""
    change = st.tuples(st.sampled_from(names), st.integers(0, 5))
    return st.lists(change, min_size=1, max_size=4).map(tuple)
