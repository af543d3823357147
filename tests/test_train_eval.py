"""Modes fill what is open, never more: a generated table against pure Linen, written out."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from flax import errors as flax_errors
from flax import linen as nn
from flax import nnx
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

import bridge
from tests import models
from tests.drawing import drawing
from tests.models import NnxNoisyNorm, assert_identical

X = jnp.linspace(-1.0, 1.0, 8).reshape(2, 4)
KEY = jax.random.key(7)
RNGS = {"dropout": jax.random.key(9)}
TRAINING = ("train", "training", "is_training")
MODES = ("deterministic", "use_running_average")


class Leaf(NamedTuple):
    """A Dropout or a BatchNorm somewhere in a model.

    Attributes:
      mode: `deterministic` for a Dropout, `use_running_average` for a BatchNorm.
      author: what the author wrote: `open`, a `field` or an `argument` with a value, or `follows`,
        an argument with what the method that is called was told.
      value: of the field or the argument.
      depth: how many modules are between the model and it.
    """

    mode: str
    author: str
    value: bool
    depth: int


class Nest(nn.Module):
    leaf: Leaf
    depth: int

    @nn.compact
    def __call__(self, x, told):
        leaf = self.leaf
        if self.depth:
            return Nest(leaf, self.depth - 1, name="inner")(x, told)
        layer = {"deterministic": Halves, "use_running_average": nn.BatchNorm}[leaf.mode]
        field = leaf.value if leaf.author == "field" else None
        argument = {"argument": leaf.value, "follows": told.get(leaf.mode)}.get(leaf.author)
        return layer(**{leaf.mode: field}, name="leaf")(x, **{leaf.mode: argument})


class Halves(nn.Module):
    """A Dropout with a rate."""

    deterministic: bool | None = None

    @nn.compact
    def __call__(self, x, deterministic=None):
        deterministic = nn.merge_param("deterministic", self.deterministic, deterministic)
        return nn.Dropout(0.5)(x, deterministic=deterministic)


class Base(nn.Module):
    leaves: tuple[Leaf, ...]

    def run(self, x, told):
        for index, leaf in enumerate(self.leaves):
            x = Nest(leaf, leaf.depth, name=f"nest_{index}")(x, told)
        return x


def told_by(train):
    return {} if train is None else dict.fromkeys(MODES, not train)


class Silent(Base):
    @nn.compact
    def __call__(self, x):
        return self.run(x, {})


class Train(Base):
    @nn.compact
    def __call__(self, x, train):
        return self.run(x, told_by(train))


class Training(Base):
    @nn.compact
    def __call__(self, x, mask=None, training=True, last=None):
        return self.run(x, told_by(training))


class IsTraining(Base):
    @nn.compact
    def __call__(self, x, *, is_training=False):
        return self.run(x, told_by(is_training))


class Both(Base):
    @nn.compact
    def __call__(self, x, deterministic=True, use_running_average=None):
        told = {"deterministic": deterministic, "use_running_average": use_running_average}
        return self.run(x, told)


class Own(Base):
    """A field and an argument, of which one is given."""

    deterministic: bool | None = None

    @nn.compact
    def __call__(self, x, deterministic=None):
        if self.deterministic is not None or deterministic is not None:
            deterministic = nn.merge_param("deterministic", self.deterministic, deterministic)
        return self.run(x, {"deterministic": deterministic})


class OwnTrain(Base):
    train: bool | None = True

    @nn.compact
    def __call__(self, x):
        return self.run(x, told_by(self.train))


class Holder(nn.Module):
    """The model as a submodule."""

    model: nn.Module

    def setup(self):
        self.part = self.model.clone()

    def __call__(self, *args, **kwargs):
        return self.part(*args, **kwargs)


# The arguments of each model, by name: whether by position, and the default.
REQUIRED = object()
ARGUMENTS: dict[type, dict[str, Any]] = {
    Silent: {},
    Train: {"train": REQUIRED},
    Training: {"training": True},
    IsTraining: {"is_training": False},
    Both: {"deterministic": True, "use_running_average": None},
    Own: {"deterministic": None},
    OwnTrain: {},
}


class Case(NamedTuple):
    model: Base
    is_part: bool
    steps: tuple[Any, ...]
    given: dict[str, bool]
    by_position: bool
    mutable: Any


@st.composite
def cases(draw):
    leaves = draw(
        st.lists(
            st.builds(
                Leaf,
                st.sampled_from(MODES),
                st.sampled_from(("open", "open", "field", "argument", "follows")),
                st.booleans(),
                st.integers(0, 2),
            ),
            min_size=1,
            max_size=3,
        )
    )
    kind = draw(st.sampled_from(list(ARGUMENTS)))
    fields = {}
    if kind is Own:
        fields = {"deterministic": draw(st.sampled_from((None, None, True, False)))}
    if kind is OwnTrain:
        fields = {"train": draw(st.sampled_from((None, True, False)))}
    step = st.one_of(
        st.sampled_from(("train", "eval")),
        st.tuples(
            st.sampled_from(("set_attributes", "set_view", "view", "with_attributes")),
            st.sampled_from(MODES),
            st.booleans(),
        ),
    )
    names = draw(st.lists(st.sampled_from(list(ARGUMENTS[kind]) or [None]), unique=True))
    return Case(
        kind(tuple(leaves), **fields),
        draw(st.booleans()),
        tuple(draw(st.lists(step, max_size=3))),
        {name: draw(st.booleans()) for name in names if name},
        draw(st.booleans()),
        draw(st.sampled_from((None, None, ["batch_stats"]))),
    )


def take(model, step):
    """The model after one of the ways to set a mode."""
    if isinstance(step, str):
        getattr(model, step)()
        return model
    how, name, value = step
    if how in ("view", "with_attributes"):
        return getattr(nnx, how)(model, **{name: value})
    getattr(model, how)(**{name: value})
    return model


def modes_after(steps):
    modes = {}
    for step in steps:
        if isinstance(step, str):
            modes = dict.fromkeys(MODES, step == "eval")
        else:
            modes[step[1]] = step[2]
    return modes


def written_out(case):
    """(the pure Linen model, its arguments, whether statistics may be updated)."""
    kind, own = type(case.model), case.model
    set_modes = modes_after(case.steps)
    in_call = dict(set_modes)
    for name, value in case.given.items():
        if name in TRAINING:
            in_call = dict.fromkeys(in_call, not value)
    in_call.update({n: v for n, v in case.given.items() if n in in_call})
    train = None if not in_call else not any(in_call.values())

    def open_to(name):
        return train if name in TRAINING else in_call.get(name)

    arguments = {}
    for name, default in ARGUMENTS[kind].items():
        is_field = name in {f.name for f in dataclasses.fields(kind)}
        filled = None if is_field else open_to(name)
        value = case.given.get(name, default if filled is None else filled)
        if value is not REQUIRED:
            arguments[name] = value
    fields = {}
    for name in ("deterministic", "train"):
        if hasattr(own, name):
            fields[name] = getattr(own, name)
            # What the wrapped module has of its own is set; in a part of it, only what is None.
            is_filled = open_to(name) is not None and name not in case.given
            if is_filled and (not case.is_part or fields[name] is None):
                fields[name] = open_to(name)
    told = dict.fromkeys(MODES)
    for name in (*arguments, *fields):
        value = arguments.get(name) if arguments.get(name) is not None else fields.get(name)
        if value is not None:
            told |= told_by(value) if name in TRAINING else {name: value}
    leaves = []
    for leaf in own.leaves:
        is_open = leaf.author == "open" or (leaf.author == "follows" and told[leaf.mode] is None)
        filled = leaf._replace(author="field", value=in_call.get(leaf.mode))
        leaves.append(filled if is_open and leaf.mode in in_call else leaf)
    opens = set_modes.get("use_running_average") is False
    opens = opens and in_call.get("use_running_average") is False
    return kind(tuple(leaves), **fields), arguments, opens


ERRORS = (ValueError, TypeError, flax_errors.FlaxError)


def outcome(call):
    """What a call returns, or the kind of error that it raises."""
    try:
        return call()
    except flax_errors.ModifyScopeVariableError:
        return "immutable"
    except ERRORS as error:
        return type(error).__name__


VARIABLES: dict[Any, Any] = {}


def variables_of(case):
    """Variables with statistics that are not the initial ones."""
    leaves = tuple(leaf._replace(author="field", value=False) for leaf in case.model.leaves)
    if (leaves, case.is_part) not in VARIABLES:
        module = Silent(leaves)
        module = Holder(module) if case.is_part else module
        variables = module.init({"params": KEY, **RNGS}, X)
        VARIABLES[leaves, case.is_part] = jax.tree.map(lambda x: x + 0.5, variables)
    return VARIABLES[leaves, case.is_part]


@drawing(
    125,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(cases())
def test_a_call_is_that_of_pure_linen_with_the_open_arguments_written_out(case):
    reference, arguments, opens = written_out(case)
    variables = variables_of(case)
    module = case.model
    if case.is_part:
        reference, module = Holder(reference), Holder(module)
    mutable = case.mutable or (["batch_stats"] if opens and "batch_stats" in variables else [])
    expected = outcome(
        lambda: reference.apply(variables, X, **arguments, rngs=RNGS, mutable=mutable)
    )

    model = bridge.ToNNX.from_variables(module, variables)
    for step in case.steps:
        model = take(model, step)
    kind = type(case.model)
    names = list(ARGUMENTS[kind])
    by_position = ()
    keywords = dict(case.given)
    if case.by_position and kind is not IsTraining and names and names[0] in keywords:
        # The mask of `Training` comes first.
        by_position = (*[None] * (kind is Training), keywords.pop(names[0]))
    call = model.part if case.is_part else model
    found = outcome(lambda: call(X, *by_position, **keywords, rngs=RNGS, mutable=case.mutable))
    if isinstance(expected, str):
        assert found == expected
        assert_identical(model.linen_variables(), variables)
    else:
        assert_identical(found, expected[0])
        assert_identical(model.linen_variables(), {**variables, **expected[1]})


class Validated(nn.Module):
    """BatchNorm and Dropout under one argument, and one of each that is open."""

    @nn.compact
    def __call__(self, x, train):
        x = nn.BatchNorm(use_running_average=not train, name="told")(x)
        x = nn.Dropout(0.5, deterministic=not train)(x)
        x = nn.BatchNorm(name="open")(x)
        return nn.Dropout(0.5)(x)


class WrittenOut(nn.Module):
    """`Validated` with nothing left open."""

    @nn.compact
    def __call__(self, x, train):
        x = nn.BatchNorm(use_running_average=not train, name="told")(x)
        x = nn.Dropout(0.5, deterministic=not train)(x)
        x = nn.BatchNorm(use_running_average=not train, name="open")(x)
        return nn.Dropout(0.5, deterministic=not train)(x)


def test_a_validation_call_after_train_neither_moves_statistics_nor_drops():
    variables = WrittenOut().init(KEY, X, train=False)
    model = bridge.ToNNX.from_variables(Validated(), variables)
    model.train()
    expected = WrittenOut().apply(variables, X, train=False)
    assert_identical(model(X, train=False), expected)
    assert_identical(model(X, False), expected)
    assert_identical(model.linen_variables(), variables)


def test_a_training_call_after_eval_moves_statistics_and_drops():
    variables = WrittenOut().init(KEY, X, train=False)
    model = bridge.ToNNX.from_variables(Validated(), variables)
    model.eval()
    options = {"rngs": RNGS, "mutable": ["batch_stats"]}
    expected, updates = WrittenOut().apply(variables, X, train=True, **options)
    assert_identical(model(X, train=True, **options), expected)
    assert_identical(model.linen_variables(), {**variables, **updates})


def test_dropout_alone_is_switched_on_for_monte_carlo_dropout():
    class Noisy(nn.Module):
        told: bool | None = None
        drops: bool | None = None

        @nn.compact
        def __call__(self, x):
            x = nn.BatchNorm(use_running_average=self.told)(x)
            return nn.Dropout(0.5, deterministic=self.drops)(x)

    variables = Noisy(told=True, drops=True).init(KEY, X)
    model = bridge.ToNNX.from_variables(Noisy(), variables, mutable=["batch_stats"])
    model.eval()
    model.set_attributes(deterministic=False)
    expected = Noisy(told=True, drops=False).apply(variables, X, rngs=RNGS)
    assert_identical(model(X, rngs=RNGS), expected)
    assert_identical(model.linen_variables(), variables)


def test_one_argument_for_both_modes_moves_no_statistics_if_they_differ():
    module = models.LinenClassifier()
    variables = module.init(KEY, X, train=False)
    model = bridge.ToNNX.from_variables(module, variables, mutable=["batch_stats"])
    for deterministic in (True, False):
        model.set_attributes(deterministic=deterministic, use_running_average=not deterministic)
        assert_identical(model(X), module.apply(variables, X, train=False))
        assert_identical(model.linen_variables(), variables)


@pytest.mark.parametrize("lift", [nn.remat, nn.jit], ids=["remat", "jit"])
@pytest.mark.parametrize("has_mask", [False, True])
def test_a_mode_is_passed_by_position_where_the_method_takes_it_so(lift, has_mask):
    class Plain(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            if train:
                return nn.Dropout(0.5)(x, deterministic=False)
            return nn.Dense(4)(x)

    class Masked(nn.Module):
        @nn.compact
        def __call__(self, x, mask=None, train=False):
            if train:
                return nn.Dropout(0.5)(x, deterministic=False)
            return nn.Dense(4)(x)

    module = lift(Masked, static_argnums=(3,))() if has_mask else lift(Plain, static_argnums=(2,))()
    gap = (None,) if has_mask else ()
    variables = module.init(KEY, X, *gap, False)
    model = bridge.ToNNX.from_variables(module, variables)
    for train in (False, True, False):
        model.train() if train else model.eval()
        expected = module.apply(variables, X, *gap, train, rngs=RNGS)
        assert_identical(model(X, rngs=RNGS), expected)


def test_a_mode_is_passed_by_position_to_a_submodule():
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            return nn.Dropout(0.5)(x, deterministic=False) if train else x * 2

    class Model(nn.Module):
        def setup(self):
            self.block = nn.remat(Block, static_argnums=(2,))()

        def __call__(self, x, train):
            return self.block(x, train)

    model = bridge.ToNNX(Model(), KEY)
    model.eval()
    assert_identical(model.block(X), X * 2)
    model.train()
    expected = Model().apply({}, X, True, rngs=RNGS)
    assert_identical(model.block(X, rngs=RNGS), expected)
    assert_identical(model.block(X, False), X * 2)


def test_a_compiled_submodule_is_compiled_again_for_another_mode():
    """`nn.jit` tells programs apart by the fields of a module, and these are deeper inside."""

    class Inner(nn.Module):
        written: bool | None = None

        @nn.compact
        def __call__(self, x):
            return nn.Dropout(0.5, deterministic=self.written)(nn.Dropout(0.0)(x, True))

    compiled = nn.jit(Inner)

    class Model(nn.Module):
        drops: bool | None = None

        @nn.compact
        def __call__(self, x):
            return compiled(self.drops)(x)

    model = bridge.ToNNX(Model())
    for deterministic in (True, False, True):
        model.set_attributes(deterministic=deterministic)
        expected = Model(deterministic).apply({}, X, rngs=RNGS)
        assert_identical(model(X, rngs=RNGS), expected)


def native_values(model):
    return [leaf.get_value() for _, leaf in nnx.to_flat_state(nnx.state(model, nnx.BatchStat))]


def test_a_call_s_own_argument_reaches_an_nnx_module_inside():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            return bridge.to_linen(NnxNoisyNorm, name="inner")(x)

    model = bridge.ToNNX(Model(), nnx.Rngs(0)).lazy_init(X, train=False)
    native = NnxNoisyNorm(rngs=nnx.Rngs(0))
    native.eval()
    model.train()
    before = model.linen_variables()
    assert_identical(model(X, train=False), native(X))
    assert_identical(model.linen_variables(), before)
    native.train()
    native(X)
    model(X)
    means = jax.tree.leaves(model.linen_variables()["batch_stats"])
    assert_identical(means, native_values(native))


def test_a_model_that_is_called_inside_but_is_no_part_keeps_its_own_modes():
    class Open(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dropout(0.5)(x)

    other = bridge.ToNNX(Open())
    model = bridge.ToNNX(models.LinenApplies(lambda _, x: other(x, rngs=RNGS)))
    model.eval()
    with pytest.raises(ValueError, match="deterministic"):
        model(X)
    other.train()
    model.eval()
    assert_identical(model(X), other(X, rngs=RNGS))
    other.eval()
    model.train()
    assert_identical(model(X), X)


@pytest.mark.parametrize("only", [..., bridge.ToNNX])
@pytest.mark.parametrize("inside", [False, True])
def test_a_view_of_a_model_has_the_mode_and_the_model_has_not(only, inside):
    class Parent(nnx.Module):
        def __init__(self, model):
            self.model = model

        def __call__(self, x):
            return self.model(x)

    wrapped = bridge.ToNNX(nn.Dropout(0.5), nnx.Rngs(dropout=0))
    wrapped.train()
    model = Parent(wrapped) if inside else wrapped
    view = nnx.view(model, deterministic=True, only=only)
    assert_identical(view(X), X)
    assert not jnp.array_equal(model(X), X)
    assert "deterministic" in nnx.view_info(model)
    with pytest.raises(ValueError, match="nonsense"):
        nnx.view(model, nonsense=True)


def test_what_is_said_of_an_own_field_last_stands():
    class Own(nn.Module):
        train: bool = True

        @nn.compact
        def __call__(self, x):
            return nn.Dropout(0.5, deterministic=not self.train)(x)

    expected = {t: Own(t).apply({}, X, rngs=RNGS) for t in (True, False)}
    model = bridge.ToNNX(Own())
    for step, train in [
        (model.eval, False),
        (lambda: model.set_attributes(train=True), True),
        (model.eval, False),
        (model.train, True),
        (lambda: model.set_attributes(train=False), False),
    ]:
        step()
        assert_identical(model(X, rngs=RNGS), expected[train])


def test_what_setup_hands_on_is_what_was_written():
    """A submodule whose field was filled could not be given the argument."""

    class Inner(nn.Module):
        deterministic: bool | None = None

        def setup(self):
            self.dropout = nn.Dropout(0.5, deterministic=self.deterministic)

        def __call__(self, x, deterministic=None):
            return self.dropout(x, deterministic=deterministic)

    class Outer(nn.Module):
        @nn.compact
        def __call__(self, x):
            return Inner()(x, deterministic=True) + Inner()(x)

    class Explicit(nn.Module):
        @nn.compact
        def __call__(self, x):
            return Inner()(x, deterministic=True) + Inner()(x, deterministic=False)

    model = bridge.ToNNX(Outer())
    model.train()
    assert_identical(model(X, rngs=RNGS), Explicit().apply({}, X, rngs=RNGS))


def test_an_argument_that_says_nothing_clear_fills_nothing():

    class Open(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            return nn.Dropout(0.5)(x)

    model = bridge.ToNNX(Open())
    model.eval()
    assert_identical(model(X), X)
    with pytest.raises(ValueError, match="deterministic"):
        model(X, train="perhaps")


class Named(nn.Module):
    def setup(self):
        self.norm = nn.BatchNorm(momentum=0.5)

    def __call__(self, x, train=False):
        return self.encode(x, train)

    def encode(self, x, train=False):
        return self.norm(x, use_running_average=not train)

    def required(self, x, /, train):
        return self.encode(x, train)

    def opposite(self, x, *, deterministic=True):
        return self.encode(x, not deterministic)


@pytest.mark.parametrize("said", [True, False, None])
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("name", ["encode", "required", "opposite"])
def test_a_named_method_obeys_the_modes_as_a_call_of_it_in_pure_linen(name, train, said):
    module = Named()
    variables = module.init(KEY, X, True)

    def argument(value):
        return {"deterministic": not value} if name == "opposite" else {"train": value}

    now = argument(train if said is None else said)
    expected, updates = module.apply(variables, X, **now, method=name, mutable=["batch_stats"])
    own = {} if said is None else argument(said)
    own |= {"mutable": ["batch_stats"]} if said else {}
    for run in (
        lambda model: getattr(model, name)(X, **own),
        lambda model: model(X, method=name, **own),
        lambda model: getattr(nnx.view(model, deterministic=not train), name)(X, **own),
    ):
        model = bridge.ToNNX.from_variables(module, variables)
        (model.train if train else model.eval)()
        assert_identical(run(model), expected)
        assert_identical(model.linen_variables()["batch_stats"], updates["batch_stats"])


def test_a_named_method_creates_in_training_what_it_creates_in_linen():
    class Grows(nn.Module):
        @nn.compact
        def encode(self, x, train=False):
            return nn.Dense(2)(x) if train else x

    model = bridge.ToNNX(Grows(), KEY)
    model.train()
    bridge.lazy_init(model.encode, X)
    expected = Grows().init(KEY, X, train=True, method="encode")
    assert_identical(model.linen_variables(), expected)
