"""Subclasses of ToLinen that were written for flax.nnx.bridge, whose ToLinen has fewer fields."""

import functools
import pickle

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx
from flax.core import FrozenDict

import bridge
from bridge._nnx_in_linen.constructor import GivenArgs, GivenKwargs
from tests.models import assert_identical

KEY = jax.random.key(0)
X = jnp.ones((2, 4))
NO_KWARGS = FrozenDict({})
OPTIONS = {"strict": True, "rng_state": False, "string_keys": True, "eager_sharding": False}


class Narrow(bridge.ToLinen):
    """A constructor with the fields of flax.nnx.bridge and no others."""

    def __init__(
        self,
        nnx_class,
        args=(),
        kwargs=NO_KWARGS,
        skip_rng=False,
        metadata_fn=None,
        parent=None,
        name=None,
    ):
        super().__init__(
            nnx_class=nnx_class,
            args=args,
            kwargs=kwargs,
            skip_rng=skip_rng,
            metadata_fn=metadata_fn,
            parent=parent,
            name=name,
        )


def forwarding(nnx_class, **partial):
    """A class whose constructor forwards what it does not know to the NNX module's."""

    class Partial(bridge.ToLinen):
        def __init_subclass__(cls, **options):
            super().__init_subclass__(**options)

            def construct(
                self,
                args=None,
                kwargs=None,
                nnx_class=nnx_class,
                skip_rng=False,
                metadata_fn=None,
                name=None,
                **others,
            ):
                linen = {k: others.pop(k) for k in ("parent",) if k in others}
                bridge.ToLinen.__init__(
                    self,
                    nnx_class=nnx_class,
                    args=args or (),
                    kwargs=FrozenDict({**partial, **(kwargs or {}), **others}),
                    skip_rng=skip_rng,
                    metadata_fn=metadata_fn,
                    name=name,
                    **linen,
                )

            cls.__init__ = construct

    return type("Made", (Partial,), {"__module__": __name__})


class Fields(bridge.ToLinen):
    """A dataclass with a field of its own."""

    abstract_init: bool = True


def native():
    return nnx.Linear(4, 3, rngs=nnx.Rngs(KEY))


@pytest.mark.parametrize(
    "make",
    [
        functools.partial(Narrow, nnx.Linear, args=(4, 3)),
        functools.partial(forwarding(nnx.Linear, out_features=3), in_features=4),
        functools.partial(Fields, nnx.Linear, args=(4, 3), abstract_init=False),
    ],
    ids=["fewer fields", "forwarded keywords", "a further field"],
)
@pytest.mark.parametrize("options", [{}, OPTIONS], ids=["", "with options"])
def test_a_subclass_initialises_clones_and_calls(make, options):
    module = make(**options)
    variables = module.init(KEY, X)
    assert_identical(variables["params"], nnx.to_pure_dict(nnx.state(native())))
    assert_identical(module.apply(variables, X), native()(X))
    for copy in (module.clone(), module.copy(name="copy"), pickled(module)):
        assert {name: getattr(copy, name) for name in options} == options
    assert make(**options) == module
    assert hash(make(**options)) == hash(module)


def pickled(module):
    """The same module out of a pickle, where its class can be found by name."""
    return module if type(module).__name__ == "Made" else pickle.loads(pickle.dumps(module))


def test_a_lifted_class_keeps_the_options():
    made = nn.vmap(
        forwarding(nnx.Linear, out_features=3),
        variable_axes={"params": 0, "nnx": None},
        split_rngs={"params": True},
    )
    module = made(in_features=4, strict=True)
    variables = module.init(KEY, jnp.ones((5, 2, 4)))
    assert jax.tree.map(jnp.shape, variables["params"]) == {"bias": (5, 3), "kernel": (5, 4, 3)}
    extra = {**variables, "params": {**variables["params"], "other": jnp.ones((5,))}}
    with pytest.raises(bridge.MismatchError, match="other"):
        module.apply(extra, jnp.ones((5, 2, 4)))


class Configured(nnx.Module):
    """Takes a list and a dict, and writes into neither."""

    def __init__(self, widths, config, *, rngs):
        assert type(widths) is list
        assert type(config) is dict
        self.layer = nnx.Linear(widths[0], config["out"], rngs=rngs)

    def __call__(self, x):
        return self.layer(x)


class Own(bridge.ToLinen):
    """Constructs and calls the module itself, from its fields."""

    abstract_init: bool = True

    @nn.compact
    def __call__(self, *args, nnx_method=None, **kwargs):
        module = self.nnx_class(*self.args, **dict(self.kwargs), rngs=nnx.Rngs(0))
        if self.is_initializing():
            for name, tree in nnx.to_pure_dict(nnx.state(module, nnx.Param)).items():
                self.put_variable("params", name, tree)
        else:
            nnx.update(module, self.variables["params"])
        return module(*args, **kwargs)

    def __getattr__(self, name):
        if name in self.kwargs:
            return self.kwargs[name]
        return super().__getattr__(name)


def test_a_call_of_its_own_reads_the_arguments_as_they_were_given():
    module = Own(Configured, args=([4],), kwargs={"config": {"out": 3}})
    variables = module.init(KEY, X)
    reference = Configured([4], {"out": 3}, rngs=nnx.Rngs(0))
    assert_identical(module.apply(variables, X), reference(X))
    assert module.config == {"out": 3}
    assert module == Own(Configured, args=([4],), kwargs={"config": {"out": 3}})
    assert hash(module) == hash(Own(Configured, args=([4],), kwargs={"config": {"out": 3}}))
    assert module != Own(Configured, args=([5],), kwargs={"config": {"out": 3}})
    assert jax.jit(module.apply)(variables, X).shape == (2, 3)


def test_given_arguments_read_as_given_and_compare_by_what_they_hold():
    module = Fields(Configured, args=([4], 5), kwargs={"config": {"out": 3}})
    assert type(module.args) is GivenArgs
    assert list(module.args) == [[4], 5]
    assert (module.args[0], module.args[1:]) == ([4], (5,))
    assert type(module.kwargs) is GivenKwargs
    assert dict(module.kwargs) == {"config": {"out": 3}}
    assert module.kwargs == Fields(Configured, kwargs={"config": {"out": 3}}).kwargs
    assert module.kwargs != {"config": 3}
    assert module.kwargs != 3


class Headed(bridge.ToLinen):
    """A ToLinen beside a Linen module that is a field of it."""

    head: nn.Module | None = None

    @nn.compact
    def __call__(self, x):
        return self.head(super().__call__(x))


class NativelyHeaded(nn.Module):
    body: nn.Module
    head: nn.Module

    @nn.compact
    def __call__(self, x):
        return self.head(self.body(x))


def test_a_bound_module_in_a_field_of_a_subclass_has_its_own_variables():
    head = nn.Dense(2)
    bound = head.bind(head.init(jax.random.key(1), jnp.ones((1, 3))))
    x = jnp.ones((1, 4))
    variables = Headed(nnx.Linear, args=(4, 3), head=bound).init(jax.random.key(0), x)
    native = NativelyHeaded(nn.Dense(3), bound).init(jax.random.key(0), x)
    assert variables["params"]["head"].keys() == native["params"]["head"].keys()
    changed = jax.tree.map(jnp.zeros_like, variables)
    y = Headed(nnx.Linear, args=(4, 3), head=bound).apply(changed, x)
    assert_identical(y, jnp.zeros((1, 2)))
