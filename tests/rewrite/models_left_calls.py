"""More models with what is not rewritten: calls, variables and transforms; as in `models_left`."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import linen as nn


class LoopOverInput(nn.Module):
    """a loop over what only the call knows makes layers"""

    @nn.compact
    def __call__(self, x, sizes=(4, 3)):
        for size in sizes:
            x = nn.Dense(4)(x) * size
        return x


class NormOverAxis(nn.Module):
    """a norm over a named axis"""

    @nn.compact
    def __call__(self, x):
        return jax.vmap(nn.GroupNorm(1, axis_name="members"), axis_name="members")(x)


class SharesScope(nn.Module):
    """nn.share_scope has no counterpart"""

    def setup(self):
        self.inner = nn.Dense(3)
        nn.share_scope(self, self.inner)

    def __call__(self, x):
        return self.inner(x)


class StarredVariable(nn.Module):
    """a variable with * arguments"""

    @nn.compact
    def __call__(self, x):
        return x + self.param("a", *(nn.initializers.ones, (3,)))


class BoxedVariable(nn.Module):
    """a variable that is not unboxed"""

    @nn.compact
    def __call__(self, x):
        return x + self.param("a", nn.initializers.ones, (3,), unbox=False)


class ComputedCollection(nn.Module):
    """a collection whose name is not written out"""

    collection: str = "batch_stats"

    @nn.compact
    def __call__(self, x):
        return x + self.variable(self.collection, "mean", jnp.zeros, (3,)).value


class ReadsVariable(nn.Module):
    """self.get_variable has no counterpart here"""

    @nn.compact
    def __call__(self, x):
        self.param("a", nn.initializers.ones, (3,))
        return x + self.get_variable("params", "a")


class MergesWithStars(nn.Module):
    """nn.merge_param in another form"""

    deterministic: bool | None = None

    @nn.compact
    def __call__(self, x, deterministic: bool | None = True):
        both = (self.deterministic, deterministic)
        found = nn.merge_param("deterministic", *both)
        return nn.Dropout(0.5)(nn.Dense(3)(x), deterministic=found)


class ReadsAMode(nn.Module):
    """deterministic is a field and an argument of the call, and the field is read by itself"""

    deterministic: bool | None = None

    @nn.compact
    def __call__(self, x, deterministic: bool | None = None):
        known = self.deterministic if deterministic is None else deterministic
        return nn.Dropout(0.5)(nn.Dense(3)(x), deterministic=known)


class GivesAMode(nn.Module):
    """only the call knows"""

    @nn.compact
    def __call__(self, x, deterministic: bool = True):
        return ReadsAMode(deterministic)(x)


class LayersOfKinds(nn.Module):
    """one expression makes layers of several kinds"""

    @nn.compact
    def __call__(self, x):
        for layer in (nn.Dense, nn.Embed):
            x = layer(5, features=3)(x.astype(int)) if layer is nn.Embed else layer(5)(x)
        for own in (functools.partial(nn.Dense, 3), nn.LayerNorm):
            x = own()(x)
        return x


def own(cls):
    return type(cls.__name__, (cls,), {"__module__": cls.__module__, "__doc__": cls.__doc__})


@own
class Decorated(nn.Module):
    """the decorator @own makes another class"""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(x)


class ForbiddenParent(nn.Module):
    """the class has its own __post_init__"""

    def __post_init__(self):
        super().__post_init__()

    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(x)


class OfForbidden(ForbiddenParent):
    """it derives from ForbiddenParent, which stays Linen"""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(4)(x)


class StackedTwice(nn.Module):
    """layers that are stacked twice"""

    @nn.compact
    def __call__(self, x):
        inner = nn.scan(Step, **STACKED, length=2)
        return nn.vmap(inner, **STACKED, in_axes=(0, None))()(x, None)[0]


class CarryByKeyword(nn.Module):
    """a carry that is made in another way"""

    @nn.compact
    def __call__(self, x):
        cell = nn.SimpleCell(3)
        carry = cell.initialize_carry(rng=jax.random.key(0), input_shape=x[:, 0].shape)
        return cell(carry, x[:, 0])[1]


class NeverSeen(nn.Module):
    """no call of it was seen"""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(x)


class MakesNeverSeen(nn.Module):
    @nn.compact
    def __call__(self, x):
        layer = NeverSeen()
        return nn.Dense(3)(x) if layer.name else x


class Step(nn.Module):
    @nn.compact
    def __call__(self, x, scale):
        return nn.Dense(x.shape[-1])(x), None


STACKED = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}


class CacheNotMade(nn.Module):
    """a decode cache that was not made"""

    def setup(self):
        self.dense = nn.Dense(3)
        self.attention = nn.MultiHeadDotProductAttention(2, decode=True, qkv_features=4)

    def __call__(self, x):
        return self.dense(x)


class CountsWhenMutable(nn.Module):
    """NNX state is always mutable, in evaluation too"""

    @nn.compact
    def __call__(self, x):
        count = self.variable("stats", "count", lambda: jnp.zeros((), jnp.float32))
        if self.is_mutable_collection("stats"):
            count.value += 1
        return nn.Dense(3)(x)


class CountsUnderFlag(nn.Module):
    """NNX state is always mutable, in evaluation too"""

    counts: bool = False

    @nn.compact
    def __call__(self, x):
        count = self.variable("stats", "count", lambda: jnp.zeros((), jnp.float32))
        if self.counts and self.is_mutable_collection("stats"):
            count.value += 1
        return nn.Dense(3)(x)


class AppliesItself(nn.Module):
    """Has a method that is given its parameters, and that no run calls."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(x.shape[-1])(x)

    def generate(self, params, x, steps: int):
        return jax.lax.fori_loop(0, steps, lambda _, y: self.apply({"params": params}, y), x)
