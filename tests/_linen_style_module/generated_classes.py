"""Module classes whose bodies are the same on Linen's, on the peer's and on this package's base.

Everything maps a vector of three to one, so an example compiles nothing new.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.nnx import bridge as peer
from hypothesis import strategies as st

import bridge

X = np.array([[1.0, 2.0, 3.0], [-1.0, 0.5, 2.0]], np.float32)
INIT = nn.initializers.normal(0.5)


class Layer(NamedTuple):
    """A submodule of a generated module.

    Attributes:
      kind: `dense`, `counter`, `noise` or `block`.
      block: the module, if it is one.
      name: the name it is given, None for Linen's own.
      times: how often it is called.
      only: whether it is made always, or only where the module's field says so.
    """

    kind: str
    block: Any = None
    name: str | None = None
    times: int = 1
    only: bool = False


class Block(NamedTuple):
    """A generated module.

    Attributes:
      style: `compact`, `setup`, `list` (submodules in a list, made in `setup`) or `both`
        (submodules in `setup`, a compact method that declares more).
      layers: its submodules.
      extra: whether the layers with `only` are there; a field of the module.
      scale: whether it has a parameter of its own.
      field: whether the first dense layer is passed as a field, made outside.
    """

    style: str
    layers: tuple[Layer, ...]
    extra: bool = False
    scale: bool = False
    field: bool = False


@st.composite
def blocks(draw, *, depth=2, for_peer=False, noise=True, is_root=True):
    """Generates a Block.

    Args:
      draw: hypothesis' own.
      depth: how deep modules are nested.
      for_peer: leaves out what the peer names otherwise (lists) or cannot do (a module that is
        made in another one with `parent=None`).
      noise: whether keys are drawn in calls.
      is_root: whether it is the outermost module.
    """
    kinds = ["dense", "counter"] + ["noise"] * noise + ["block"] * (depth > 1)
    layers = []
    for index in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(kinds))
        layers.append(
            Layer(
                kind,
                draw(blocks(depth=depth - 1, for_peer=for_peer, noise=noise, is_root=False))
                if kind == "block"
                else None,
                draw(st.sampled_from([None, f"layer{index}"])),
                # The peer makes the submodules of a compact method anew at the second call.
                1 if for_peer and kind == "block" else draw(st.sampled_from([1, 1, 2])),
                draw(st.sampled_from([False, False, True])),
            )
        )
    styles = ["compact", "setup", "both"] + ["list"] * (not for_peer)
    extra, scale, field = (draw(st.booleans()) for _ in range(3))
    field = field and (is_root or not for_peer)
    return Block(draw(st.sampled_from(styles)), tuple(layers), extra, scale, field)


@functools.cache
def classes(base):
    """The classes by name on a base class: `nn.Module`, `peer.Module` or `bridge.Module`."""
    compact = {nn.Module: nn, peer.Module: peer, bridge.Module: bridge}[base].compact

    class Dense(base):
        scale: float = 1.0

        @compact
        def __call__(self, x):
            kernel = self.param("kernel", INIT, (x.shape[-1], 3))
            return jnp.tanh(jnp.dot(x, jnp.asarray(kernel)) * self.scale)

    class Counter(base):
        @compact
        def __call__(self, x):

            count = self.variable("stats", "count", lambda: jnp.zeros(()))
            if not self.is_initializing():
                count.value = count.value + jnp.sum(x)

            return x + 0.5

    class Noise(base):
        def __call__(self, x):
            return x + jax.random.bernoulli(self.make_rng("noise"), 0.5, x.shape)

    def make(layer, **kwargs):
        if layer.kind == "block":
            return block_class(layer.block.style)(
                layer.block, made_outside(layer.block, parent=None), **kwargs
            )
        return {"dense": Dense, "counter": Counter, "noise": Noise}[layer.kind](**kwargs)

    def made_outside(block, **kwargs):
        return Dense(scale=0.5, **kwargs) if block.field else None

    class Compact(base):
        block: Any
        inner: Any = None

        @compact
        def __call__(self, x):
            for layer in self.block.layers:
                if layer.only and not self.block.extra:
                    continue
                submodule = make(layer, **({"name": layer.name} if layer.name else {}))
                for _ in range(layer.times):
                    x = submodule(x)
            return finish(self, x)

    class Setup(base):
        block: Any
        inner: Any = None

        def setup(self):
            for index, layer in enumerate(self.block.layers):
                if self.block.extra or not layer.only:
                    setattr(self, layer.name or f"sub{index}", make(layer))

        def run(self, x):
            for index, layer in enumerate(self.block.layers):
                if layer.only and not self.block.extra:
                    continue
                for _ in range(layer.times):
                    x = getattr(self, layer.name or f"sub{index}")(x)
            return x

        @compact
        def __call__(self, x):
            return finish(self, self.run(x))

    class Both(Setup):
        @compact
        def __call__(self, x):
            return finish(self, Dense()(self.run(x)))

    class InList(base):
        block: Any
        inner: Any = None

        def setup(self):
            self.layers = [make(layer) for layer in self.block.layers]

        @compact
        def __call__(self, x):
            for layer in self.layers:
                x = layer(x)
            return finish(self, x)

    def finish(self, x):
        if self.inner is not None:
            x = self.inner(x)
        if self.block.scale:
            # Linen returns the array, the others the Variable.
            x = x * jnp.asarray(self.param("scale", INIT, (1, 3)))
        return x

    def block_class(style):
        return {"compact": Compact, "setup": Setup, "both": Both, "list": InList}[style]

    return lambda block: block_class(block.style)(block, made_outside(block))


def model(block, base):
    """The model of a Block on a base class."""
    return classes(base)(block)
