"""Defects of flax.nnx.bridge in metadata and sharding, by their design numbers."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from tests.bridge.peer import Defect, free_of

KEY = jax.random.key(0)
X = jnp.ones((4, 8))
LAYERS = {nn.PARTITION_NAME: "layers"}
NAMES = ("a", "b")


def mesh(kind=AxisType.Auto):
    return jax.make_mesh((2, 4), NAMES, (kind,) * 2, devices=jax.devices()[:8])


class Annotated(nnx.Module):
    def __init__(self, rngs):
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), NAMES)
        self.linear = nnx.Linear(8, 8, kernel_init=init, rngs=rngs)

    def __call__(self, x):
        return self.linear(x)


def box(bridge, value=None, names=NAMES, **metadata):
    value = jnp.ones((8, 8)) if value is None else value
    return bridge.NNXMeta(nnx.Param, value, {"out_sharding": names, **metadata})


def in_a_program(read, shape):
    """What a function of a traced value returns: Flax's box can shard no other."""
    found = []
    jax.eval_shape(lambda x: found.append(read(x)), jax.ShapeDtypeStruct(shape, jnp.float32))
    return found[0]


def check_01_an_added_axis_has_its_name_and_goes_again(bridge):
    with jax.set_mesh(mesh()):
        added = box(bridge, jnp.ones((3, 8, 8))).add_axis(0, LAYERS)
        assert added.metadata["out_sharding"] == ("layers", "a", "b")
        assert added.remove_axis(0, LAYERS).metadata["out_sharding"] == NAMES


def check_01_layers_of_a_mapped_wrapper_are_not_split_over_the_first_axis(bridge):
    lifted = nn.vmap(
        bridge.ToLinen,
        variable_axes={"params": 0, "nnx": None},
        split_rngs={"params": True},
        in_axes=None,
        axis_size=2,
        metadata_params={nn.PARTITION_NAME: None},
    )
    with jax.set_mesh(mesh()):
        shapes = jax.eval_shape(lifted(Annotated).init, KEY, X)
        shardings = nn.get_sharding({"params": shapes["params"]}, mesh())
    kernel = shardings["params"]["linear"]["kernel"]
    assert kernel.spec == P(None, "a", "b")


def check_02_a_spec_is_read_without_a_mesh(bridge):
    assert box(bridge).get_partition_spec() == P("a", "b")


def check_02_a_spec_is_read_from_abstract_values(bridge):
    tree = {"params": {"w": box(bridge, jax.ShapeDtypeStruct((8, 8), jnp.float32))}}
    with jax.set_mesh(mesh()):
        assert nn.get_partition_spec(tree)["params"]["w"] == P("a", "b")


def check_02_a_spec_is_read_where_the_stacked_value_cannot_be_divided(bridge):
    def read(value):
        return box(bridge, value).add_axis(0, {nn.PARTITION_NAME: None}).get_partition_spec()

    with jax.set_mesh(mesh()):
        assert in_a_program(read, (3, 8, 8)) == P(None, "a", "b")


def check_03_logical_rules_are_applied_once(bridge):
    rules = (("x", "a"), ("y", "b"))

    def read(value):
        return nn.get_partition_spec({"w": box(bridge, value, ("x", "y"), sharding_rules=rules)})

    with jax.set_mesh(mesh()), nn.logical_axis_rules(rules):
        logical = in_a_program(read, (8, 8))
        assert nn.logical_to_mesh(logical, rules)["w"] == P("a", "b")


def linen_dense(names=NAMES):
    return nn.Dense(8, kernel_init=nn.with_partitioning(nn.initializers.lecun_normal(), names))


def check_04_an_annotated_module_needs_no_mesh(bridge):
    model = bridge.lazy_init(bridge.ToNNX(linen_dense(), rngs=nnx.Rngs(0)), X)
    assert model(X).shape == (4, 8)


def check_04_axes_that_no_mesh_has(bridge):
    variables = linen_dense(("nowhere", None)).init(KEY, X)
    with jax.set_mesh(mesh()):
        module = linen_dense(("nowhere", None))
        state = jax.eval_shape(lambda v: nnx.state(imported(bridge, module, v)), variables)
    assert state["kernel"].get_metadata("out_sharding") == ("nowhere", None)


def imported(bridge, module, variables):
    """The variables as the attributes of a module."""
    model = bridge.ToNNX(module, rngs=nnx.Rngs(0))
    attributes = bridge.variables.linen_vars_to_nnx_attrs(variables)
    for name, value in attributes.items():
        setattr(model, name, value)
    return model


def check_04_a_mesh_with_explicit_axes(bridge):
    with jax.set_mesh(mesh(AxisType.Explicit)):
        model = bridge.lazy_init(bridge.ToNNX(linen_dense(), rngs=nnx.Rngs(0)), X)
        assert model(X).shape == (4, 8)
        assert jax.typeof(model.kernel[...]).sharding.spec == P("a", "b")


def check_04_an_annotated_nnx_module_needs_no_mesh(bridge):
    module = bridge.to_linen(Annotated)
    assert module.apply(module.init(KEY, X), X).shape == (4, 8)


DEFECTS = {
    "01 an added axis has its name": Defect(
        check_01_an_added_axis_has_its_name_and_goes_again, AssertionError
    ),
    "01 mapped layers are not split over the first axis": Defect(
        check_01_layers_of_a_mapped_wrapper_are_not_split_over_the_first_axis,
        TypeError,
        "must be a `NamedSharding`",
    ),
    "02 a spec needs no mesh": Defect(
        check_02_a_spec_is_read_without_a_mesh, ValueError, "An auto mesh context"
    ),
    "02 a spec needs no values": Defect(
        check_02_a_spec_is_read_from_abstract_values, TypeError, "must be a `NamedSharding`"
    ),
    "02 a spec needs no division": Defect(
        check_02_a_spec_is_read_where_the_stacked_value_cannot_be_divided, AssertionError
    ),
    "03 logical rules are applied once": Defect(
        check_03_logical_rules_are_applied_once, AssertionError
    ),
    "04 an annotated Linen module needs no mesh": Defect(
        check_04_an_annotated_module_needs_no_mesh, ValueError, "An auto mesh context"
    ),
    "04 axes that the mesh lacks can be imported": Defect(
        check_04_axes_that_no_mesh_has, ValueError, "Resource axis: nowhere"
    ),
    "04 a mesh may have Explicit axes": Defect(
        check_04_a_mesh_with_explicit_axes,
        AssertionError,
        "`with_sharding_constraint` acts as an assert",
    ),
    "04 an annotated NNX module needs no mesh": Defect(
        check_04_an_annotated_nnx_module_needs_no_mesh, ValueError, "An auto mesh context"
    ),
}

test_the_bridge_is_free_of_the_defect = free_of(DEFECTS)
