"""Plans are made before anything is written: what writes, proves and shows changes none."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn

import bridge
from bridge._demo import _models
from bridge.rewrite import _rewriter
from bridge.rewrite.emit import _class_text, _function_text
from tests.rewrite import models_functions, models_layer_functions, models_lifted


class Conditional(nn.Module):
    """Has a loop, a condition, a state, a wrapped layer, and a branch that does not run."""

    widths: tuple[int, ...] = (4, 5)
    has_head: bool = True

    @nn.compact
    def __call__(self, x, *, train=False):
        for width in self.widths:
            x = nn.relu(nn.Dense(width)(x))
        x = nn.ConvLocal(3, (1,))(x)
        x = nn.BatchNorm(use_running_average=not train)(x)
        if x.shape[-1] > 100:
            x = nn.Dense(1)(x)
        noise = jax.random.normal(self.make_rng("params"), x.shape) if train else jnp.zeros(())
        return nn.Dense(2)(x + noise) if self.has_head else x


def contents(plan):
    """What a plan holds."""
    slots = [
        (slot.attribute, dict(slot.modes), slot.linen, slot.lift, slot.cache, len(slot.makings))
        for slot in plan.slots.values()
    ]
    sizes = {name: dict(size.values) for name, size in plan.sizes.items()}
    return slots, sizes, [*plan.review], [*plan.seen], plan.refusal, plan.wraps


def all_contents(program):
    return {cls: contents(plan) for cls, plan in program.plans.items()}


@pytest.fixture
def changes(monkeypatch):
    """The names of plans that another pass changed, and how many there were to change."""
    changed, seen = [], []

    def watch_text(module, name):
        text, decide = getattr(module, name), module.method_plans

        def written(self):
            before = []

            def decided(program, plan, references):
                found = decide(program, plan, references)
                before.append(contents(plan))
                return found

            monkeypatch.setattr(module, "method_plans", decided)
            result = original(self)
            seen.append(self.plan.name)
            changed.extend(self.plan.name for each in before if each != contents(self.plan))
            return result

        original = text.written
        monkeypatch.setattr(text, "written", written)

    watch_text(_class_text, "ClassText")
    watch_text(_function_text, "FunctionText")
    for name in ("_proven", "_vary_fields"):
        original = getattr(_rewriter.Rewriter, name)

        def watched(self, original=original, name=name):
            before = all_contents(self.program)
            result = original(self)
            seen.append(name)
            changed.extend([name] if before != all_contents(self.program) else [])
            return result

        monkeypatch.setattr(_rewriter.Rewriter, name, watched)
    return changed, seen


@pytest.mark.parametrize(
    ("make", "shape", "kwargs"),
    [
        (Conditional, (2, 3, 4), {"train": False}),
        (_models.DigitsCNN, (2, 8, 8, 1), {"train": False}),
        (models_lifted.Scanned, (2, 4), {}),
        (models_functions.Alike, (2, 4), {}),
        (models_layer_functions.Applied, (2, 3), {}),
        (models_layer_functions.Compact, (2, 3), {}),
    ],
)
def test_no_pass_behind_plan_changes_a_plan(make, shape, kwargs, changes):
    x = jax.ShapeDtypeStruct(shape, "float32")
    result = bridge.rewrite(make, x, kwargs=kwargs, gradients=False)
    changed, seen = changes
    assert result.is_proven, str(result)
    assert {"_proven", "_vary_fields"} < {*seen}
    assert changed == []
