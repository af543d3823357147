"""Hypothesis strategies for Linen variables and NNX States, and the one exact comparison of them.

`exact` describes any tree by plain Python values: two trees are the same exactly if their
descriptions are equal, and a description taken before a call tells afterwards whether the call
altered its argument.

Each strategy is made once, because hypothesis takes longer to validate one than to draw from it.
"""

import dataclasses
import functools
from collections.abc import Mapping

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, struct
from flax.core import FrozenDict, freeze, meta
from hypothesis import strategies as st

import bridge
import registry


def exact(tree):
    """A tree as plain values: container types, key types, boxes and their fields, bits of arrays.

    The order of a mapping's keys is left out, and of a Variable's metadata `eager_sharding`: it
    says how a Variable was made, and a conversion never shards.
    """
    if isinstance(tree, nnx.Variable):
        metadata = {k: v for k, v in tree.get_metadata().items() if k != "eager_sharding"}
        return "Variable", tree.var_type, exact(stored_value(tree)), exact(metadata)
    if isinstance(tree, Mapping):
        return type(tree), {(type(k), k): exact(v) for k, v in tree.items()}
    if isinstance(tree, meta.AxisMetadata):
        return type(tree), {name: exact(value) for name, value in _fields(tree).items()}
    if isinstance(tree, tuple | list):
        return type(tree), [exact(item) for item in tree]
    if isinstance(tree, jax.Array | np.ndarray | np.generic):
        return _array(tree)
    if isinstance(tree, float):
        return float, tree.hex()
    return type(tree), tree


def stored_value(variable):
    """What a Variable holds, without its get hooks and out of its reference."""
    value = variable.get_raw_value()
    return value[...] if variable.ref else value


def thawed(variables):
    """Variables with plain dicts for every mapping that is not inside a leaf."""
    if isinstance(variables, Mapping):
        return {key: thawed(value) for key, value in variables.items()}
    return variables


def _fields(box):
    if dataclasses.is_dataclass(box):
        return {f.name: getattr(box, f.name) for f in dataclasses.fields(box)}
    return dict(vars(box))


def _array(array):
    if isinstance(array, jax.core.Tracer):
        return "traced", id(array)
    kind = jax.Array if isinstance(array, jax.Array) else type(array)
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        implementation = str(jax.random.key_impl(array))
        return kind, implementation, array.shape, np.asarray(jax.random.key_data(array)).tobytes()
    weak = getattr(array, "weak_type", False)
    return kind, str(array.dtype), array.shape, weak, np.asarray(array).tobytes()


class Documented(struct.PyTreeNode, meta.AxisMetadata):
    """A dataclass box whose value has another name than `value`."""

    content: object
    author: str = struct.field(pytree_node=False)
    axes: tuple = struct.field(pytree_node=False, default=())

    def unbox(self):
        return self.content

    def replace_boxed(self, val):
        return self.replace(content=val)

    def add_axis(self, index, params):
        return self.replace(axes=(*self.axes[:index], "new", *self.axes[index:]))

    def remove_axis(self, index, params):
        return self.replace(axes=(*self.axes[:index], *self.axes[index + 1 :]))


@jax.tree_util.register_pytree_node_class
class Sealed(meta.AxisMetadata):
    """A box that is no dataclass; its codec is registered below."""

    def __init__(self, secret, seal):
        self.secret = secret
        self.seal = seal

    def unbox(self):
        return self.secret

    def replace_boxed(self, val):
        return Sealed(val, self.seal)

    def add_axis(self, index, params):
        return self

    def remove_axis(self, index, params):
        return self

    def tree_flatten(self):
        return (self.secret,), self.seal

    @classmethod
    def tree_unflatten(cls, seal, children):
        return cls(*children, seal)


registry.register_box(
    Sealed,
    lambda box: (box.secret, {"seal": box.seal}),
    lambda value, fields: Sealed(value, fields["seal"]),
)


class Unregistered(nnx.Variable):
    """Goes to the collection named after it."""


class UnregisteredParam(nnx.Param):
    """Does not go to `params`, which is its parent's."""


@registry.register_variable_name("tests_strategies_registered")
class Registered(nnx.Variable):
    """Goes to a collection with another name than its own."""


VARIABLE_TYPES = (
    nnx.Param,
    nnx.BatchStat,
    nnx.Cache,
    nnx.Intermediate,
    nnx.Perturbation,
    nnx.Variable,
    nnx.LoRAParam,
    nnx.RngKey,
    nnx.RngCount,
    Unregistered,
    UnregisteredParam,
    Registered,
    registry.auto.tests_counter,
)
# Names that Flax knows, names of types with and without a collection of another name, names that
# nobody knows, one that is also a key below, and the one for arrays without a Variable.
COLLECTIONS = (
    "params",
    "batch_stats",
    "cache",
    "intermediates",
    "perturbations",
    "Param",
    "RngKey",
    "LoRAParam",
    "Unregistered",
    "tests_strategies_registered",
    "tests_counter",
    "a.b/c d",
    "w",
    "nnx_arrays",
)
# Few, so that collections meet; some are collections, some look alike.
KEYS = ("kernel", "w", "Dense_0", "params", "batch_stats", "tests_counter", "", "1", 0, 1, 10)


def on_read(variable, value):
    """A hook."""
    return value


def on_axis(variable, index, name):
    """A hook."""


@functools.cache
def _mesh():
    return jax.sharding.Mesh(np.array(jax.devices()), ("data",))


@functools.cache
def _arrays():
    rng = np.random.default_rng(0)
    dtypes = (jnp.float32, jnp.bfloat16, jnp.int32, jnp.uint8, jnp.bool_, jnp.complex64)
    shapes = ((), (0, 2), (3,), (2, 3))
    made = [
        jnp.asarray(rng.normal(size=shape) * 3, dtype)
        for dtype, shape in zip(dtypes, shapes * 2, strict=False)
    ]
    return (
        *made,
        jnp.array([jnp.nan, -0.0, jnp.inf]),
        jnp.asarray(1.5),  # weakly typed
        np.arange(3, dtype=np.int16),
        np.float32(2.5),
    )


@functools.cache
def _keys():
    return (
        jax.random.key(0),
        jax.random.key(1, impl="rbg"),
        jax.random.split(jax.random.key(2), 3),
        jax.random.PRNGKey(3),
    )


@functools.cache
def _abstract():
    return (
        jax.ShapeDtypeStruct((2, 3), jnp.float32),
        jax.ShapeDtypeStruct((), jnp.int32),
        jax.eval_shape(lambda: jax.random.key(0)),
    )


@functools.cache
def arrays():
    """Arrays of several dtypes and shapes, PRNG keys of both kinds, NumPy arrays and scalars."""
    return st.deferred(lambda: st.sampled_from((*_arrays(), *_keys())))


@functools.cache
def abstract_arrays():
    """Arrays of which only shape and dtype are known."""
    return st.deferred(lambda: st.sampled_from(_abstract()))


@functools.cache
def leaves():
    """What Linen takes for one leaf: anything but a mapping and a box."""
    single = st.one_of(
        arrays(),
        abstract_arrays(),
        st.none(),
        st.integers(-3, 3),
        st.floats(),
        st.text(max_size=2),
    )
    sown = st.lists(arrays(), max_size=3).map(tuple)
    nested = st.recursive(
        single,
        lambda inner: st.one_of(
            st.lists(inner, max_size=2),
            st.lists(inner, max_size=2).map(tuple),
            st.dictionaries(_value_keys(), inner, max_size=2).map(lambda d: (d,)),
        ),
        max_leaves=4,
    )
    return st.one_of(single, sown, nested)


@functools.cache
def _values_in_a_box():
    # In a box a mapping is a value and no subtree.
    return leaves() | _mapping_values()


@functools.cache
def _mapping_values():
    return st.recursive(
        st.dictionaries(_value_keys(), arrays(), max_size=2),
        lambda inner: st.dictionaries(_value_keys(), inner, max_size=2),
        max_leaves=3,
    )


@functools.cache
def _value_keys():
    # JAX sorts the keys of a mapping that is a value, so they have to be of one type.
    return st.sampled_from(("a", "w", "params"))


@functools.cache
def _axis_names():
    name = st.sampled_from(("data", "model", None)) | st.just(("data", "model"))
    return st.lists(name, max_size=3).map(tuple)


@functools.cache
def metadata():
    """Variable metadata that says something: tags, hooks, shardings."""
    said = {
        "tag": st.text(max_size=3),
        "out_sharding": _axis_names().filter(bool)
        | st.just(jax.sharding.PartitionSpec("data", None)),
        "on_get_value": st.just((on_read,)),
        "on_add_axis": st.just(on_axis),
        "sharding_rules": st.just((("data", "x"),)),
        "note": st.lists(st.integers(), max_size=2) | st.booleans(),
    }
    return st.fixed_dictionaries({}, optional=said).filter(bool)


@functools.cache
def nnx_boxes(var_type):
    """`NNXMeta` boxes of one Variable type, as conversions and as people make them."""
    required = st.fixed_dictionaries(
        {"hijax": st.just(False), "ref": st.just(False), "eager_sharding": st.booleans()}
    )
    full = st.builds(lambda a, b: {**a, **b}, required, metadata())
    nothing = st.sampled_from(({}, {"out_sharding": None}))
    values = _values_in_a_box()
    return st.builds(bridge.NNXMeta, st.just(var_type), values, full | metadata() | nothing)


@functools.cache
def linen_boxes():
    """Linen's own boxes, a dataclass box and one with a registered codec."""
    values = _values_in_a_box()
    mesh = st.deferred(lambda: st.sampled_from((None, _mesh())))
    rules = st.none() | st.just((("data", "x"), ("model", None)))
    return st.one_of(
        st.builds(nn.Partitioned, values, _axis_names(), mesh),
        st.builds(nn.LogicallyPartitioned, values, _axis_names(), mesh, rules=rules),
        st.builds(Documented, values, author=st.text(max_size=2), axes=_axis_names()),
        st.builds(Sealed, values, seal=st.integers()),
    )


@functools.cache
def _leaves_and_boxes(var_type):
    return leaves() | linen_boxes() | nnx_boxes(var_type)


@functools.cache
def trees(leaf, *, empty=True):
    """Nested dicts with string and integer keys."""

    def level(inner):
        return st.dictionaries(st.sampled_from(KEYS), inner, min_size=not empty, max_size=3)

    return level(st.recursive(leaf, level, max_leaves=5))


@st.composite
def linen_variables(draw, leaf_or_box=None):
    """Linen variables: dicts or FrozenDicts, with empty and with colliding collections.

    Args:
      leaf_or_box: strategy of the leaves; by default leaves and boxes of every kind.
    """
    made = {}
    for name in draw(st.lists(st.sampled_from(COLLECTIONS), unique=True, max_size=4)):
        leaf = leaf_or_box
        if leaf is None:
            var_type = registry.variable_type_from_name(name, create=True)
            leaf = _leaves_and_boxes(var_type)
        made[name] = draw(trees(leaf))
    frozen = draw(st.sampled_from(("none", "whole", "each")))
    if frozen == "whole":
        return freeze(made)
    return {name: freeze(tree) for name, tree in made.items()} if frozen == "each" else made


@st.composite
def nnx_variables(draw):
    """Variables of every type, with and without metadata; also such as came out of a Linen box."""
    var_type = draw(st.sampled_from(VARIABLE_TYPES))
    variable = var_type(draw(_variable_values()))
    said = draw(_variable_metadata())
    if said:
        variable.set_metadata(**said)
    return variable


@functools.cache
def _variable_values():
    return st.one_of(
        arrays(),
        abstract_arrays(),
        st.lists(arrays(), max_size=2).map(tuple),
        _mapping_values(),
        st.just(FrozenDict({"a": 1.0})),
    )


@functools.cache
def _variable_metadata():
    return st.one_of(st.just({}), metadata(), _metadata_of_a_box())


@functools.cache
def _metadata_of_a_box():
    return st.one_of(
        st.fixed_dictionaries(
            {
                "linen_meta_type": st.just(nn.Partitioned),
                "out_sharding": _axis_names().filter(bool),
                "mesh": st.deferred(lambda: st.just(_mesh())),
            },
            # More than the box can hold.
            optional={"tag": st.text(min_size=1, max_size=2)},
        ),
        st.fixed_dictionaries(
            {
                "linen_meta_type": st.just(nn.LogicallyPartitioned),
                "out_sharding": _axis_names().filter(bool),
                "mesh": st.deferred(lambda: st.just(_mesh())),
                "sharding_rules": st.just((("data", "x"),)),
            }
        ),
    )


@functools.cache
def states():
    """States with Variables and bare arrays at paths with string and integer keys."""
    bare = st.deferred(lambda: st.sampled_from(_arrays()))
    return trees(nnx_variables() | bare, empty=False).map(nnx.State) | st.builds(
        nnx.State, st.just({})
    )
