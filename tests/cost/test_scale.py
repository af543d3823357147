"""The sharded initialisation of a scanned decoder costs no more with depth, and holds shards only.

`python -m benchmarks.scale` does the same at full size.
"""

import dataclasses

import jax
import pytest
from jax.sharding import AbstractMesh, AxisType

from benchmarks import programs, scale, scale_growth
from benchmarks.scale_compiled import compiled, largest_buffer
from benchmarks.scale_models import AXES, FORMS, MIXED, SHAPES, Shape

SIZES = {"width": 64, "hidden": 192, "heads": 4, "vocabulary": 256}
AUTO = (AxisType.Auto,) * 2
DEPTHS = (2, 8)


@pytest.fixture(scope="module")
def found():
    """What is compiled, by form and depth."""
    mesh = jax.make_mesh((2, 4), AXES, axis_types=AUTO)
    return {
        (form, depth): compiled(form, Shape(depth, **SIZES), mesh)
        for form in ("ToLinen", "ToNNX")
        for depth in DEPTHS
    }


@pytest.mark.parametrize("form", ["ToLinen", "ToNNX"])
def test_the_program_does_not_grow_with_depth(found, form):
    few, many = (found[form, depth] for depth in DEPTHS)
    assert few.operations == many.operations
    assert few.instructions == many.instructions


@pytest.mark.parametrize("form", ["ToLinen", "ToNNX"])
@pytest.mark.parametrize("depth", DEPTHS)
def test_a_device_holds_its_shards_only(found, form, depth):
    one = found[form, depth]
    # Matrices are divided by both axes of the mesh, scales by one.
    matrices = depth * (4 * 64 * 64 + 3 * 64 * 192) + 2 * 256 * 64
    scales = depth * 2 * 64
    expected = 4 * (matrices // 8 + scales // 2)
    # Beside them a few keys and counts, and the table of the results.
    assert 0 <= one.outputs - expected < 1024
    assert one.parameters == matrices + scales
    # The largest weight is that of the perceptrons of all layers, or the embedding.
    assert one.largest == 4 * max(depth * 64 * 192, 256 * 64) // 8


@pytest.mark.parametrize("form", [form for form in FORMS if form not in MIXED])
def test_it_is_lowered_for_an_abstract_mesh_of_4096_devices(form):
    one = compiled(form, Shape(2), AbstractMesh((256, 16), AXES, axis_types=AUTO))
    assert (one.devices, one.parameters) == (4096, 666_910_720)
    assert one.operations > 0
    assert one.compile_seconds is None


@pytest.mark.parametrize("form", MIXED)
def test_a_mixed_model_of_100_billion_is_lowered_for_16384_devices(form):
    mesh = AbstractMesh((256, 64), AXES, axis_types=AUTO)
    one = compiled(form, dataclasses.replace(SHAPES["large"], depth=104), mesh)
    assert (one.devices, one.parameters) == (16384, 101_726_158_848)
    assert one.compile_seconds is None


def python_calls(function):
    function()
    return programs.python_calls(function)


def test_shapes_and_shardings_cost_the_same_for_each_leaf_and_any_mesh():
    mesh = scale_growth.abstract_mesh(64)
    calls = [python_calls(lambda n=n: scale_growth.abstract(n, mesh)) for n in (8, 16, 24)]
    assert calls[2] - calls[1] <= 1.02 * (calls[1] - calls[0])
    large = scale_growth.abstract_mesh(16384)
    assert python_calls(lambda: scale_growth.abstract(8, large)) == calls[0]


def test_the_plan_of_a_restore_takes_the_same_for_every_further_leaf():
    mesh = jax.make_mesh((1, 8), AXES, axis_types=AUTO)
    targets = [scale_growth.abstract(count, mesh) for count in (8, 16, 24)]
    # Key and count of the streams, too.
    assert [len(scale_growth.planned(target)) for target in targets] == [10, 18, 26]
    calls = [python_calls(lambda t=t: scale_growth.planned(t)) for t in targets]
    assert calls[2] - calls[1] == calls[1] - calls[0] > 0
    (parts, *_) = scale_growth.planned(targets[0]).values()
    assert len(parts) == 8


def test_the_largest_buffer_is_not_that_of_a_fusion_or_an_argument():
    text = """
%fused_computation (p: f32[2]) -> f32[8] {
  ROOT %wide = u64[100]{0} broadcast(%p), dimensions={}
}

%body.1 (p: (s32[], f32[3])) -> (s32[], f32[3]) {
  ROOT %t = (s32[], /*index=1*/bf16[5,4]{1,0}) tuple(%a, %b)
}

ENTRY %main (p: f32[2]) -> f32[8] {
  ROOT %f = f32[8]{0} fusion(%p), kind=kLoop, calls=%fused_computation
}
"""
    assert largest_buffer(text) == (40, "bf16[5,4]")
    assert largest_buffer(text.replace("bf16[5,4]", "pred[7]")) == (32, "f32[8]")


@pytest.mark.parametrize(("processes", "devices"), [(0, 1), (1, 256), (2, 128)])
def test_an_abstract_mesh_is_measured_without_its_devices(monkeypatch, processes, devices):
    """Regression: JAX could not start the threads of 16,384 devices that nobody used."""
    flags = []

    def started(*args, env, **kwargs):
        flags.append(env["XLA_FLAGS"])
        raise OSError

    monkeypatch.setattr(scale.subprocess, "Popen", started)
    with pytest.raises(OSError):  # noqa: PT011 raised above
        list(scale.run(scale.Mesh((16, 16), processes, (2,))))
    assert flags == [f"--xla_force_host_platform_device_count={devices}"]
