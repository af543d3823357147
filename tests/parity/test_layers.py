"""Layers are observed as they are, through wrappers and transforms."""

import cProfile
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import bridge
from bridge import parity
from bridge._fingerprint import Look
from bridge.parity._recorder import trace
from tests.parity.parity_models import WIDTH, NNXBlock, X, fill, randomised

LAYERS = 5


def traced(model, *inputs):
    """The trace of an NNX module, or of `(linen_module, variables)`."""
    if isinstance(model, tuple):
        return trace(lambda observing: model[0].apply(model[1], *inputs))

    def run(observing):
        with observing(model):
            model(*inputs)

    return trace(run)


def names(calls):
    return [("/".join(call.path), call.nth) for call in calls.calls]


class Inner(nnx.Module):
    """An NNX module with a Linen module in it."""

    def __init__(self, *, rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.wrapped = bridge.ToNNX(LinenPair(), rngs=rngs)

    def __call__(self, x):
        return self.wrapped(self.linear(x))


class LinenPair(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(WIDTH, name="b")(nn.Dense(WIDTH, name="a")(x))


class Outer(nn.Module):
    """Linen around NNX around Linen."""

    @nn.compact
    def __call__(self, x):
        return bridge.to_linen(Inner, name="mixed")(nn.Dense(WIDTH, name="first")(x))


def test_calls_end_before_those_around_them_and_have_full_paths():
    module = Outer()
    variables = module.init(jax.random.key(0), X)

    found = traced((module, variables), X)

    assert names(found) == [
        ("first", 0),
        ("mixed/linear", 0),
        ("mixed/wrapped/a", 0),
        ("mixed/wrapped/b", 0),
        ("mixed/wrapped", 0),
        ("mixed", 0),
        ("", 0),
    ]
    assert [call.module for call in found.calls] == [
        "Dense",
        "Linear",
        "Dense",
        "Dense",
        "LinenPair",
        "Inner",
        "Outer",
    ]


def test_a_wrapped_mixture_is_compared_by_layer_with_itself_unwrapped():
    module = Outer()
    variables = module.init(jax.random.key(0), X)
    wrapped = bridge.ToNNX.from_variables(module, variables)
    assert parity.check((module, variables), wrapped, X, gradients=False).ok
    inner = wrapped.mixed["wrapped"]["b"]["bias"]
    inner[...] = inner[...].at[1].add(1.0)

    report = parity.check((module, variables), wrapped, X, gradients=False)

    assert report.first_divergence.path == ("mixed", "wrapped", "b")


def test_inputs_and_outputs_are_the_arrays_of_the_call():
    model = nnx.Sequential(
        nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0)), nnx.LayerNorm(WIDTH, rngs=nnx.Rngs(0))
    )

    linear, norm, whole = traced(model, X).calls

    np.testing.assert_array_equal(linear.inputs["['inputs']"], X)
    np.testing.assert_array_equal(linear.outputs[""], model.layers[0](X))
    np.testing.assert_array_equal(norm.inputs["['x']"], linear.outputs[""])
    np.testing.assert_array_equal(whole.outputs[""], model(X))
    assert [call.is_leaf for call in (linear, norm, whole)] == [True, True, False]


class Shared(nnx.Module):
    """One layer, called three times."""

    def __init__(self, third=None):
        self.layer = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
        self.third = third

    def __call__(self, x):
        x = self.layer(self.layer(x))
        return self.layer(x if self.third is None else self.third(x))


def test_the_calls_of_a_shared_layer_are_told_apart():
    assert names(traced(Shared(), X)) == [("layer", 0), ("layer", 1), ("layer", 2), ("", 0)]

    report = parity.check(Shared(), Shared(third=nnx.relu), X, gradients=False)

    # The layer did its work each time; something between its calls is not the same.
    assert report.first_divergence.path == ()
    assert report.first_divergence.after == "layer, call 1"


class ScannedLinen(nn.Module):
    """Stacked layers under `nn.scan`."""

    @nn.compact
    def __call__(self, x):
        scanned = nn.scan(
            LinenStep, variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS
        )
        return scanned(name="layers")(x, None)[0]


class LinenStep(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        y = nn.LayerNorm(name="norm")(x)
        return x + nn.Dense(WIDTH, name="dense")(nn.relu(y)), None


class ScannedNNX(nnx.Module):
    """Stacked layers under `nnx.scan`."""

    def __init__(self):
        @nnx.split_rngs(splits=LAYERS)
        @nnx.vmap(in_axes=0, out_axes=0)
        def stack(rngs):
            return NNXBlock(rngs=rngs)

        self.layers = stack(nnx.Rngs(0))

    def __call__(self, x):
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def run(layer, x):
            return layer(x)

        return run(self.layers, x)


@pytest.fixture(scope="module")
def scanned():
    """The Linen model and its variables."""
    module = ScannedLinen()
    variables = randomised(jax.eval_shape(module.init, jax.random.key(0), X))
    # Kernels around zero: those around one leave LayerNorm the difference of numbers almost equal,
    # and gradients of which the last digits are the compiler's.
    dense = variables["params"]["layers"]["dense"]
    dense["kernel"] -= 1
    return module, variables


def native_scan(variables):
    model = nnx.eval_shape(ScannedNNX)
    fill(model.layers, variables["params"]["layers"])
    return model


def wrapped_scan(variables):
    return bridge.ToNNX.from_variables(ScannedLinen(), variables)


@pytest.mark.parametrize("kind", [native_scan, wrapped_scan])
def test_a_fault_in_one_layer_of_a_scan_names_its_index(scanned, kind):
    kernel = scanned[1]["params"]["layers"]["dense"]["kernel"]
    faulty = copy_of(scanned[1])
    faulty["params"]["layers"]["dense"]["kernel"] = kernel.at[3].set(kernel[3].T)

    report = parity.check(scanned, kind(faulty), X, gradients=False)

    assert report.first_divergence.path == ("layers", "dense")
    assert report.first_divergence.call == 3
    assert report.first_divergence.place.endswith("layers/dense, call 3")
    [weight] = report.section("weights").differing
    assert weight.index[0] == 3


def test_layers_stacked_on_one_side_only_are_matched_by_their_order(scanned):
    class Loop(nnx.Module):
        def __init__(self):
            self.layers = nnx.List([NNXBlock(rngs=nnx.Rngs(0)) for _ in range(LAYERS)])

        def __call__(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    model = nnx.eval_shape(Loop)
    for index, block in enumerate(model.layers):
        fill(block, jax.tree.map(lambda v, i=index: v[i], scanned[1]["params"]["layers"]))
    assert parity.check(scanned, model, X).ok
    model.layers[3].norm.epsilon = 1e-1

    report = parity.check(scanned, model, X, gradients=False)

    assert report.first_divergence.place == "layers/norm -> layers/3/norm, call 3"


def copy_of(tree):
    return jax.tree.map(lambda v: v, tree)


class Transformed(nnx.Module):
    """The same layer behind transforms that trace whatever is done."""

    def __init__(self, how):
        self.first = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
        self.second = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(1))
        self.how = how

    def __call__(self, x):
        return self.how(lambda m, x: m(x))(self.second, self.first(x))


@pytest.mark.parametrize(
    "how",
    [nnx.jit, nnx.remat, lambda function: nnx.jit(nnx.remat(function))],
    ids=["jit", "remat", "jit of remat"],
)
def test_layers_under_a_transform_have_their_path_and_values(how):
    model = Transformed(how)

    found = traced(model, X)

    assert names(found) == [("first", 0), ("second", 0), ("", 0)]
    np.testing.assert_allclose(found.calls[1].outputs[""], model.second(model.first(X)), rtol=1e-6)


def test_a_second_run_of_a_remat_is_observed_as_the_first_was():
    model = Transformed(nnx.remat)

    assert names(traced(model, X)) == names(traced(nnx.clone(model), X))


def test_a_vmapped_layer_is_called_once_for_each_entry():
    class Mapped(nnx.Module):
        def __init__(self):
            self.layer = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return nnx.vmap(lambda m, x: m(x), in_axes=(None, 0))(self.layer, x)

    model = Mapped()

    *rows, whole = traced(model, X).calls

    assert [row.nth for row in rows] == [0, 1, 2]
    np.testing.assert_allclose(
        np.stack([row.outputs[""] for row in rows]), whole.outputs[""], rtol=1e-6
    )


def test_layers_of_one_definition_under_jit_keep_their_own_paths():
    class Twice(nnx.Module):
        def __init__(self):
            self.blocks = nnx.List([Jitted(), Jitted()])

        def __call__(self, x):
            return self.blocks[1](self.blocks[0](x))

    class Jitted(nnx.Module):
        def __init__(self):
            self.linear = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))

        @nnx.jit
        def __call__(self, x):
            return self.linear(x)

    model = Twice()
    expected = [
        ("blocks/0/linear", 0),
        ("blocks/0", 0),
        ("blocks/1/linear", 0),
        ("blocks/1", 0),
        ("", 0),
    ]

    # The second run could take the first one's compiled code, and then nothing would be seen.
    for _ in range(2):
        assert names(traced(model, X)) == expected


def test_a_method_that_calls_the_one_it_overrides_is_one_call():
    class Scaled(nnx.Linear):
        def __call__(self, x):
            return 2 * super().__call__(x)

    assert names(traced(Scaled(WIDTH, WIDTH, rngs=nnx.Rngs(0)), X)) == [("", 0)]


def test_observing_leaves_no_trace_in_interpreter_classes_or_modules():
    seen = []

    def mine(frame, event, arg):
        seen.append(event)

    model = nnx.Sequential(nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0)))
    attributes = [dict(vars(module)) for _, module in nnx.iter_modules(model)]
    methods = dict(vars(nnx.Linear))
    sys.setprofile(mine)
    try:
        traced(model, X)
        left = sys.getprofile()
    finally:
        sys.setprofile(None)

    assert left is mine
    assert "call" in seen
    assert dict(vars(nnx.Linear)) == methods
    assert [dict(vars(module)) for _, module in nnx.iter_modules(model)] == attributes


def test_a_model_that_raises_raises_and_leaves_no_trace():
    class Failing(nnx.Module):
        def __init__(self):
            self.layer = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))

        def __call__(self, x):
            raise ZeroDivisionError(self.layer(x).shape)

    model = Failing()
    before = [dict(vars(module)) for _, module in nnx.iter_modules(model)]

    with pytest.raises(ZeroDivisionError):
        traced(model, X)

    assert sys.getprofile() is None
    assert [dict(vars(module)) for _, module in nnx.iter_modules(model)] == before


def test_threads_observe_their_own_models():
    models = [nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(i)) for i in range(3)]
    found = {}

    def observe(index):
        found[index] = traced(models[index], X)

    threads = [threading.Thread(target=observe, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    for index, model in enumerate(models):
        [call] = found[index].calls
        np.testing.assert_allclose(call.outputs[""], model(X), rtol=1e-6)


def test_containers_and_keys_are_no_obstacle():
    class Held(nnx.Module):
        def __init__(self):
            self.by_name = nnx.Dict(a=nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0)))
            self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0), deterministic=False)

        def __call__(self, x):
            return self.dropout(self.by_name["a"](x), rngs=jax.random.key(0))

    found = traced(Held(), X)

    assert names(found) == [("by_name/a", 0), ("dropout", 0), ("", 0)]
    assert jnp.shape(found.calls[1].inputs["['rngs']"]) == (2,)


@jax.tree_util.register_pytree_node_class
class Unflattenable:
    """An argument that cannot be looked into."""

    def tree_flatten(self):
        raise RuntimeError("not now")

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls()


def test_what_cannot_be_observed_is_said_and_the_model_runs_on():
    class Taking(nnx.Module):
        def __init__(self):
            self.inner = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))

        def __call__(self, x, odd):
            return self.inner(x)

    found = traced(Taking(), X, Unflattenable())

    assert ("inner", 0) in names(found)
    assert "not all layers could be observed: RuntimeError: not now" in found.note


def test_a_profiler_in_c_goes_on_after_a_model_was_observed():
    profiler = cProfile.Profile()
    model = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))

    profiler.enable()
    try:
        found = traced(model, X)
        marked_by_the_profiler()
    finally:
        profiler.disable()

    assert names(found) == [("", 0)]
    called = {
        code.co_name for code in (e.code for e in profiler.getstats()) if hasattr(code, "co_name")
    }
    assert "marked_by_the_profiler" in called


def marked_by_the_profiler():
    """A call that a profiler sees."""


class Kept(nnx.Module):
    """Keeps what its static attributes are while it is called."""

    def __init__(self):
        self.inner = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
        self.found = []

    def __call__(self, x):
        nodes = {id(module) for _, module in nnx.iter_modules(self)}
        own = [value for value in vars(self).values() if id(value) not in nodes]
        self.found.append([x for value in own for x in Look(value).objects if id(x) in nodes])
        return self.inner(x)


def test_what_an_observed_module_is_given_refers_to_no_module_of_the_run():
    """A ToLinen would make it anew at every call, and all that was recorded with it."""
    model = Kept()
    assert names(traced(model, X)) == [("inner", 0), ("", 0)]
    assert model.found == [[]]
