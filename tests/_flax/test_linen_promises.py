"""Linen keeps the promises that have no public name: one test for each part."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax.core import Scope
from flax.linen import module as linen_module

from bridge._flax import linen_modules
from bridge._flax.scopes import CallKeys, run_linen
from bridge._flax.traces import is_unknown, partially_evaluate

KEY = jax.random.key(0)


def same_key(a, b):
    return bool((jax.random.key_data(a) == jax.random.key_data(b)).all())


def test_a_scope_keeps_a_key_as_a_pytree_of_it_and_static_names():
    scope = Scope({}, {"params": 0})
    names = scope.push("a").push("b").rngs["params"]
    assert jax.tree.leaves(names) == [0]
    below = jax.tree.map(lambda _: KEY, names)
    expected = Scope({}, {"params": KEY}).push("a").push("b").rngs["params"]
    assert same_key(below.as_jax_rng(), expected.as_jax_rng())


def test_a_scope_asks_has_rng_which_stream_it_may_draw_from():
    class Serving(Scope):
        def has_rng(self, name):
            return True

    scope = Serving({}, {"params": KEY})
    scope.rngs = {"dropout": KEY}
    scope.rng_counters = {"dropout": 0}
    assert same_key(scope.make_rng("dropout"), Scope({}, {"dropout": KEY}).make_rng("dropout"))


def test_the_parts_of_a_scope_have_public_names():
    scope = Scope({"params": {}}, {"params": KEY}, mutable=["params"], flags={"initializing": True})
    child = scope.push("layer")
    assert (child.name, child.path, child.debug_path) == ("layer", ("layer",), ("layer",))
    assert (child.parent, child.mutable, child.flags) == (scope, ["params"], {"initializing": True})
    assert child.rng_counters is scope.push("layer", reuse=True).rng_counters
    rewound = child.rewound()
    assert (rewound.parent, rewound.path) == (scope, ("layer",))
    assert rewound.rng_counters is child.rng_counters


def test_a_child_scope_finds_its_variables_through_its_parent():
    held = {"params": {"layer": {"w": 1}}}
    scope = Scope(held, {}, mutable=["params", "new"])
    child = Scope({}, {}, name="layer", parent=scope, path=("layer",), mutable=scope.mutable)
    assert child.get_variable("params", "w") == 1
    child.put_variable("params", "w", 2)
    child.put_variable("new", "v", 3)
    assert held == {"params": {"layer": {"w": 2}}, "new": {"layer": {"v": 3}}}


def test_the_modules_that_are_being_called_are_on_a_stack():
    stacks = []

    class Inner(nn.Module):
        def __call__(self):
            stacks.append(list(linen_module._context.module_stack))

    class Outer(nn.Module):
        @nn.compact
        def __call__(self):
            Inner(name="inner")()

    Outer().apply({})
    [(*_, outer, inner)] = stacks
    assert (type(outer), type(inner), inner.parent) == (Outer, Inner, outer)
    assert not [module for module in linen_module._context.module_stack if module is not None]


def test_a_module_made_under_none_on_the_stack_has_no_parent():
    class Outer(nn.Module):
        @nn.compact
        def __call__(self):
            linen_module._context.module_stack.append(None)
            try:
                return nn.Dense(1).parent
            finally:
                linen_module._context.module_stack.pop()

    assert Outer().apply({}) is None


def test_the_filter_on_top_of_a_stack_says_what_is_captured():
    class Model(nn.Module):
        def __call__(self):
            linen_module._context.capture_stack.append(wanted)
            try:
                return self.answer()
            finally:
                linen_module._context.capture_stack.pop()

        def answer(self):
            return 42

    asked = []

    def wanted(module, method):
        asked.append((type(module), method))
        return method == "answer"

    _, state = Model().apply({}, mutable=["intermediates"], capture_intermediates=True)
    assert asked == [(Model, "answer")]
    assert state["intermediates"]["answer"] == (42,)


class Pair(NamedTuple):
    a: nn.Module
    b: int


class WithSetup(nn.Module):
    given: nn.Module

    def setup(self):
        self.layer = nn.Dense(2)
        self.blocks = [nn.Dense(2), (nn.Dense(2),)]
        self.heads = {"a": nn.Dense(2), "again": self.layer, "size": 3}
        self.pair = Pair(nn.Dense(2), 1)

    @nn.compact
    def __call__(self, x):
        nn.Dense(3, name="late")(x)

    def __getattr__(self, name):
        if name.startswith("computed"):
            raise ValueError(name)
        return super().__getattr__(name)


def test_setup_has_run_once_attributes_are_listed():
    bound = WithSetup(nn.Dense(2)).bind({})
    found = linen_modules.children(bound)
    names = {"given", "layer", "blocks_0", "blocks_1_0", "heads_a", "pair_a"}
    assert found.keys() == names
    assert {child.path for child in found.values()} == {(name,) for name in names}
    assert found["layer"] is bound.layer
    assert found["heads_a"] is bound.heads["a"]


def test_a_copy_has_submodules_of_its_own():
    class Model(nn.Module):
        layer: nn.Module

    model = Model(nn.Dense(2))
    scope = Scope({}, {})
    copy = model.copy(parent=scope)
    assert copy.layer is not model.layer
    assert (copy.layer.features, copy.scope, model.layer.scope) == (2, scope, None)


def test_an_interceptor_is_told_module_and_method():
    told = []

    def intercept(next_function, args, kwargs, context):
        told.append((type(context), type(context.module), context.method_name))
        return next_function(*args, **kwargs)

    with nn.intercept_methods(intercept):
        nn.relu(nn.Dropout(0.5, deterministic=True).apply({}, jnp.ones(1)))
    assert (linen_module.InterceptorContext, nn.Dropout, "__call__") in told


@pytest.mark.parametrize("transform", [nn.jit, nn.remat])
def test_a_lifted_transform_makes_its_class_in_one_module(transform):
    assert linen_modules.base_class(transform(nn.Dense)) is nn.Dense
    assert transform(nn.Dense).__mro__[0] is not nn.Dense


@pytest.mark.parametrize(
    ("transform", "hashes"), [(nn.jit, True), (nn.fold_rngs, True), (nn.remat, False)]
)
def test_a_transform_that_folds_all_keys_hashes_the_flags_of_a_scope(transform, hashes):
    draws = CallKeys({"dropout": jax.random.key(0)})
    module = transform(nn.Dropout)(0.5, deterministic=True)
    run = functools.partial(
        run_linen, module, type(module).__call__, {}, draws, (jnp.ones(3),), {}, modes={}, fields={}
    )
    _, _, used = run(mutable=False, initializing=False, capture_intermediates=False)
    assert draws.are_folded is hashes
    assert used == ({"dropout"} if hashes else set())


def test_only_what_does_not_depend_on_abstract_inputs_is_computed():
    def function(x):
        return {"shape": np.array(x.shape), "zeros": jnp.zeros(x.shape), "sum": x + 1}

    made = partially_evaluate(function, jax.ShapeDtypeStruct((2, 3), jnp.float32))
    np.testing.assert_array_equal(made["shape"], [2, 3])
    np.testing.assert_array_equal(made["zeros"], np.zeros((2, 3)))
    assert [name for name, leaf in made.items() if is_unknown(leaf)] == ["sum"]
