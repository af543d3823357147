"""Trees of layers, each node of which is written twice: as a Linen module and as an NNX module.

A tree of one kind alone is the reference for all mixtures of it. Values are small integers, so
sums are exact and every comparison is for equality.
"""

import dataclasses
import zlib

import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx
from hypothesis import strategies as st

import bridge

FEATURES = 2
X = jnp.asarray([[1.0, -1.0], [0.0, 2.0]])
STATE = ("batch_stats", "cache", "intermediates")


def kernel(tag):
    """Integers in [-1, 1] that depend on the layer's place alone."""
    bits = zlib.crc32(tag.encode())
    values = [(bits >> (2 * i)) % 3 - 1 for i in range(FEATURES * FEATURES)]
    return jnp.asarray(np.reshape(values, (FEATURES, FEATURES)), jnp.float32)


class LinenDense(nn.Module):
    tag: str

    @nn.compact
    def __call__(self, x, train):
        return x @ self.param("kernel", lambda key: kernel(self.tag))


class NNXDense(nnx.Module):
    def __init__(self, tag):
        self.kernel = nnx.Param(kernel(tag))

    def __call__(self, x, train):
        return x @ self.kernel


class LinenMean(nn.Module):
    """Running statistics, which only training updates."""

    tag: str

    @nn.compact
    def __call__(self, x, train):
        total = self.variable("batch_stats", "total", jnp.zeros, (1, FEATURES))
        y = x + total.value
        if train and not self.is_initializing():
            total.value = total.value + x.sum(0, keepdims=True)
        return y


class NNXMean(nnx.Module):
    def __init__(self, tag):
        self.total = nnx.BatchStat(jnp.zeros((1, FEATURES)))

    def __call__(self, x, train):
        y = x + self.total
        if train:
            self.total[...] += x.sum(0, keepdims=True)
        return y


class LinenCount(nn.Module):
    """A cache that counts calls."""

    tag: str

    @nn.compact
    def __call__(self, x, train):
        count = self.variable("cache", "count", jnp.zeros, (1, 1))
        if not self.is_initializing():
            count.value = count.value + 1
        return x + count.value


class NNXCount(nnx.Module):
    def __init__(self, tag):
        self.count = nnx.Cache(jnp.zeros((1, 1)))

    def __call__(self, x, train):
        # Replaced rather than written into.
        self.count = nnx.Cache(self.count[...] + 1)
        return x + self.count


class LinenSow(nn.Module):
    tag: str

    @nn.compact
    def __call__(self, x, train):
        self.sow("intermediates", "seen", x)
        return x


class NNXSow(nnx.Module):
    def __init__(self, tag):
        pass

    def __call__(self, x, train):
        self.sow(nnx.Intermediate, "seen", x)
        return x


LAYERS = {
    "dense": (LinenDense, NNXDense),
    "mean": (LinenMean, NNXMean),
    "count": (LinenCount, NNXCount),
    "sow": (LinenSow, NNXSow),
}


class LinenCompactBlock(nn.Module):
    node: "Node"

    @nn.compact
    def __call__(self, x, train):
        children = [child.linen(name=child.name) for child in self.node.children]
        for index in self.node.calls:
            x = children[index](x, train)
        return x


class LinenSetupBlock(nn.Module):
    node: "Node"

    def setup(self):
        for child in self.node.children:
            setattr(self, child.name, child.linen())

    def __call__(self, x, train):
        for index in self.node.calls:
            x = getattr(self, self.node.children[index].name)(x, train)
        return x


class NNXBlock(nnx.Module):
    def __init__(self, node):
        self.node = node
        for child in node.children:
            setattr(self, child.name, child.nnx())

    def __call__(self, x, train):
        for index in self.node.calls:
            x = getattr(self, self.node.children[index].name)(x, train)
        return x


@dataclasses.dataclass(frozen=True)
class Node:
    """A layer or a block of a model.

    Attributes:
      name: the attribute of the parent that holds it.
      tag: where it is in the tree.
      layer: a key of LAYERS, None for a block.
      is_linen: which of the two classes is used.
      is_compact: whether a Linen block makes its children in a compact method or in `setup`.
      children: of a block.
      calls: the indices of the children in the order in which a block calls them, each at least
        once.
    """

    name: str
    tag: str
    layer: str | None
    is_linen: bool
    is_compact: bool = False
    children: tuple["Node", ...] = ()
    calls: tuple[int, ...] = ()

    def as_kind(self, is_linen):
        """The same tree of one kind alone."""
        children = tuple(child.as_kind(is_linen) for child in self.children)
        return dataclasses.replace(self, is_linen=is_linen, children=children)

    def linen(self, **options):
        """A Linen module: the node's own, or an NNX module in a ToLinen."""
        linen_class, nnx_class, argument = self._classes()
        if self.is_linen:
            return linen_class(argument, **options)
        return bridge.ToLinen(nnx_class, args=(argument,), **options)

    def nnx(self):
        """An NNX module: the node's own, or a Linen module in a ToNNX."""
        linen_class, nnx_class, argument = self._classes()
        if self.is_linen:
            return bridge.ToNNX(linen_class(argument), nnx.Rngs(0), mutable=STATE)
        return nnx_class(argument)

    def _classes(self):
        if self.layer is not None:
            return *LAYERS[self.layer], self.tag
        return LinenCompactBlock if self.is_compact else LinenSetupBlock, NNXBlock, self


def trees():
    """Mixed trees with one to three levels of blocks."""
    return _blocks(depth=3)


def _blocks(depth, name="root", tag="root"):
    @st.composite
    def draw_block(draw):
        children = tuple(
            draw(_nodes(depth - 1, f"child{i}", f"{tag}/{i}"))
            for i in range(draw(st.integers(1, 3)))
        )
        indices = st.integers(0, len(children) - 1)
        calls = [*range(len(children)), *draw(st.lists(indices, max_size=1))]
        return Node(
            name,
            tag,
            layer=None,
            is_linen=draw(st.booleans()),
            is_compact=draw(st.booleans()),
            children=children,
            calls=tuple(draw(st.permutations(calls))),
        )

    return draw_block()


def _nodes(depth, name, tag):
    layers = st.builds(
        Node, st.just(name), st.just(tag), st.sampled_from(sorted(LAYERS)), st.booleans()
    )
    return layers if depth == 0 else layers | _blocks(depth, name, tag)
