"""Metadata crosses the bridge and comes back the same, through transforms, abstract and concrete.

`tests/transforms` has the names of axes that come and go; here everything else that a box or a
Variable says goes with them.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx, struct
from flax.core import meta
from jax.sharding import PartitionSpec as P

import bridge
import registry
from tests._sharding.sharded_models import KEY
from tests.models import assert_identical
from tests.strategies import exact

X = jnp.ones((2, 4))
LENGTH = 3
LAYERS = {nn.PARTITION_NAME: "layers"}
RULES = (("embed", "data"), ("mlp", "model"), ("layers", None))


class Tagged(struct.PyTreeNode, meta.AxisMetadata):
    """A box of the user's own: a dataclass, which needs no registration."""

    value: object
    names: tuple = struct.field(pytree_node=False)
    author: str = struct.field(pytree_node=False, default="nobody")

    def unbox(self):
        return self.value

    def replace_boxed(self, val):
        return self.replace(value=val)

    def add_axis(self, index, params):
        names = list(self.names)
        names.insert(index, params[nn.PARTITION_NAME])
        return self.replace(names=tuple(names))

    def remove_axis(self, index, params):
        names = list(self.names)
        names.pop(index)
        return self.replace(names=tuple(names))

    def get_partition_spec(self):
        return P(*self.names)


class Coded(meta.AxisMetadata):
    """A box of the user's own that is no dataclass: its codec has to be registered."""

    def __init__(self, inside, labels):
        self.inside, self.labels = inside, labels

    def unbox(self):
        return self.inside

    def replace_boxed(self, val):
        return Coded(val, self.labels)

    def add_axis(self, index, params):
        labels = (*self.labels[:index], params[nn.PARTITION_NAME], *self.labels[index:])
        return Coded(self.inside, labels)

    def remove_axis(self, index, params):
        return Coded(self.inside, (*self.labels[:index], *self.labels[index + 1 :]))


jax.tree_util.register_pytree_node(
    Coded, lambda box: ((box.inside,), box.labels), lambda labels, inside: Coded(*inside, labels)
)


CODED = registry.BoxCodec(
    lambda box: (box.inside, {"labels": box.labels}),
    lambda value, fields: Coded(value, fields["labels"]),
)
BOXES = {
    "Partitioned": lambda value: nn.Partitioned(value, ("embed", "mlp")),
    "LogicallyPartitioned": lambda value: nn.LogicallyPartitioned(
        value, ("embed", "mlp"), rules=RULES
    ),
    "a dataclass": lambda value: Tagged(value, ("embed", ("data", "model")), author="somebody"),
    "a registered class": lambda value: Coded(value, ("embed", "mlp")),
}


@pytest.fixture(autouse=True, scope="module")
def _registered():
    with registry.use(registry.current().extend(boxes={Coded: CODED})):
        yield


def described(tree):
    """Boxes with all that they say, and shapes for values."""
    is_box = lambda leaf: isinstance(leaf, meta.AxisMetadata)  # noqa: E731

    def one(leaf):
        if isinstance(leaf, Coded):
            return Coded, leaf.labels, leaf.inside.shape, str(leaf.inside.dtype)
        if not is_box(leaf):
            return leaf.shape, str(leaf.dtype)
        fields = {f.name: getattr(leaf, f.name) for f in dataclasses.fields(leaf)}
        value = fields.pop("value")
        return type(leaf), fields, value.shape, str(value.dtype)

    # Linen makes mappings of its own; a dict is enough to compare.
    return jax.tree.map(one, tree, is_leaf=is_box)


class Boxed(nn.Module):
    """A Linen module whose parameter is in a box."""

    box: str

    @nn.compact
    def __call__(self, x, _=None):
        init = nn.initializers.uniform()
        w = self.param("w", lambda key: BOXES[self.box](init(key, (4, 4))))
        return x @ w, None


def lifted(transform, module_class, *args, axis=0, **kwargs):
    """Layers of a Linen class, and their inputs."""
    options = {
        "variable_axes": {"params": axis},
        "split_rngs": {"params": True},
        "metadata_params": LAYERS,
    }
    if transform == "vmap":
        options |= {"in_axes": (None, None), "axis_size": LENGTH}
        return nn.vmap(module_class, **options)(*args, **kwargs)
    return nn.scan(module_class, length=LENGTH, **options)(*args, **kwargs)


TRANSFORMS = pytest.mark.parametrize("transform", ["scan", "vmap"])
VALUES = pytest.mark.parametrize("abstract", [False, True], ids=["concrete", "abstract"])


@VALUES
@pytest.mark.parametrize("axis", [0, 1])
@TRANSFORMS
@pytest.mark.parametrize("box", BOXES)
def test_a_stacked_box_crosses_to_nnx_and_back(box, transform, axis, abstract):
    module = lifted(transform, Boxed, box, axis=axis)
    make = functools.partial(module.init, KEY, X, None)
    variables = jax.eval_shape(make) if abstract else make()
    back = bridge.nnx_to_linen(bridge.linen_to_nnx(variables))
    assert described(back) == described(variables)
    if not abstract:
        assert_identical(back, variables)


class Holding(nnx.Module):
    """An NNX module that holds a Linen module with a box, for a Linen transform around it."""

    def __init__(self, box, rngs):
        self.inner = bridge.ToNNX(Boxed(box), rngs)

    def __call__(self, x, _=None):
        return self.inner(x)


@VALUES
@TRANSFORMS
@pytest.mark.parametrize("box", BOXES)
def test_a_box_in_linen_nnx_linen_says_under_a_transform_what_linen_says(box, transform, abstract):
    module = lifted(transform, bridge.ToLinen, Holding, args=(box,))
    native = lifted(transform, Boxed, box)
    run = jax.eval_shape if abstract else (lambda f, *args: f(*args))
    variables = run(module.init, KEY, X, None)
    expected = run(native.init, KEY, X, None)
    assert described({"params": variables["params"]["inner"]}) == described(expected)
    if abstract:
        return
    given = meta.replace_boxed(expected, {"params": nn.unbox(variables["params"]["inner"])})
    ours = module.apply({"params": variables["params"]}, X, None)
    assert_identical(ours, native.apply(given, X, None))


def note(calls):
    """Hooks that write down what they are told, as they also do in the metadata."""

    def on_add(variable, index, name):
        calls.append(("add", index, name))
        variable.set_metadata(depth=variable.get_metadata("depth") + 1)

    def on_remove(variable, index, name):
        calls.append(("remove", index, name))
        variable.set_metadata(depth=variable.get_metadata("depth") - 1)

    def on_set(variable, value):
        return value

    return {"on_add_axis": on_add, "on_remove_axis": on_remove, "on_set_value": on_set}


class Annotated(nnx.Module):
    """A Variable that says much about itself."""

    def __init__(self, metadata, rngs):
        self.w = nnx.Param(jax.random.uniform(rngs.params(), (4, 4)), **metadata.fields)

    def __call__(self, x, _=None):
        return x @ self.w[...], None


@dataclasses.dataclass(eq=False)
class Said:
    """Metadata as one argument: what it holds need not be hashable."""

    fields: dict


def said(calls):
    return Said(
        {
            "out_sharding": ("embed", "mlp"),
            "sharding_rules": RULES,
            "depth": 0,
            "note": "any text",
            "pair": ("a", 1),
            "table": {"k": (1, 2), "n": None},
            **note(calls),
        }
    )


# Flax asks for Variable types with methods in their place; programs still have them.
HOOKS = pytest.mark.filterwarnings("ignore:Variable hooks are deprecated:UserWarning")


@HOOKS
@VALUES
@TRANSFORMS
def test_a_variable_says_in_linen_what_it_says_in_nnx_and_hooks_run(transform, abstract):
    calls = []
    metadata = said(calls)
    module = lifted(transform, bridge.ToLinen, Annotated, args=(metadata,))
    run = jax.eval_shape if abstract else (lambda f, *args: f(*args))
    box = run(module.init, KEY, X, None)["params"]["w"]
    assert isinstance(box, bridge.NNXMeta)
    assert {call[0] for call in calls} == {"add"}
    assert calls[-1] == ("add", 0, "layers")
    expected = metadata.fields | {"out_sharding": ("layers", "embed", "mlp"), "depth": 1}
    assert {name: box.metadata[name] for name in expected} == expected
    assert box.value.shape == (LENGTH, 4, 4)
    assert box.get_partition_spec() == P("layers", "embed", "mlp")
    del calls[:]
    again = box.remove_axis(0, LAYERS)
    assert {name: again.metadata[name] for name in expected} == metadata.fields
    assert calls == [("remove", 0, "layers")]


@HOOKS
@VALUES
def test_a_variable_crosses_to_linen_and_back_after_an_nnx_transform(abstract):
    calls = []
    metadata = said(calls)

    @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: "layers"})
    def make(key):
        return Annotated(metadata, nnx.Rngs(params=key))

    def run(keys):
        return nnx.state(make(keys))

    keys = jax.random.split(KEY, LENGTH)
    with nnx.use_eager_sharding(False):
        state = jax.eval_shape(run, keys) if abstract else run(keys)
    assert ("add", 0, "layers") in calls
    before = dict(state["w"].get_metadata())
    assert before["out_sharding"] == ("layers", "embed", "mlp")
    assert before["depth"] == 1
    back = bridge.linen_to_nnx(bridge.nnx_to_linen(state))
    assert back["w"].get_metadata() == before
    assert type(back["w"]) is nnx.Param
    if not abstract:
        assert exact(back["w"]) == exact(state["w"])


@pytest.mark.parametrize("box", BOXES)
def test_the_wrapper_itself_gives_the_box_back_after_an_nnx_transform(box):
    @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: "layers"})
    def make(key):
        return bridge.lazy_init(bridge.ToNNX(Boxed(box), key), X)

    model = make(jax.random.split(KEY, LENGTH))
    assert model.w.shape == (LENGTH, 4, 4)
    stacked = model.linen_variables()["params"]["w"]
    assert stacked.unbox().shape == (LENGTH, 4, 4)
    call = nnx.vmap(lambda model: model(X), transform_metadata={nnx.PARTITION_NAME: "layers"})
    call(model)
    assert described(model.linen_variables()["params"]["w"]) == described(stacked)
    assert type(stacked) is type(BOXES[box](X))
