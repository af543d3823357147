"""Box codecs: how a metadata box becomes (value, fields) and back, and which boxes cannot."""

import dataclasses
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx, struct
from flax.core import meta
from hypothesis import given

import bridge
import registry
from registry._boxes import derive_codec
from tests.strategies import Documented, Sealed, exact, linen_boxes

KERNEL = jnp.arange(6.0).reshape(2, 3)


class Box(meta.AxisMetadata):
    """What every box has to have, around whatever field a subclass has."""

    def unbox(self):
        return self.value

    def replace_boxed(self, val):
        return dataclasses.replace(self, value=val)

    def add_axis(self, index, params):
        return self

    def remove_axis(self, index, params):
        return self


class Plain(Box):
    """Neither a dataclass nor with a codec."""

    def __init__(self, value):
        self.value = value


class WithMethods(Box):
    """No dataclass, but with the two methods that Flax looks for; the first destroys the box."""

    def __init__(self, value, names):
        self.value = value
        self.names = names

    def to_nnx_metadata(self):
        fields = vars(self)
        fields["out_sharding"] = fields.pop("names")
        return fields

    @classmethod
    def from_nnx_metadata(cls, metadata):
        return cls(metadata["value"], metadata["out_sharding"])


class WithHalfOfTheMethods(Box):
    def __init__(self, value):
        self.value = value

    def to_nnx_metadata(self):
        return vars(self)


@dataclasses.dataclass
class Ambiguous(Box):
    content: object
    scale: object


@dataclasses.dataclass
class WithReservedField(Box):
    value: object
    hijax: bool


@dataclasses.dataclass
class WithLateField(Box):
    value: object
    made: int = dataclasses.field(init=False, default=0)


@dataclasses.dataclass
class WithInitOnlyField(Box):
    value: object
    seed: dataclasses.InitVar[int]

    def __post_init__(self, seed):
        pass


@dataclasses.dataclass(init=False)
class WithOwnConstructor(Box):
    value: object
    names: tuple

    def __init__(self, array, *axis_names):
        self.value = array
        self.names = axis_names


@struct.dataclass
class WithReservedValue(Box):
    """Its value has another name, and `value` is a field beside it."""

    content: object
    value: int = struct.field(pytree_node=False, default=0)


class WithAllFields(Box):
    """Says nothing of the value, only what it has besides."""

    def __init__(self, value, note):
        self.inside, self.note = value, note

    def unbox(self):
        return self.inside

    def to_nnx_metadata(self):
        return {"note": self.note}

    @classmethod
    def from_nnx_metadata(cls, metadata):
        return cls(metadata["value"], metadata["note"])


UNSUPPORTED = (
    Plain(KERNEL),
    WithHalfOfTheMethods(KERNEL),
    Ambiguous(KERNEL, 2.0),
    WithReservedField(KERNEL, True),
    WithLateField(KERNEL),
    WithInitOnlyField(KERNEL, seed=3),
    WithOwnConstructor(KERNEL, "a", "b"),
)


@dataclasses.dataclass(frozen=True)
class Quantised(Box):
    """A dataclass whose value is the field of that name, beside another array."""

    value: object
    scale: object
    bits: int = 8


class Layered(nn.Partitioned):
    """A subclass of Flax's box with one more field."""

    layer: str = struct.field(pytree_node=False, default="")


RULES = (("embed", "model"),)
BOXES = (
    nn.Partitioned(KERNEL, ("embed", None)),
    nn.Partitioned(KERNEL, (), mesh=jax.sharding.AbstractMesh((2,), ("model",))),
    nn.LogicallyPartitioned(KERNEL, ("embed", "mlp"), rules=RULES),
    nn.LogicallyPartitioned(KERNEL, ("embed", "mlp")),
    Layered(KERNEL, ("embed", None), layer="first"),
    Documented(KERNEL, author="me", axes=("embed", None)),
    Quantised(KERNEL, scale=jnp.ones(3), bits=4),
    WithMethods(KERNEL, ("embed", None)),
    Sealed(KERNEL, seal=7),
)


def kind(box):
    return type(box).__name__


@pytest.mark.parametrize("box", BOXES, ids=kind)
def test_a_box_is_taken_apart_and_put_together_again(box):
    before = exact(box)
    codec = registry.current().codec_for(type(box))
    value, fields = codec.to_fields(box)
    assert value is KERNEL
    assert exact(box) == before
    assert exact(codec.from_fields(value, fields)) == before
    assert exact(codec.from_fields(value, dict(fields))) == before


@given(linen_boxes())
def test_any_box_is_taken_apart_and_put_together_again(box):
    before = exact(box)
    codec = registry.current().codec_for(type(box))
    assert exact(codec.from_fields(*codec.to_fields(box))) == before
    assert exact(box) == before


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Partitioned(KERNEL, ("embed", None)),
        lambda: nn.LogicallyPartitioned(KERNEL, ("embed", None), rules=RULES),
    ],
)
def test_fields_of_flax_s_boxes_have_the_names_they_have_on_a_variable(make):
    # Flax's own method empties a LogicallyPartitioned, so it gets a box of its own.
    expected = dict(make().to_nnx_metadata())
    value, fields = registry.current().codec_for(type(make())).to_fields(make())
    assert {"value": value, **fields} == expected


@pytest.mark.parametrize("box", BOXES, ids=kind)
def test_the_fields_of_a_box_are_metadata_of_its_variable(box):
    _, fields = registry.current().codec_for(type(box)).to_fields(box)
    variable = bridge.linen_to_nnx({"params": {"w": box}})["w"]
    metadata = variable.get_metadata()
    assert {name: metadata[name] for name in fields} == dict(fields)
    assert metadata["linen_meta_type"] is type(box)


@pytest.mark.parametrize("box", UNSUPPORTED, ids=kind)
def test_a_box_that_cannot_be_carried_raises_on_import(box):
    with pytest.raises(registry.UnsupportedBoxError) as caught:
        bridge.linen_to_nnx({"params": {"w": box}})
    message = str(caught.value)
    assert f"{__name__}.{kind(box)}" in message
    assert f"register_box({kind(box)}, to_fields, from_fields)" in message
    assert caught.value.box_type is type(box)


@pytest.mark.parametrize("box", UNSUPPORTED, ids=kind)
def test_a_box_that_cannot_be_carried_is_left_as_it_was(box):
    before = exact(vars(box))
    with pytest.raises(registry.UnsupportedBoxError):
        bridge.linen_to_nnx({"params": {"w": box}})
    assert exact(vars(box)) == before


def test_the_remedy_for_an_unsupported_box_works():
    class Remedied(Plain):
        pass

    with pytest.raises(registry.UnsupportedBoxError):
        registry.current().codec_for(Remedied)
    registry.register_box(
        Remedied, lambda box: (box.value, {}), lambda value, fields: Remedied(value)
    )
    variables = {"params": {"w": Remedied(KERNEL)}}
    assert exact(bridge.nnx_to_linen(bridge.linen_to_nnx(variables))) == exact(variables)


def test_a_registered_codec_goes_before_the_derived_and_the_last_counts():
    @dataclasses.dataclass
    class Counted(Box):
        value: object
        count: int

    for step in (1, 2):
        registry.register_box(
            Counted,
            lambda box: (box.value, {"count": box.count}),
            lambda value, fields, step=step: Counted(value, fields["count"] + step),
        )
        codec = registry.current().codec_for(Counted)
        assert codec.from_fields(KERNEL, {"count": 0}).count == step


def test_a_codec_of_a_parent_does_not_serve_a_subclass():
    class Child(Sealed):
        pass

    with pytest.raises(registry.UnsupportedBoxError, match="Child"):
        registry.current().codec_for(Child)


def test_a_codec_may_be_in_force_in_one_block_only():
    codec = registry.BoxCodec(lambda box: (box.value, {}), lambda value, fields: Plain(value))
    variables = {"params": {"w": Plain(KERNEL)}}
    with registry.use(registry.current().extend(boxes={Plain: codec})):
        state = bridge.linen_to_nnx(variables)
        assert exact(bridge.nnx_to_linen(state)) == exact(variables)
    with pytest.raises(registry.UnsupportedBoxError):
        bridge.linen_to_nnx(variables)


def test_a_codec_in_the_default_registry_is_kept_by_extend():
    extended = registry.current().extend({"tests_boxes": nnx.LoRAParam})
    assert extended.codec_for(Sealed) is registry.current().codec_for(Sealed)


def test_fields_that_the_box_does_not_know_do_not_reach_its_constructor():
    codec = registry.current().codec_for(nn.Partitioned)
    box = codec.from_fields(KERNEL, {"out_sharding": ("a", "b"), "tag": "noise"})
    assert exact(box) == exact(nn.Partitioned(KERNEL, ("a", "b")))
    assert codec.names == {"out_sharding", "mesh"}


@pytest.mark.parametrize("found", [int, None, "Partitioned", nnx.Param, BOXES[0]], ids=kind)
def test_only_box_types_have_codecs(found):
    with pytest.raises(registry.InvalidRegistrationError, match="AxisMetadata"):
        registry.register_box(found, lambda box: (box, {}), lambda value, fields: value)


def not_a_pair_of_functions():
    def function(*arguments):
        return arguments

    return [
        pair for pair in itertools.product((None, 3, function), repeat=2) if function not in pair
    ]


@pytest.mark.parametrize(("to_fields", "from_fields"), not_a_pair_of_functions())
def test_a_codec_is_made_of_functions(to_fields, from_fields):
    with pytest.raises(registry.InvalidRegistrationError, match="found"):
        registry.register_box(Ambiguous, to_fields, from_fields)
    with pytest.raises(registry.UnsupportedBoxError):
        registry.current().codec_for(Ambiguous)


@pytest.mark.parametrize("codec", [None, (len, len), registry.BoxCodec], ids=repr)
def test_extend_takes_nothing_but_codecs_for_boxes(codec):
    with pytest.raises(registry.InvalidRegistrationError, match="BoxCodec"):
        registry.Registry().extend(boxes={Plain: codec})


def test_a_box_whose_metadata_lacks_the_value_is_unboxed():
    codec = registry.current().codec_for(WithAllFields)
    value, fields = codec.to_fields(WithAllFields(KERNEL, "x"))
    assert value is KERNEL
    assert fields == {"note": "x"}
    back = codec.from_fields(KERNEL, {"note": "x"})
    assert (back.inside, back.note) == (KERNEL, "x")


def test_a_field_called_value_is_the_value_whatever_else_could_be_it():
    codec = registry.current().codec_for(WithReservedValue)
    assert codec.to_fields(WithReservedValue(KERNEL, 3)) == (3, {"content": KERNEL})


@pytest.mark.parametrize("name", ["hijax", "ref", "eager_sharding"])
def test_a_field_with_another_meaning_on_a_variable_is_refused_by_name(name):
    box_type = dataclasses.make_dataclass("Reserved", [("value", object), name], bases=(Box,))
    with pytest.raises(registry.UnsupportedBoxError, match=rf"\['{name}'\] mean something else"):
        registry.current().codec_for(box_type)


@pytest.mark.parametrize("place", ["to_fields", "from_fields"])
def test_a_codec_of_what_cannot_be_called_holds_what_it_is(place):
    functions = {"to_fields": len, "from_fields": len, place: 3}
    with pytest.raises(registry.InvalidRegistrationError) as caught:
        registry.BoxCodec(**functions)
    assert (caught.value.found, caught.value.expected) == (3, "a function")


def test_a_derived_codec_knows_the_fields_that_it_keeps():
    @struct.dataclass
    class Named(Box):
        value: object
        names: tuple = struct.field(pytree_node=False)

    assert derive_codec(Named).names == {"names"}
    # Flax's own name for the field of Partitioned on a Variable is another one.
    own = meta.Partitioned(jnp.ones(2), ("a",)).to_nnx_metadata().keys() - {"value"}
    assert derive_codec(meta.Partitioned).names >= own


def test_the_value_of_a_protocol_is_none_of_its_fields():
    class Own(Box):
        def to_nnx_metadata(self):
            return {"value": 1, "note": "a"}

        @classmethod
        def from_nnx_metadata(cls, metadata):
            return metadata

    codec = derive_codec(Own)
    assert codec.to_fields(Own()) == (1, {"note": "a"})
    assert codec.from_fields(2, {"note": "b"}) == {"value": 2, "note": "b"}


def test_a_box_whose_value_cannot_be_told_says_which_fields_could_be_it():
    @dataclasses.dataclass
    class Two(Box):
        left: object
        right: object

    with pytest.raises(registry.UnsupportedBoxError, match=r"\['left', 'right'\] could be it"):
        derive_codec(Two)
