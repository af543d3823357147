"""Classes that derive from Flax's layers become classes that derive from NNX's."""

import bridge
from tests.rewrite import models_derived as models
from tests.rewrite.test_programs import spec


def test_layers_with_other_fields_and_parameters_are_rewritten_and_proven():
    result = bridge.rewrite(models.Model, spec(2, 5, 3), gradients=False)
    assert result.is_proven, str(result)
    assert result.max_difference == 0.0
    assert all(each.level == "proven" for each in result.classes), str(result)
    (text,) = result.sources.values()
    for parent in ("Scaled(nnx.Linear)", "Same(nnx.Conv)", "Plain(nnx.LayerNorm)"):
        assert f"class {parent}" in text
    assert "super().__init__(*args, use_bias=use_bias, **kwargs)" in text
    assert "self.out_features" in text
