"""Parts of leaves, and leaves made of their parts."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge._rules.pieces import (
    Cut,
    Piece,
    assembled,
    covers,
    cut_out,
    part_shape,
    pieces_of,
    side_by_side,
    without_axis,
)
from bridge._rules.rules import Form, Layer
from tests.drawing import drawing


@st.composite
def grids(draw):
    """A shape, and the regions that some cuts through the whole of it make."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    regions = [()]
    for axis, size in enumerate(shape):
        if draw(st.booleans()):
            ends = sorted({*draw(st.lists(st.integers(1, size), max_size=2)), size})
            starts = [0, *ends[:-1]]
            cuts = [Cut(axis, a, b - a) for a, b in zip(starts, ends, strict=True)]
            regions = [(*region, cut) for region in regions for cut in cuts]
    return tuple(shape), draw(st.permutations(regions))


@drawing(50)
@given(grids())
def test_a_leaf_is_made_of_its_parts_again(case):
    shape, regions = case
    whole = np.arange(np.prod(shape)).reshape(shape)
    parts = [(region, cut_out(whole, region)) for region in regions]
    assert [value.shape for _, value in parts] == [part_shape(shape, r) for r in regions]
    np.testing.assert_array_equal(assembled(parts), whole)
    assert covers(shape, regions)
    assert not covers(shape, [*regions, regions[0]])
    assert len(regions) == 1 or not covers(shape, regions[1:])


@drawing(50)
@given(st.permutations(range(3)), st.sampled_from([(2, 3, 4), (24,), (6, 4), (1, 4, 3, 2)]))
def test_a_part_is_transposed_and_reshaped_as_numpy_does_it_and_back(axes, shape):
    value = np.arange(24).reshape(2, 3, 4)
    piece = Piece("a", "b", axes=tuple(axes))
    there = piece.to_nnx(value, shape)
    np.testing.assert_array_equal(there, value.transpose(axes).reshape(shape))
    np.testing.assert_array_equal(piece.to_linen(there, value.shape), value)


@pytest.mark.parametrize(
    ("shape", "parts", "axis", "starts"),
    [
        ((8, 24), [(8, 8)] * 3, -1, [0, 8, 16]),
        ((24, 8), [(8, 8)] * 3, 0, [0, 8, 16]),
        ((8, 16), [(8, 2, 4), (8, 1, 4), (8, 1, 4)], 1, [0, 8, 12]),
        ((8, 3, 4), [(8, 4)] * 3, -2, [0, 1, 2]),
    ],
)
def test_parts_lie_side_by_side(shape, parts, axis, starts):
    regions = side_by_side(shape, parts, axis)
    assert [cut.start for (cut,) in regions] == starts
    assert covers(shape, regions)


@pytest.mark.parametrize(
    ("parts", "axis"),
    [([(8, 8)] * 2, -1), ([(8, 8)] * 3, 2), ([(7, 8)] * 3, -1), ([(8, 9)] * 3, -1)],
)
def test_parts_that_do_not_make_up_a_leaf_have_no_regions(parts, axis):
    assert side_by_side((8, 24), parts, axis) == []


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (None, (3, 4, 5)),
        (Layer(0, 2), (4, 5)),
        (Layer(-2, 3, total=4), (3, 5)),
        (Layer(2, 0), (3, 4)),
        # No leaf has this shape.
        (Layer(0, 3), (-1,)),
        (Layer(0, 2, total=4), (-1,)),
        (Layer(3, 0), (-1,)),
        (Layer(-4, 0), (-1,)),
    ],
)
def test_the_shape_of_a_layer_lacks_the_axis_of_the_stack(layer, shape):
    assert without_axis((3, 4, 5), layer) == shape


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_parts_of_a_layer_lie_in_the_stacked_leaf(axis):
    layer = Layer(axis, 1)
    stacked = np.arange(3 * 2 * 6).reshape(3, 2, 6)
    whole = np.take(stacked, 1, axis)
    parts = np.split(whole, 2, -1)
    shapes = [part.shape for part in parts]
    form = Form(fused="linen")
    pieces = pieces_of([stacked.shape] * 2, shapes, (layer, None), form)
    for piece, part in zip(pieces, parts, strict=True):
        assert piece.moved(stacked, part.shape, to_nnx=True)[0] == ()
        np.testing.assert_array_equal(piece.moved(stacked, part.shape, to_nnx=True)[1], part)


@pytest.mark.parametrize(
    ("linen", "nnx", "form", "reason"),
    [
        ([None], [(2,)], Form(), "not all of them are arrays"),
        ([(2, 3)], [(3, 2)], Form(), "(2, 3) is not (3, 2)"),
        ([(2, 3)], [(5,)], Form(is_reshaped=True), "(2, 3) is not (5,)"),
        (
            [(4, 6)] * 2,
            [(4, 2), (4, 3)],
            Form(fused="linen", times=2),
            "(4, 2) and (4, 3) do not lie side by side in (4, 6) on axis -1 2 times",
        ),
    ],
)
def test_leaves_that_a_rule_does_not_fit_have_no_pieces(linen, nnx, form, reason):
    assert pieces_of(linen, nnx, (None, None), form) == reason
