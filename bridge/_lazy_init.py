"""`lazy_init`: creates the variables of wrapped Linen modules from sample inputs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from flax import nnx

from . import _linen_variables
from ._errors import InvalidModuleError
from ._flax_internals import (
    assign_raw_value,
    partially_evaluate,
    raw_value,
    set_initializing,
)
from ._nodes import Nodes, nodes_below

F = TypeVar("F", bound=Callable[..., Any])


def lazy_init(fn: F, /, *args: Any, **kwargs: Any) -> F:
    """Runs a method of an NNX module once, so that every `ToNNX` in it creates its variables.

    Variables that exist keep their values, native state included, so the model is as if native
    construction had made it; a wrapper's RNG stream has moved on if initial values were drawn from
    it. A second call only adds what is missing.

    Args:
      fn: an NNX module, or a method of one.
      *args: sample inputs: arrays, or `jax.ShapeDtypeStruct`s, with which no forward pass is
        computed.
      **kwargs: keyword inputs; a ToNNX takes `method=` and `rngs=` here as in a call.

    Returns:
      `fn`.

    Raises:
      InvalidModuleError: `fn` is neither a callable NNX module nor a method of one.
      LazyInitError: an input is abstract and a variable depends on its values.

    Example::

      >>> import jax, jax.numpy as jnp
      >>> from flax import linen as nn, nnx
      >>> import bridge
      >>> model = bridge.ToNNX(nn.Dense(3), rngs=nnx.Rngs(0))
      >>> bridge.lazy_init(model, jax.ShapeDtypeStruct((1, 2), jnp.float32)).kernel.shape
      (2, 3)

    Source: flax/nnx/bridge/wrappers.py:lazy_init @ 0.12.8
    """
    module = _owner(fn)
    if any(_is_abstract(x) for x in jax.tree.leaves((args, kwargs))):
        _init_abstractly(module, fn, args, kwargs)
    else:
        run_initializing(module, fn, args, kwargs)
    return fn


def run_initializing(
    module: nnx.Module,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    nodes: Nodes | None = None,
) -> Any:
    """Calls `fn` while every ToNNX in `module` creates its variables; undoes its other effects.

    Args:
      module: the module.
      fn: the module itself or a method.
      args: positional arguments of the call.
      kwargs: keyword arguments of the call.
      nodes: `nodes_below(module)`, if that is known.

    Returns:
      What `fn` returned.
    """
    nodes = nodes or nodes_below(module)
    snapshot = _Snapshot(nodes)
    set_initializing(nodes.objects, True)
    failed = True
    try:
        output = fn(*args, **kwargs)
        failed = False
    finally:
        if failed:
            snapshot.restore_attributes()
        # The call may have put in more of them.
        set_initializing(nodes_below(module).objects, False)
        snapshot.restore_values(failed=failed)
    snapshot.drop_sown()
    return output


class _Snapshot:
    """The state of a model, to be put back."""

    def __init__(self, nodes: Nodes):
        self._values = [(variable, raw_value(variable)) for variable in nodes.variables]
        self._moved = {id(count) for node in nodes.objects for count in _stream_counts(node)}
        self._attributes = [(node, dict(vars(node))) for node in nodes.objects]

    def restore_values(self, *, failed: bool) -> None:
        """Puts back the value of every Variable and bare array that was there.

        The streams that initial values were drawn from have moved on, as after native construction,
        unless the initialisation failed: otherwise the first call would draw the same keys again.
        """
        for variable, value in self._values:
            has_moved = not failed and id(variable) in self._moved
            if not has_moved and variable.get_raw_value() is not value:
                assign_raw_value(variable, value)
        for node, attributes in self._attributes:
            for name, value in attributes.items():
                if isinstance(value, jax.Array) and vars(node).get(name) is not value:
                    setattr(node, name, nnx.data(value))

    def restore_attributes(self) -> None:
        """Puts back the attributes of every module that was there."""
        for node, attributes in self._attributes:
            vars(node).clear()
            vars(node).update(attributes)

    def drop_sown(self) -> None:
        """Removes what native modules sowed: initialisation is not a call whose output counts."""
        for node, attributes in self._attributes:
            for name in set(vars(node)) - set(attributes):
                value = vars(node)[name]
                # Perturbations derive from it, and Linen's init makes them too.
                if isinstance(value, nnx.Variable) and value.var_type is nnx.Intermediate:
                    delattr(node, name)


def _init_abstractly(
    module: nnx.Module, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Initialises a copy with the inputs unknown, then moves the variables into the model."""
    leaves, tree = jax.tree.flatten((args, kwargs))
    abstract = {i: leaf for i, leaf in enumerate(leaves) if _is_abstract(leaf)}
    graphdef, state = nnx.split(module, graph=True)
    made: list[nnx.GraphDef[Any]] = []

    def initialize(*inputs: Any) -> Any:
        # Variables belong to the trace they are made in.
        copy = nnx.merge(graphdef, state, copy=True)
        known = dict(zip(abstract, inputs, strict=True))
        full_args, full_kwargs = tree.unflatten(
            [known.get(i, leaf) for i, leaf in enumerate(leaves)]
        )
        method = copy if fn is module else functools.partial(_function(fn), copy)
        run_initializing(copy, method, full_args, full_kwargs)
        made_graphdef, made_state = nnx.split(copy, graph=True)
        made.append(made_graphdef)
        return made_state

    made_state = partially_evaluate(initialize, *abstract.values())
    made_nodes = dict(nnx.iter_graph(nnx.merge(made[0], made_state), graph=True))
    for path, node in nnx.iter_graph(module, graph=True):
        if isinstance(node, nnx.Pytree) and type(made_nodes.get(path)) is type(node):
            _adopt(node, made_nodes[path])


def _adopt(node: Any, made: Any) -> None:
    """Takes over the Linen variables of an initialised copy that the original lacks."""
    if isinstance(node, nnx.Module) and hasattr(type(node), "linen_variables"):
        for count, made_count in zip(_stream_counts(node), _stream_counts(made), strict=True):
            assign_raw_value(count, raw_value(made_count))
        new = {a: entry.leaf for a, entry in _linen_variables.held_variables(made).items()}
        _linen_variables.store(node, new, _linen_variables.held_variables(node), update=False)


def _stream_counts(node: Any) -> list[nnx.Variable[Any]]:
    """The counts of the streams that a wrapper draws from, none for another node."""
    streams = vars(node).get("to_nnx__rngs") if isinstance(node, nnx.Module) else None
    return [] if streams is None else [streams[name].count for name in streams]


def _owner(fn: Any) -> nnx.Module:
    owner = fn if isinstance(fn, nnx.Module) else getattr(fn, "__self__", None)
    if isinstance(owner, nnx.Module) and callable(fn):
        return owner
    raise InvalidModuleError(
        "lazy_init",
        fn,
        "a callable NNX module or a method of one",
        "pass the model, or model.method, and then the sample inputs",
    )


def _function(method: Any) -> Callable[..., Any]:
    return method.__func__


def _is_abstract(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)
