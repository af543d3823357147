"""`nodes_below` finds what `nnx.iter_graph` finds."""

from itertools import chain

import flax.struct
import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx

import bridge
from bridge._flax.nodes import nodes_below


@flax.struct.dataclass
class Pair:
    """A node that JAX knows and NNX does not."""

    left: object
    right: object


class Everything(nnx.Module):
    def __init__(self, *, rngs):
        self.linear = nnx.Linear(2, 2, rngs=rngs)
        self.layers = nnx.List([self.linear, nnx.Dropout(0.5, rngs=rngs)])
        self.named = nnx.data({"a": nnx.Param(jnp.ones(1)), "b": [nnx.Cache(jnp.ones(2))]})
        self.pair = nnx.data(Pair((nnx.Param(jnp.ones(3)), None), self.linear.kernel))
        self.itself = nnx.data([self])
        self.activation = nnx.relu
        self.wrapped = bridge.ToNNX(nn.Dense(2), rngs=rngs).lazy_init(jnp.ones((1, 2)))


def native():
    return Everything(rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    "make",
    [native, lambda: nnx.Rngs(0), lambda: [native(), {"a": native()}], lambda: nnx.Param(1.0)],
)
@pytest.mark.parametrize("kind", [nnx.Pytree, nnx.Variable, dict, list, Pair])
def test_it_finds_every_node_once(make, kind):
    root = make()
    expected = [id(node) for _, node in nnx.iter_graph(root, graph=True) if isinstance(node, kind)]
    found = [id(node) for node in chain(*nodes_below(root)) if isinstance(node, kind)]
    assert sorted(found) == sorted(expected)


def test_a_type_that_is_registered_later_is_taken_apart_then():
    class Late:
        def __init__(self, inside):
            self.inside = inside

    late = Late(nnx.Param(1.0))
    assert list(chain(*nodes_below(late))) == []
    jax.tree_util.register_pytree_node(Late, lambda x: ((x.inside,), None), lambda _, x: Late(*x))
    found = nodes_below(late)
    assert list(map(type, found.others)) == [Late]
    assert list(map(type, found.variables)) == [nnx.Param]
    assert found.objects == []


def test_it_finds_hijax_variables():
    class Hijax(nnx.Module):
        def __init__(self):
            self.plain = nnx.Param(jnp.ones(1))
            self.hijax = nnx.Param(jnp.ones(2), hijax=True)

    root = Hijax()
    found = nodes_below(root)
    assert {id(variable) for variable in found.variables} == {id(root.plain), id(root.hijax)}
    assert found.objects == [root]


def test_it_says_what_a_node_is():
    objects, variables, others = nodes_below(native())
    assert all(isinstance(node, nnx.Pytree) for node in objects)
    assert all(isinstance(node, nnx.Variable) for node in variables)
    assert {type(node) for node in others} == {dict, list, tuple, Pair}
