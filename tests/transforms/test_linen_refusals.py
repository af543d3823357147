"""Linen transforms that cannot work fail over `ToLinen` with the error of the native module."""

import flax
import jax
import pytest
from flax import linen as nn

import bridge
from tests.transforms import linen_states as states

KEY = jax.random.key(0)
KEYS = {"params": KEY, "dropout": KEY}
X = jax.random.normal(jax.random.key(1), (2, states.BATCH, states.FEATURES))
pytestmark = pytest.mark.filterwarnings("ignore:Using .Module.sow:DeprecationWarning")


def made(kind, state, transform=lambda cls: cls, *, steps=False):
    maker = states.made_by(kind, states.STATES[state], steps=steps)
    return transform(maker.cls)(**maker.fields)


def created_carry(kind):
    """A carried variable is created in the body."""
    module = made(
        kind,
        "batch_stats",
        lambda cls: nn.scan(
            cls,
            variable_broadcast="params",
            variable_carry="batch_stats",
            split_rngs={"params": False},
            length=2,
        ),
        steps=True,
    )
    module.init(KEY, X[0], None)


def sown_carry(kind):
    """What is sown grows, and a carry cannot."""
    module = made(
        kind,
        "sown",
        lambda cls: nn.scan(
            cls,
            variable_broadcast="params",
            variable_carry="intermediates",
            split_rngs={"params": False},
            length=2,
        ),
        steps=True,
    )
    variables = module.init(KEY, X[0], None)
    module.apply(variables, X[0], None, mutable=["intermediates"])


def one_branch(kind):
    """Only one branch creates variables."""

    def body(root, x):
        return nn.cond(
            x.sum() > 0,
            lambda root, x: states.made_by(kind, states.STATES["params"])(name="m")(x),
            lambda root, x: x,
            root,
            x,
        )

    states.Program(body).init(KEY, X[0])


def one_switch_branch_sows(kind):
    def body(root, x):
        module = states.made_by(kind, states.STATES["sown"])(name="m")
        if root.is_initializing():
            return module(x)
        return nn.switch(0, [lambda m, x: m(x), lambda m, x: x], module, x)

    program = states.Program(body)
    program.apply(program.init(KEY, X[0]), X[0], mutable=["intermediates"])


def split_but_broadcast(kind):
    """Parameters that differ from slice to slice cannot be shared."""
    made(
        kind,
        "params",
        lambda cls: nn.vmap(cls, variable_axes={"params": None}, split_rngs={"params": True}),
    ).init(KEY, X)


def updated_but_broadcast(kind):
    """An update that depends on the slice cannot be shared."""
    module = made(
        kind,
        "batch_stats",
        lambda cls: nn.vmap(cls, variable_axes={"params": None, "batch_stats": None}),
    )
    module.apply(made(kind, "batch_stats").init(KEY, X[0]), X, mutable=["batch_stats"])


def inconsistent_sizes(kind):
    module = made(
        kind,
        "params",
        lambda cls: nn.vmap(cls, variable_axes={"params": 0}, split_rngs={"params": True}),
    )
    module.apply(module.init(KEY, X), X[:1])


def no_key_for_params(kind):
    """A stream that is not named is not lifted."""
    made(kind, "params", lambda cls: nn.vmap(cls, variable_axes={"params": 0})).init(KEY, X)


def forgotten_statistics(kind):
    """A collection that is not named is not lifted, so its variables have nowhere to go."""
    made(
        kind,
        "batch_stats",
        lambda cls: nn.vmap(cls, variable_axes={"params": 0}, split_rngs={"params": True}),
    ).init(KEY, X)


def forgotten_parameters(kind):
    made(kind, "params", lambda cls: nn.vmap(cls, split_rngs={"params": True})).init(KEY, X)


def forgotten_custom_variables(kind):
    made(kind, "registered_type", lambda cls: nn.remat(cls, variables="params")).init(KEY, X[0])


def forgotten_statistics_at_apply(kind):
    axes = {"params": 0, "batch_stats": 0}
    variables = made(
        kind,
        "batch_stats",
        lambda cls: nn.vmap(cls, variable_axes=axes, split_rngs={"params": True}),
    ).init(KEY, X)
    made(kind, "batch_stats", lambda cls: nn.vmap(cls, variable_axes={"params": 0})).apply(
        variables, X, mutable=["batch_stats"]
    )


def forgotten_parameters_at_apply(kind):
    variables = made(kind, "params").init(KEY, X[0])
    made(kind, "params", lambda cls: nn.vmap(cls, variable_axes={})).apply(variables, X)


NATIVE_ERRORS = {
    created_carry: TypeError,
    sown_carry: TypeError,
    one_branch: TypeError,
    one_switch_branch_sows: TypeError,
    split_but_broadcast: ValueError,
    updated_but_broadcast: ValueError,
    inconsistent_sizes: ValueError,
    no_key_for_params: flax.errors.InvalidRngError,
    forgotten_statistics: flax.errors.ScopeCollectionNotFound,
    forgotten_parameters: flax.errors.ScopeCollectionNotFound,
    forgotten_custom_variables: flax.errors.ScopeCollectionNotFound,
    forgotten_statistics_at_apply: flax.errors.ScopeCollectionNotFound,
    forgotten_parameters_at_apply: flax.errors.ScopeCollectionNotFound,
}


@pytest.mark.parametrize("kind", ["twin", "to_linen", "to_linen_class"])
@pytest.mark.parametrize(
    ("attempt", "error"), NATIVE_ERRORS.items(), ids=[f.__name__ for f in NATIVE_ERRORS]
)
def test_what_cannot_work_raises_the_error_that_the_native_module_raises(attempt, error, kind):
    with pytest.raises(error):
        attempt(kind)


@pytest.mark.parametrize(
    "transform",
    [
        nn.jit,
        nn.remat,
        lambda cls: nn.vmap(cls, variable_axes={"params": 0}, split_rngs={"params": True}),
    ],
    ids=["jit", "remat", "vmap"],
)
def test_a_dropout_without_key_raises_linen_s_error(transform):
    for module in (
        transform(bridge.ToLinen)(states.Dropped),
        transform(LinenDropout)(),
    ):
        variables = module.init(KEYS, X)
        with pytest.raises(flax.errors.InvalidRngError):
            module.apply({"params": variables["params"]}, X)


class LinenDropout(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(states.FEATURES, name="linear")(x)
        return nn.Dropout(0.5, deterministic=False)(x)


def looped(kind, **options):
    """Statistics are updated in a loop that only reads them."""

    def body(root, x):
        maker = states.made_by(kind, states.STATES["batch_stats"])
        module = maker(name="m", **options)
        if root.is_initializing():
            return module(x)
        return nn.while_loop(
            lambda module, carry: carry[0] < 2,
            lambda module, carry: (carry[0] + 1, module(carry[1])),
            module,
            (0, x),
        )[1]

    program = states.Program(body)
    return program, program.init(KEY, X[0])


def test_an_update_that_a_loop_does_not_carry_is_linen_s_error_in_strict():
    for kind, options in (("twin", {}), ("to_linen", {"strict": True})):
        program, variables = looped(kind, **options)
        with pytest.raises(flax.errors.ModifyScopeVariableError):
            program.apply(variables, X[0], mutable=["batch_stats"])


def test_an_update_in_a_loop_that_does_not_carry_it_warns_by_default():
    program, variables = looped("to_linen")
    with pytest.warns(bridge.BridgeWarning, match="batch_stats"):
        _, updates = program.apply(variables, X[0], mutable=["batch_stats"])
    given = jax.tree.leaves(variables["batch_stats"])
    assert all((a == b).all() for a, b in zip(jax.tree.leaves(updates), given, strict=True))
