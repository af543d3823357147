"""Models whose functions and transforms stay Linen; as in `models_left`."""

from __future__ import annotations

from typing import Any

import flax
import jax
from flax import linen as nn

STACKED = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
SPLIT = {"params": True}
SAVED = {"policy": jax.checkpoint_policies.everything_saveable}


def same(function):
    return function


def called(layer, *given):
    return layer(*given)


@same
def decorated(x):
    return nn.Dense(3)(x)


def normed(**rest):
    return nn.BatchNorm(**rest)


def dense(**rest):
    return nn.Dense(**rest)


def sized(x, size):
    return nn.Dense(size)(x)


def as_wide(x):
    return nn.Dense(x.shape[-1])


def scaled(module):
    module.param("scale", nn.initializers.ones, (3,))
    return nn.Dense(3)


class ByDecorated(nn.Module):
    """a function with a decorator makes a layer"""

    @nn.compact
    def __call__(self, x):
        return decorated(x)


class ByMode(nn.Module):
    """a function passes on what only the call knows"""

    @nn.compact
    def __call__(self, x, train=False):
        return normed(use_running_average=not train)(x)


class ByRest(nn.Module):
    """a layer is given ** arguments that NNX has not"""

    @nn.compact
    def __call__(self, x):
        return dense(features=3)(x)


class ByStar(nn.Module):
    """a function that makes layers is given * or ** arguments"""

    @nn.compact
    def __call__(self, x):
        return sized(x, *(3,))


class ChangedOptions(nn.Module):
    """** arguments of a layer change on the way"""

    @nn.compact
    def __call__(self, x):
        options = {"use_bias": False}
        x = nn.Dense(4, **options)(x)
        options["use_bias"] = True
        return nn.Dense(3, **options)(x)


class ByArrays(nn.Module):
    """a function that gets arrays returns layers"""

    @nn.compact
    def __call__(self, x):
        return as_wide(nn.relu(x))(x)


class ByScaled(nn.Module):
    """a function that returns layers makes parameters"""

    @nn.compact
    def __call__(self, x):
        return scaled(self)(x)


class AxesByFilter(nn.Module):
    """nn.vmap whose variable_axes are not written out by name"""

    @nn.compact
    def __call__(self, x):
        return nn.vmap(lambda m, x: m(x), variable_axes={True: 0}, split_rngs=SPLIT)(nn.Dense(3), x)


class AxisOfItsOwn(nn.Module):
    """nn.vmap with an axis of its own for params"""

    @nn.compact
    def __call__(self, x):
        axes = {"params": flax.core.lift.Out(0)}
        return nn.vmap(lambda m, x: m(x), variable_axes=axes, split_rngs=SPLIT)(nn.Dense(3), x)


class MoreAndFewer(nn.Module):
    """nn.vmap called with more and with fewer arguments"""

    @nn.compact
    def __call__(self, x):
        layer = nn.Dense(3)
        apply = nn.vmap(
            lambda m, x, y=None: m(x), variable_axes={"params": None}, split_rngs={"params": False}
        )
        return apply(layer, x) + apply(layer, x, x)


class SeveralOuts(nn.Module):
    """nn.vmap with out_axes=(0, 1)"""

    @nn.compact
    def __call__(self, x):
        a, b = nn.vmap(lambda m, x: (m(x), m(x)), **STACKED, out_axes=(0, 1))(nn.Dense(3), x)
        return a + b.swapaxes(0, 1)


class OptionsElsewhere(nn.Module):
    """nn.remat with policy"""

    @nn.compact
    def __call__(self, x):
        return nn.remat(lambda m, x: m(x), **SAVED)(nn.Dense(3), x)


class WhileByName(nn.Module):
    """nn.while_loop with arguments by name"""

    @nn.compact
    def __call__(self, x):
        layer = nn.Dense(3)
        x = layer(x)
        return nn.while_loop(lambda m, x: x.sum() < 0, lambda m, x: m(x), mdl=layer, init=x)


class WhileWithKeys(nn.Module):
    """nn.while_loop with keys in it"""

    @nn.compact
    def __call__(self, x, train=False):
        layer = nn.Dropout(0.5, deterministic=not train)
        x = layer(x)
        split = {"dropout": True}
        return nn.while_loop(
            lambda m, x: x.sum() < 0, lambda m, x: m(x) + 1, layer, x, split_rngs=split
        )


class Step(nn.Module):
    @nn.compact
    def __call__(self, x, scale=None):
        return nn.Dense(x.shape[-1])(x), None


class CallsElsewhere(nn.Module):
    """stacked layers whose calls are not found"""

    @nn.compact
    def __call__(self, x):
        return called(nn.scan(Step, **STACKED, length=2)(), x, None)[0]


class StepByStar(nn.Module):
    """nn.vmap with keywords or * arguments in the call"""

    @nn.compact
    def __call__(self, x):
        return nn.vmap(Step, **STACKED)()(*(x,))[0]


class Stateless(nn.Module):
    @nn.compact
    def __call__(self, x):
        return 2 * x


class StackedStateless(nn.Module):
    """nn.vmap of layers without variables"""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(nn.vmap(Stateless, **STACKED)()(x))


class Uncalled(nn.Module):
    """a module that the model was given was never called"""

    inner: Any

    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(x)


class GivenSequential(nn.Module):
    """the model was given a Sequential as a field"""

    inner: Any

    @nn.compact
    def __call__(self, x):
        return self.inner(x)
