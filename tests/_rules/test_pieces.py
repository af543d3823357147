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
    side_by_side,
)
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
