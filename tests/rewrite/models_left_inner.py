"""Models whose inner functions stay Linen; as in `models_left`."""

from __future__ import annotations

from flax import linen as nn


def scaled(module, x):
    return nn.Dense(3)(x) * module.scale


def around(x):
    def inner(x):
        return nn.Dense(3)(x)

    return inner(x)


class GivenMore(nn.Module):
    """a function that is given the module does more with it than make layers"""

    scale: float = 2.0

    @nn.compact
    def __call__(self, x):
        return scaled(self, x)


class InFunction(nn.Module):
    """a function inside of a function makes a layer"""

    @nn.compact
    def __call__(self, x):
        return around(x)


class InnerReturns(nn.Module):
    """a function inside of a method returns layers"""

    @nn.compact
    def __call__(self, x):
        def dense(width):
            return nn.Dense(width)

        return dense(3)(x)


class InnerDefaults(nn.Module):
    """a function inside of a method has defaults of the method's"""

    width: int = 3

    @nn.compact
    def __call__(self, x):
        width = self.width

        def dense(x, width=width):
            return nn.Dense(width)(x)

        return dense(x)


class InnerOfLeft(nn.Module):
    """a module is made in a while loop"""

    @nn.compact
    def __call__(self, x):
        def dense(x):
            return nn.Dense(3)(x)

        while x.ndim < 4:
            x = nn.Dense(3)(x)[None]
        return dense(x)


class InnerOfOther(nn.Module):
    """a module is made where an exception was caught"""

    @nn.compact
    def __call__(self, x):
        def dense(x):
            return nn.Dense(3)(x)

        try:
            x = dense(x)
            raise ValueError
        except ValueError:
            pass
        return x


class InnerInLoop(nn.Module):
    """a function inside of a method is more than called"""

    @nn.compact
    def __call__(self, x):
        def dense(x):
            return nn.Dense(3)(x)

        for function in (dense, dense):
            x = function(x)
        return x
