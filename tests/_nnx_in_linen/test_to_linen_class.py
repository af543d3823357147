"""`to_linen_class`: an NNX module class as a Linen module class."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import bridge
from tests.models import assert_close

KEY = jax.random.key(0)
X = jax.random.normal(jax.random.key(7), (4, 3))


class Scaled(nnx.Module):
    def __init__(self, width, scale=1.0, *, name="nobody", rngs):
        self.linear = nnx.Linear(3, width, rngs=rngs)
        self.scale = scale
        self.label = name

    def __call__(self, x):
        return self.linear(x) * self.scale

    def encode(self, x):
        return self.linear(x)


ScaledLinen = bridge.to_linen_class(Scaled, scale=2.0)


def test_the_class_is_called_after_the_nnx_class():
    assert ScaledLinen.__name__ == "ScaledToLinen"
    assert issubclass(ScaledLinen, bridge.ToLinen)
    assert "Scaled" in ScaledLinen.__doc__


@pytest.mark.parametrize(
    "make",
    [
        lambda: ScaledLinen(width=2),
        lambda: ScaledLinen(args=(2,)),
        lambda: ScaledLinen((2,)),
        lambda: ScaledLinen(kwargs={"width": 2}),
        lambda: ScaledLinen((), {"width": 2}),
    ],
    ids=["keyword", "args", "args by position", "kwargs", "kwargs by position"],
)
def test_every_form_of_instantiation_constructs_the_same_module(make):
    """Regression: direct instantiation failed."""
    model = make()
    y, variables = model.init_with_output(KEY, X)
    native = Scaled(2, 2.0, rngs=nnx.Rngs(KEY))
    np.testing.assert_array_equal(y, native(X))
    np.testing.assert_array_equal(model.apply(variables, X), native(X))


def test_an_instance_s_argument_wins_over_the_class_s():
    y, _ = ScaledLinen(width=2, scale=5.0).init_with_output(KEY, X)
    np.testing.assert_array_equal(y, Scaled(2, 5.0, rngs=nnx.Rngs(KEY))(X))
    y, _ = ScaledLinen(kwargs={"width": 2, "scale": 5.0}).init_with_output(KEY, X)
    np.testing.assert_array_equal(y, Scaled(2, 5.0, rngs=nnx.Rngs(KEY))(X))


def test_instances_are_equal_by_value_and_hashable():
    assert ScaledLinen(width=2) == ScaledLinen(width=2)
    assert ScaledLinen(width=2) != ScaledLinen(width=3)
    assert len({ScaledLinen(width=2), ScaledLinen(width=2), ScaledLinen(width=3)}) == 2


def test_automatic_names_are_the_class_s():
    class Parent(nn.Module):
        @nn.compact
        def __call__(self, x):
            return ScaledLinen(width=3)(ScaledLinen(width=3)(x))

    variables = Parent().init(KEY, X)
    assert set(variables["params"]) == {"ScaledToLinen_0", "ScaledToLinen_1"}


def test_it_takes_the_linen_name_and_parent():
    class Parent(nn.Module):
        @nn.compact
        def __call__(self, x):
            return ScaledLinen(width=3, name="first")(x)

    assert set(Parent().init(KEY, X)["params"]) == {"first"}
    assert ScaledLinen(width=3, parent=None).init_with_output(KEY, X)[0].shape == (4, 3)


def test_a_constructor_argument_called_name_goes_through_kwargs():
    model = ScaledLinen(kwargs={"width": 3, "name": "Ada"}, name="outer")
    assert model.name == "outer"
    bound = model.bind(model.init(KEY, X))
    assert bound.label == "Ada"


@pytest.mark.parametrize("field", ["strict", "rng_state", "string_keys", "skip_rng"])
def test_the_fields_of_to_linen_can_be_given(field):
    assert getattr(ScaledLinen(width=2, **{field: True}), field) is True


def test_skip_rng_of_the_class_reaches_instances():
    class Constant(nnx.Module):
        def __init__(self, rngs=None):
            self.given = rngs is not None

        def __call__(self):
            return self.given

    assert bridge.to_linen_class(Constant)().init_with_output(KEY)[0] is True
    assert bridge.to_linen_class(Constant, base_skip_rng=True)().init_with_output(KEY)[0] is False


def test_the_metadata_function_of_the_class_reaches_instances():
    class Annotated(nnx.Module):
        def __init__(self, *, rngs):
            self.w = nnx.Param(jnp.ones(2), note="n")

        def __call__(self):
            return self.w[...]

    boxed = bridge.to_linen_class(Annotated)().init(KEY)["params"]["w"]
    assert isinstance(boxed, bridge.NNXMeta)
    bare = bridge.to_linen_class(Annotated, base_metadata_fn=None)().init(KEY)["params"]["w"]
    assert isinstance(bare, jax.Array)
    one = bridge.to_linen_class(Annotated)(metadata_fn=lambda v: v.get_value() + 1)
    np.testing.assert_array_equal(one.init(KEY)["params"]["w"], [2.0, 2.0])


def test_methods_and_linen_s_method_work():
    model = ScaledLinen(width=2)
    variables = model.init(KEY, X)
    native = Scaled(2, 2.0, rngs=nnx.Rngs(KEY))
    np.testing.assert_array_equal(model.apply(variables, X, method="encode"), native.encode(X))
    np.testing.assert_array_equal(model.apply(variables, X, method=model.encode), native.encode(X))
    np.testing.assert_array_equal(model.apply(variables, X, nnx_method="encode"), native.encode(X))


def test_instances_can_be_cloned_copied_and_bound():
    model = ScaledLinen(width=2)
    assert model.clone() == model
    assert model.copy() == model
    variables = model.init(KEY, X)
    np.testing.assert_array_equal(model.bind(variables)(X), model.apply(variables, X))


def test_users_may_subclass_the_class():
    class Louder(ScaledLinen):
        factor: float = 10.0

        @nn.compact
        def __call__(self, x):
            return self.factor * super().__call__(x)

    y, variables = Louder(width=2).init_with_output(KEY, X)
    native = Scaled(2, 2.0, rngs=nnx.Rngs(KEY))
    np.testing.assert_array_equal(y, 10.0 * native(X))
    np.testing.assert_array_equal(Louder(width=2, factor=3.0).apply(variables, X), 3.0 * native(X))


def test_lists_and_dicts_reach_the_constructor_as_given():
    given = []

    class Sized(nnx.Module):
        def __init__(self, sizes, options, *, rngs):
            given.append((sizes, options))
            self.w = nnx.Param(jnp.ones(sizes[0]))

        def __call__(self):
            return self.w[...]

    model = bridge.to_linen_class(Sized, options={"a": [1]})(sizes=[2, 3])
    model.init(KEY)
    assert given == [([2, 3], {"a": [1]})]
    assert hash(model) == hash(bridge.to_linen_class(Sized, options={"a": [1]})(sizes=[2, 3]))


def test_a_lifted_transform_takes_the_class():
    Mapped = nn.vmap(  # noqa: N806
        ScaledLinen,
        in_axes=0,
        variable_axes={"params": 0, "nnx": None},
        split_rngs={"params": True},
    )
    x = jnp.stack([X, X])
    model = Mapped(width=2)
    variables = model.init(KEY, x)
    assert variables["params"]["linear"]["kernel"].shape == (2, 3, 2)
    y = model.apply(variables, x)
    for i in range(2):
        native = Scaled(2, 2.0, rngs=nnx.Rngs(0))
        nnx.update(native, jax.tree.map(lambda a: a[i], variables["params"]))  # noqa: B023
        assert_close(y[i], native(X))


@pytest.mark.parametrize(
    "wrong", [nnx.Linear(3, 2, rngs=nnx.Rngs(0)), lambda rngs: None, nn.Dense, nn.Dense(3)]
)
def test_what_is_no_nnx_class_is_refused_when_the_class_is_made(wrong):
    with pytest.raises(bridge.InvalidModuleError):
        bridge.to_linen_class(wrong)


def test_it_works_as_a_module_in_setup():
    class Parent(nn.Module):
        def setup(self):
            self.layers = [ScaledLinen(width=3) for _ in range(2)]

        def __call__(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    variables = Parent().init(KEY, X)
    assert set(variables["params"]) == {"layers_0", "layers_1"}
    expected = X
    for name in ("layers_0", "layers_1"):
        native = Scaled(3, 2.0, rngs=nnx.Rngs(0))
        nnx.update(native, variables["params"][name])
        expected = native(expected)
    np.testing.assert_array_equal(Parent().apply(variables, X), expected)


@pytest.mark.parametrize("positional", [(8,), (8, 4), ((8,), 4), (8, {"out_features": 4})])
def test_positional_arguments_of_the_constructor_say_what_to_write(positional):
    with pytest.raises(bridge.InvalidModuleError, match=r"args=\(…\), kwargs=\{…\}"):
        bridge.to_linen_class(nnx.Linear)(*positional)
    variables = bridge.to_linen_class(nnx.Linear)((3, 4), {"use_bias": False}).init(KEY, X)
    assert variables["params"]["kernel"].shape == (3, 4)
