"""Defects of flax.nnx.bridge that show under transforms, by their design numbers."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx

from tests.bridge.peer import Defect, free_of

KEY = jax.random.key(0)
X = jnp.ones((3, 4))


class Annotated(nnx.Module):
    def __init__(self, rngs):
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("a", "b"))
        self.linear = nnx.Linear(4, 4, kernel_init=init, rngs=rngs)

    def __call__(self, x):
        return self.linear(x), None


class Masked(nnx.Module):
    def __init__(self, rngs):
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return x, self.dropout(jnp.ones((32,)))


class Sowing(nn.Module):
    @nn.compact
    def __call__(self, x):
        self.sow("intermediates", "seen", x)
        return nn.Dense(4)(x)


def check_01_axis_names_of_a_scanned_kernel(bridge):
    lifted = nn.scan(
        bridge.ToLinen,
        variable_axes={"params": 0},
        variable_broadcast="nnx",
        split_rngs={"params": True},
        length=3,
        metadata_params={nn.PARTITION_NAME: "layers"},
    )
    with nnx.use_eager_sharding(False):
        variables = lifted(Annotated).init(KEY, X)
        kernel = variables["params"]["linear"]["kernel"]
        assert kernel.value.shape == (3, 4, 4)
        assert kernel.metadata["out_sharding"] == ("layers", "a", "b")
        assert tuple(kernel.get_partition_spec()) == ("layers", "a", "b")


def check_08_masks_of_scanned_layers(bridge):
    lifted = nn.scan(
        bridge.ToLinen,
        variable_axes={"RngKey": 0, "RngCount": 0},
        variable_broadcast="nnx",
        split_rngs={"params": True, "dropout": True},
        length=3,
    )
    _, masks = lifted(Masked).init_with_output(KEY, X)[0]
    assert len({mask.tobytes() for mask in np.asarray(masks)}) == 3


def check_12_capture_under_jit(bridge):
    model = bridge.lazy_init(bridge.ToNNX(Sowing(), rngs=nnx.Rngs(0)), X)
    _, captured = nnx.capture(nnx.jit(lambda model, x: model(x)), nnx.Intermediate)(model, X)
    np.testing.assert_array_equal(captured["seen"].get_value()[0], X)


def check_15_linen_in_nnx_in_a_mapped_linen(bridge):
    class Middle(nnx.Module):
        def __init__(self, rngs):
            self.dense = bridge.ToNNX(nn.Dense(2), rngs=rngs)

        def __call__(self, x):
            return self.dense(x)

    lifted = nn.vmap(
        bridge.ToLinen, variable_axes={"params": 0, "nnx": None}, split_rngs={"params": True}
    )
    variables = lifted(Middle).init(KEY, X)
    assert variables["params"]["dense"]["kernel"].shape == (3, 4, 2)


DEFECTS = {
    "01 the layer axis of a scanned kernel has its name": Defect(
        check_01_axis_names_of_a_scanned_kernel, AssertionError
    ),
    "08 scanned layers have masks of their own": Defect(
        check_08_masks_of_scanned_layers, KeyError, "No RngStream named 'dropout'"
    ),
    "12 what is sown under jit can be captured": Defect(
        check_12_capture_under_jit, ValueError, "Cannot infer collection name"
    ),
    "15 Linen in NNX in a mapped Linen is initialised": Defect(
        check_15_linen_in_nnx_in_a_mapped_linen, KeyError, "'params'"
    ),
}

test_the_bridge_is_free_of_the_defect = free_of(DEFECTS)
