"""Constructs the NNX module of a ToLinen, for real or abstractly."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from flax import nnx

import registry

from . import _eager_sharding, _graphdef
from ._arrays import Arrays, is_array
from ._constructor import Argument, Existing, key_of, takes_rngs, thaw
from ._errors import MissingRngError
from ._flax_internals import detached, mark_arrays_as_data
from ._graphdef import StaticGraphDef
from ._lazy_init import run_initializing
from ._merged import method_of
from ._nodes import Nodes, nodes_below
from ._once import Once

# Constructors are traced once for each set of arguments, not at each call without a GraphDef.
_rebuilt: Once[tuple[StaticGraphDef, bool]] = Once(maxsize=256)


class Recipe(NamedTuple):
    """A constructor and its arguments, hashable.

    Attributes:
      nnx_class: the NNX module's class.
      args: positional arguments, frozen.
      kwargs: keyword arguments, frozen.
      skip_rng: whether `rngs` must not be passed.
      eager_sharding: whether annotated Variables are sharded when they are made, None for what
        Flax is set to.
    """

    nnx_class: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    skip_rng: bool
    eager_sharding: bool | None = None

    @property
    def name(self) -> str:
        """What the class is called in messages."""
        target = getattr(self.nnx_class, "func", self.nnx_class)
        return getattr(target, "__name__", None) or repr(target)

    @property
    def key(self) -> Any:
        """Equal for constructors that make the same module, None if it may not be kept."""
        if self.is_traced:
            return None
        kwargs = frozenset((name, key_of(value)) for name, value in self.kwargs.items())
        return key_of(self.nnx_class), tuple(map(key_of, self.args)), kwargs, self.skip_rng

    def made(self, graphdef: StaticGraphDef) -> bool:
        """Whether a GraphDef may be that of the module this constructs."""
        is_existing = isinstance(self.nnx_class, Existing)
        return is_existing or graphdef.recipe is None or graphdef.recipe == self.key

    @property
    def is_traced(self) -> bool:
        """Whether an argument belongs to a trace."""
        arguments = (*self.args, *self.kwargs.values())
        return any(isinstance(a, Argument) and a.is_traced for a in arguments)

    def construct(
        self, streams: Mapping[str, Any], where: str, *, is_abstract: bool = False
    ) -> tuple[Any, Nodes]:
        """The NNX module and what it consists of.

        Args:
          streams: keys by the stream names of `nnx.Rngs`.
          where: the wrapper, for the error.
          is_abstract: whether only shapes and metadata count; then nothing is sharded.

        Raises:
          MissingRngError: the constructor draws from a stream that is not there.
        """

        def construct() -> Any:
            kwargs = {name: thaw(value) for name, value in self.kwargs.items()}
            if not self.skip_rng and "rngs" not in kwargs and takes_rngs(self.nnx_class):
                kwargs["rngs"] = nnx.Rngs(**streams)
            with detached():
                return self.nnx_class(*map(thaw, self.args), **kwargs)

        try:
            module, nodes = _eager_sharding.constructed(
                construct, self.eager_sharding, where, is_abstract=is_abstract
            )
        except (AttributeError, KeyError) as error:
            if "No RngStream named" not in str(error):
                raise
            wanted = str(error).split("'")[1]
            raise MissingRngError(
                f"the constructor of {where}",
                [wanted],
                streams,
                f"pass a key, or {{{wanted!r}: key}}, to init",
            ) from error
        mark_arrays_as_data(nodes.objects)
        return module, nodes


class Call(NamedTuple):
    """A call of a module: what `run_initializing` needs to create what only a call creates."""

    method: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def rebuild(
    recipe: Recipe, names: tuple[str, ...], call: Call | None, where: str
) -> StaticGraphDef:
    """The GraphDef for variables that came without it; nothing is computed.

    Args:
      recipe: the constructor.
      names: the RNG streams that the constructor gets.
      call: the call at hand, None if there is none. It is traced only if the module holds a
        `ToNNX`, whose variables depend on the inputs.
      where: the wrapper, for errors.
    """
    if isinstance(recipe.nnx_class, Existing):
        return recipe.nnx_class.graphdef
    if recipe.is_traced:
        # What is kept would hold on to the trace.
        graphdef, needs_call = _abstract(recipe, names, None, where)
        return _abstract(recipe, names, call, where)[0] if needs_call and call else graphdef
    key = (recipe.key, names, registry.current())
    graphdef, needs_call = _rebuilt.get(key, lambda: _abstract(recipe, names, None, where))
    if not needs_call or call is None:
        return graphdef
    key = (*key, call.method, str(jax.tree.map(_aval_text, (call.args, call.kwargs))))
    return _rebuilt.get(key, lambda: _abstract(recipe, names, call, where))[0]


def _abstract(
    recipe: Recipe, names: tuple[str, ...], call: Call | None, where: str
) -> tuple[StaticGraphDef, bool]:
    """(the GraphDef, whether only a call would tell all variables)."""
    given = Arrays((call.args, call.kwargs) if call else ())
    made: list[tuple[StaticGraphDef, bool]] = []

    def construct(inputs: list[Any]) -> Any:
        streams = {name: jax.random.key(0) for name in names}
        module, nodes = recipe.construct(streams, where, is_abstract=True)
        if call is not None:
            args, kwargs = given.tree(inputs)
            run_initializing(module, method_of(module, call.method), args, kwargs, nodes)
        kinds = set(map(type, nodes_below(module).objects))
        graphdef, state = _graphdef.split(module, recipe.key)
        made.append((graphdef, any(hasattr(kind, "linen_variables") for kind in kinds)))
        return [x.get_raw_value() if isinstance(x, nnx.Variable) else x for x in state]

    jax.eval_shape(construct, given.avals)
    return made[0]


def _aval_text(value: Any) -> Any:
    return f"{value.dtype}{value.shape}" if is_array(value) else value
