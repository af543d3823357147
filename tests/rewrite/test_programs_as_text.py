"""Programs as text: each class is proven, and does what Linen does for values written by hand."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import bridge
from bridge import port
from bridge.rewrite import Rewrite
from tests.rewrite import programs, programs_sizes, programs_structure, programs_unseen
from tests.rewrite.programs import Of, Program
from tests.rewrite.weights import random_weights, with_weights

PROGRAMS = {
    **programs.PROGRAMS,
    **programs_structure.PROGRAMS,
    **programs_sizes.PROGRAMS,
    **programs_unseen.PROGRAMS,
}


class Rewritten(NamedTuple):
    """A program, and what became of it.

    Attributes:
        program: the program.
        old: the module with the Linen classes.
        new: the module with the new ones.
        result: of the rewriting.
    """

    program: Program
    old: Any
    new: Any
    result: Rewrite


def fields_of(fields: Mapping[str, Any], module: Any) -> dict[str, Any]:
    """Values of fields, those made that need a class of the program."""
    return {k: v.made(module) if isinstance(v, Of) else v for k, v in fields.items()}


def inputs_of(program: Program) -> list[jax.Array]:
    generator = np.random.default_rng(0)
    return [
        jnp.asarray(generator.integers(0, 5, size=shape[1:]), "int32")
        if shape[0] == "tokens"
        else jnp.asarray(generator.normal(size=shape), "float32")
        for shape in program.inputs
    ]


@pytest.fixture
def rewritten(imported_program: Callable[..., Any]) -> Any:
    """Rewrites a program in files of its own."""

    def rewrites(program: Program) -> Rewritten:
        old = imported_program(program.source, program.files, program.newline)
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs_of(program)]

        def makes(fields: Mapping[str, Any]) -> Any:
            return lambda: old.Model(**fields_of(fields, old))

        also = [makes(each) for each in program.also]
        result = bridge.rewrite(makes(program.fields), *shapes, gradients=False, also=also)
        result.write()
        importlib.invalidate_caches()
        return Rewritten(program, old, importlib.import_module(f"{old.__name__}_nnx"), result)

    return rewrites


def check_same(
    found: Rewritten, fields: Mapping[str, Any], name: str = "Model", rtol: float = 0
) -> None:
    """Compares both models for some values of the fields, or classes that take the same inputs."""
    inputs = inputs_of(found.program)
    given = fields_of({**found.program.fields, **fields}, found.old)
    linen = getattr(found.old, name)(**given)
    variables = random_weights(linen, *inputs)
    new = getattr(found.new, name)
    model = with_weights(lambda: new(**given, **found.result.sizes[0], rngs=nnx.Rngs(0)), variables)
    expected = linen.apply(variables, *inputs)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(expected))
    same = functools.partial(np.testing.assert_allclose, rtol=rtol, atol=rtol)
    jax.tree.map(same, model(*inputs), expected)


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_is_proven_and_does_what_linen_does_for_other_values(rewritten, name):
    found = rewritten(PROGRAMS[name])
    assert {each.level for each in found.result.classes} == {"proven"}, str(found.result)
    assert found.result.is_proven
    # The proof itself is of the program's own values.
    for fields in found.program.values or [{}]:
        check_same(found, fields, rtol=found.program.rtol)


def test_a_size_is_set_once_where_a_branch_makes_no_layer(rewritten):
    program = programs_structure.GROWN["an activation behind the last layer that is None"]
    (text,) = rewritten(program).result.sources.values()
    assert text.count("features_in = width") == 2


def test_a_size_is_set_where_it_changes_and_is_read_behind_it(rewritten):
    name = "a token of the classes and a pooling that a field chooses"
    (text,) = rewritten(programs_sizes.PROGRAMS[name]).result.sources.values()
    lines = [line.strip() for line in text.splitlines() if "features_in = " in line]
    assert lines == ["features_in = self.hidden", "features_in = self.represented"]


@pytest.mark.filterwarnings("ignore:The inputs_kv arg:DeprecationWarning")
def test_attention_is_given_its_inputs_by_name(rewritten):
    found = rewritten(programs_structure.INPUTS_KV)
    assert [each.level for each in found.result.classes] == ["proven"], str(found.result)
    for fields in ({}, *found.program.values):
        check_same(found, fields, rtol=1e-5)


def test_a_flag_that_compares_sizes_stays_a_field(rewritten):
    found = rewritten(programs_unseen.FLAG_OF_SIZES)
    levels = {each.name: each.level for each in found.result.classes}
    assert levels == {"Combine": "proven for this configuration", "Model": "proven"}
    for fields in ({}, *found.program.values):
        check_same(found, fields)


CHOICE = """
class Encoder(nn.Module):
    norm: nn.Module | None = None

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(x.shape[-1])(x))
        return x if self.norm is None else self.norm(x)


class Model(nn.Module):
    width: int = 4
    norm: bool = True

    @nn.compact
    def __call__(self, x):
        norm = nn.LayerNorm() if self.norm else None
        return Encoder(norm=norm)(nn.Dense(self.width)(x))
"""


def test_a_module_is_given_another_one_or_none(rewritten):
    found = rewritten(Program(CHOICE, []))
    assert found.result.is_proven
    assert {e.name: e.level for e in found.result.classes}["Model"] == "proven", str(found.result)
    for norm in (True, False):
        new = found.new.Model(norm=norm, **found.result.sizes[0], rngs=nnx.Rngs(0))
        assert (new.encoder.norm is None) is not norm


PARTS = """
class Part(nn.Module):
    width: int = 6
    head: int | None = None
    norm: str = "none"

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(self.width)(x)
        match self.norm:
            case "layer":
                x = nn.LayerNorm()(x)
            case "rms":
                x = nn.RMSNorm()(x)
        if self.head is not None:
            x = nn.Dense(self.head)(x)
        return x


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.tanh(Part()(x))
"""


def test_the_layers_of_a_part_that_no_entry_makes_are_made(rewritten):
    found = rewritten(Program(PARTS))
    assert {each.level for each in found.result.classes} == {"proven"}, str(found.result)
    for fields in ({}, {"head": 3}, {"norm": "layer", "width": 5}, {"norm": "rms", "head": 2}):
        check_same(found, fields, "Part")


KINDS = """
class Model(nn.Module):
    kind: str = "dense"
    width: int = 6

    @nn.compact
    def __call__(self, x):
        if self.kind == "dense":
            x = nn.Dense(self.width)(x)
        else:
            x = nn.LayerNorm()(x)
        return x * self.param("scale", nn.initializers.ones, (6,))
"""


def test_a_class_of_several_entries_is_varied_in_each(rewritten):
    """The smallest instance has no layer of this width, and takes each value."""
    program = Program(KINDS, inputs=[(2, 6)], also=[{"kind": "norm"}])
    (found,) = rewritten(program).result.classes
    assert found.level == "proven"
    (line,) = (each.strip() for each in KINDS.splitlines() if "return" in each)
    other = KINDS.replace(line, "return nn.Dense(3)(jnp.flip(x, 0))")
    program = Program(other, also=[{"kind": "norm"}])
    (found,) = rewritten(program).result.classes
    assert found.level == "proven for this configuration"
    assert any("width=" in note for note in found.notes), str(found)


GIVEN_ON = """
def scaled(x, size, act):
    return act(nn.Dense(size)(x))


class Model(nn.Module):
    width: int = 4

    @nn.compact
    def __call__(self, x):
        act = nn.tanh
        width = self.width
        shape = (width,)
        x = act(nn.Dense(width)(x)) * self.param("scale", nn.initializers.ones, shape)
        return scaled(x, width, act)
"""


def test_a_call_keeps_no_line_that_only_constructors_need(rewritten):
    found = rewritten(Program(GIVEN_ON))
    assert {each.level for each in found.result.classes} == {"proven"}, str(found.result)
    (text,) = found.result.sources.values()
    call = text[text.rindex("def __call__") :]
    assert "act = nnx.tanh" in call
    assert "width" not in call
    assert "shape" not in call
    check_same(found, {"width": 3})


IN_BRANCHES = """
class Model(nn.Module):
    wide: bool = False
    depth: int = 2

    def setup(self):
        if self.wide:
            self.layers = [nn.Dense(8 + i) for i in range(self.depth)]
        else:
            self.layers = [nn.Dense(4) for _ in range(self.depth)]

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x
"""


@pytest.mark.parametrize("also", [(), ({"wide": True},)])
def test_lists_of_layers_in_branches_of_setup_take_their_sizes(rewritten, also):
    """Regression: an argument with their sizes was no iterator below a branch."""
    found = rewritten(Program(IN_BRANCHES, also=also))
    assert found.result.is_proven, str(found.result)
    assert [each.level for each in found.result.classes] == ["proven"], str(found.result)
    for fields in ({}, {"depth": 3}, {"wide": True}, {"wide": True, "depth": 3}):
        check_same(found, fields)


UNCHOSEN = """
class Model(nn.Module):
    width: int = 3
    more: bool = False

    def setup(self):
        self.first = nn.Dense(self.width)
        self.adapter = nn.Dense(2) if self.more else None

    def __call__(self, x):
        x = self.first(x)
        if self.adapter is not None:
            x = self.adapter(x, x)
        return x
"""


def test_a_branch_of_an_expression_in_setup_that_cannot_run_raises(rewritten):
    found = rewritten(Program(UNCHOSEN))
    assert found.result.is_proven
    assert [each.level for each in found.result.classes] == ["needs review"], str(found.result)
    check_same(found, {"width": 5})
    with pytest.raises(NotImplementedError, match="when Model was rewritten"):
        found.new.Model(more=True, in_features=8, rngs=nnx.Rngs(0))


STREAMS = """
class Model(nn.Module):
    codes: int = 5
    stream: str = "noise"

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(self.codes)(x)
        x = x + jax.random.gumbel(self.make_rng("gumbel"), x.shape)
        x = x + jax.random.normal(self.make_rng("noise"), x.shape)
        return x + jax.random.normal(self.make_rng(self.stream), x.shape)
"""


def test_a_stream_may_have_the_name_of_a_distribution(rewritten):
    found = rewritten(Program(STREAMS))
    assert found.result.is_proven
    (each,) = found.result.classes
    assert each.level == "needs review"
    assert {note.rpartition(": ")[2] for note in each.notes} == {
        "keys are drawn from an NNX stream"
    }
    (text,) = found.result.sources.values()
    assert 'self.rngs["gumbel"]()' in text
    assert "self.rngs.noise()" in text
    new = found.new.Model(stream="other", in_features=8, rngs=nnx.Rngs(0, noise=1, other=2))
    new(jnp.ones((2, 8)))
    assert [int(stream.count[...]) for stream in (new.rngs.noise, new.rngs.other)] == [1, 1]


REGISTERED = """
from registering import register


@register
class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(x)
"""
REGISTERING = """
KNOWN = {}


def register(cls):
    assert cls.__name__ not in KNOWN
    KNOWN[cls.__name__] = cls
    return cls
"""


def test_a_decorator_of_another_file_is_left_out_and_named(rewritten):
    found = rewritten(Program(REGISTERED, files={"registering.py": REGISTERING}))
    assert found.result.is_proven
    (each,) = found.result.classes
    assert each.level == "needs review"
    assert "@register is left out" in each.notes[0]
    (text,) = found.result.sources.values()
    assert "register" not in text


GIVEN = """
class Head(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.width)(x)


class Model(nn.Module):
    layers: Sequence[nn.Module]
    heads: Any

    @nn.compact
    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return {name: head(x) for name, head in self.heads.items()}
"""


def test_modules_that_a_model_is_given_in_a_list_and_a_dict_are_rewritten(rewritten):
    fields = {"layers": Of("[Head(4), Head(5)]"), "heads": Of("{'a': Head(2), 'b_c': Head(6)}")}
    found = rewritten(Program(GIVEN, fields=fields))
    assert {each.level for each in found.result.classes} == {"proven"}, str(found.result)
    assert found.result.is_proven
    (x,) = inputs_of(found.program)
    linen = found.old.Model(**fields_of(fields, found.old))
    variables = random_weights(linen, x)

    def head(size, width):
        return found.new.Head(width, in_features=size, rngs=nnx.Rngs(0))

    given = {"a": head(5, 2), "b_c": head(5, 6)}
    model = found.new.Model([head(8, 4), head(4, 5)], given, rngs=nnx.Rngs(0))
    port.plan(variables, model, found.result.rules).apply()
    jax.tree.map(np.testing.assert_array_equal, model(x), linen.apply(variables, x))


TIED = """
class Model(nn.Module):
    def setup(self):
        self.decoder = nn.Dense(5, use_bias=False)

    def __call__(self, x, shared=None):
        if shared is not None:
            return self.decoder.apply({"params": {"kernel": shared.T}}, x)
        return self.decoder(x)
"""


def test_what_only_linen_has_is_to_be_reviewed_where_it_did_not_run(rewritten):
    (found,) = rewritten(Program(TIED)).result.classes
    assert found.level == "needs review"
    assert "self.decoder.apply is read in a branch that did not run" in found.notes[0]


def test_the_rate_of_dropout_may_be_an_argument_of_a_call(rewritten):
    (program,) = programs_structure.RATES.values()
    found = rewritten(program)
    (x,) = inputs_of(program)
    linen, keys = found.old.Model(), {"dropout": jax.random.key(3)}
    variables = random_weights(linen, x)
    sizes = found.result.sizes[0]
    model = with_weights(lambda: found.new.Model(**sizes, rngs=nnx.Rngs(0)), variables)
    for rate in (0.0, 1.0):
        expected = linen.apply(variables, x, rate=rate, train=True, rngs=keys)
        np.testing.assert_array_equal(model(x, rate=rate, train=True), expected)
    drawn = [np.asarray(model(x, rate=0.3, train=True) == 0) for _ in range(8)]
    assert np.any(drawn)
    assert len({mask.tobytes() for mask in drawn}) > 1


def test_a_call_is_on_one_line_once_its_constructor_is_gone(rewritten):
    found = rewritten(PROGRAMS["a field that is annotated twice"])
    (text,) = found.result.sources.values()
    own = text[text.index("class Model") :]
    assert "        y = self.attention(x, x)\n" in own
    assert own.count("width: int") == 1


IN_ATTENTION = """
class Scaled(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x):
        return x * self.param("scale", nn.initializers.ones, (self.width,))


def attention(query, key, value, *args, **kwargs):
    return nn.dot_product_attention(Scaled(query.shape[-1])(query), key, value)


class Block(nn.Module):
    width: int = 8

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(self.width)(x)
        return nn.MultiHeadDotProductAttention(num_heads=2, attention_fn=attention)(x)


class Model(nn.Module):
    width: int = 6

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.width)(Block()(x))
"""


def test_attention_whose_function_makes_layers_stays_linen_by_itself(rewritten):
    found = rewritten(Program(IN_ATTENTION, inputs=[(2, 5, 8)]))
    assert found.result.is_proven, str(found.result)
    levels = {each.name: each.level for each in found.result.classes}
    assert levels == {"Scaled": "left Linen", "Block": "proven", "Model": "proven"}
    (block,) = (each for each in found.result.classes if each.name == "Block")
    assert "attention stays Linen" in block.notes[0]


PROMOTED = """
def promoted(*arrays, dtype=None):
    return tuple(None if each is None else jnp.asarray(each, dtype) for each in arrays)


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(4, promote_dtype=promoted)(x)
        return nn.Dense(3)(x)
"""


def test_a_layer_with_a_promotion_of_its_own_stays_linen(rewritten):
    """NNX gives the function a tuple."""
    found = rewritten(Program(PROMOTED))
    assert found.result.is_proven, str(found.result)
    (each,) = found.result.classes
    assert each.level == "proven"
    assert "dense_0 stays Linen: nnx.Linear has no argument promote_dtype" in each.notes[0]


SHARED = """
class Body(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x):
        return nn.relu(nn.Dense(self.width)(x))


class Head(nn.Module):
    bodies: Sequence[nn.Module]
    out: int
    norm: nn.Module

    @nn.compact
    def __call__(self, x):
        for body in self.bodies:
            x = body(x)
        return nn.Dense(self.out)(self.norm(x))


class Model(nn.Module):
    width: int = 4

    def setup(self):
        first = Body(6)
        body = Body(self.width)
        norm = nn.LayerNorm()
        self.actor = Head([first, body], 2, norm)
        self.critic = Head([first, body], 1, norm=norm)

    def __call__(self, x):
        return self.actor(x), self.critic(x)
"""


def test_modules_of_setup_that_two_others_are_given_have_weights_once(rewritten):
    found = rewritten(Program(SHARED))
    assert found.result.is_proven, str(found.result)
    levels = {each.name: each.level for each in found.result.classes}
    # Whoever makes a `Head` alone has no modules to give it.
    assert levels == {"Body": "proven", "Head": "proven for this configuration", "Model": "proven"}
    (x,) = inputs_of(found.program)
    linen = found.old.Model(width=3)
    variables = random_weights(linen, x)
    model = found.new.Model(width=3, **found.result.sizes[0], rngs=nnx.Rngs(0))
    assert model.actor.bodies[1] is model.critic.bodies[1]
    port.plan(variables, model, found.result.rules).apply()
    jax.tree.map(np.testing.assert_array_equal, model(x), linen.apply(variables, x))


ROOTS = """
class Mlp(nn.Module):
    width: int = 5

    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(nn.relu(nn.Dense(self.width)(x)))


axes = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
Each = nn.vmap(Mlp, in_axes=0, **axes)
Ensemble = nn.vmap(Mlp, in_axes=None, axis_size=4, **axes)


def Chain():
    return nn.Sequential([nn.Dense(3), nn.relu, nn.Sequential([Mlp(2)])])


Model = Ensemble
"""


@pytest.mark.parametrize("name", ["Each", "Ensemble", "Chain"])
def test_the_classes_of_a_transform_or_a_sequence_are_rewritten(rewritten, name):
    found = rewritten(Program(ROOTS.replace("Model = Ensemble", f"Model = {name}")))
    assert found.result.is_proven, str(found.result)
    assert [(each.name, each.level) for each in found.result.classes] == [("Mlp", "proven")]
    assert found.result.parts == ("Mlp",)
    (x,) = inputs_of(found.program)
    linen = found.old.Mlp(4)
    variables = random_weights(linen, x)
    model = with_weights(lambda: found.new.Mlp(4, in_features=8, rngs=nnx.Rngs(0)), variables)
    np.testing.assert_array_equal(model(x), linen.apply(variables, x))
