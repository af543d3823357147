"""`functional`: an NNX module class as a pair of pure functions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import jax
from flax import nnx

M = TypeVar("M", bound=nnx.Module)


@dataclasses.dataclass
class Functional(Generic[M]):
    """A recipe for an NNX module, with its static definition after `init`.

    Attributes:
      module_type: the NNX module's class.
      graphdef: its definition, None before `init`.
      args: its constructor's positional arguments.
      kwargs: its constructor's keyword arguments.
    """

    module_type: type[M]
    graphdef: nnx.GraphDef[M] | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def init(self, *, rngs: nnx.Rngs | None = None) -> nnx.State[Any, Any]:
        """Constructs the module, returns its state and keeps its definition.

        Args:
          rngs: passed to the constructor unless None.
        """
        rng_kwargs = {} if rngs is None else {"rngs": rngs}
        self.graphdef, state = nnx.split(self.module_type(*self.args, **self.kwargs, **rng_kwargs))
        return state

    def apply(self, *states: object) -> Any:
        """A stand-in for the module on this state: call it, or one of its methods.

        Args:
          *states: the state of the module, in any number of parts.

        Returns:
          A proxy; calling it or a method of it returns `(output, (graphdef, state))`.

        Raises:
          ValueError: there is no definition yet.
        """
        if self.graphdef is None:
            raise ValueError(
                f"Functional({self.module_type.__name__}) has no definition yet; call init first"
            )
        # The proxy writes into the Variables it is given.
        return self.graphdef.apply(*jax.tree.map(lambda leaf: leaf, states))


def functional(cls: type[M]) -> Callable[..., Functional[M]]:
    """Turns an NNX module class into a constructor of `Functional`s.

    Args:
      cls: the NNX module's class.

    Returns:
      A function that takes the class's constructor arguments, without `rngs`.

    Example::

      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> import bridge
      >>> model = bridge.functional(nnx.Linear)(2, 3)
      >>> state = model.init(rngs=nnx.Rngs(0))
      >>> y, (graphdef, state) = model.apply(state)(jnp.ones((1, 2)))
      >>> y.shape
      (1, 3)

    Source: flax/nnx/bridge/wrappers.py:functional @ 0.12.8
    """

    def construct(*args: object, **kwargs: object) -> Functional[M]:
        return Functional(cls, None, args, kwargs)

    return construct
