"""Linen transforms of classes: `ToLinen`, what `to_linen_class` makes, and a parent of either.

One program runs on the bridged module and on its pure Linen twin, which holds the same values. The
operations are the same and run in the same order, so outputs, gradients and updates are equal bit
for bit, and so are partition specs.
"""

import pytest

from tests.transforms import linen_states

# Flax prefers nnx.capture since 0.12, and programs in the wild sow all the same.
pytestmark = pytest.mark.filterwarnings("ignore:Using .Module.sow:DeprecationWarning")
CASES = {name: case for name, case in linen_states.TABLE.items() if case[2] == "class"}


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_a_transformed_nnx_module_computes_what_its_linen_twin_computes(case):
    linen_states.compare_with_twin(*case)
