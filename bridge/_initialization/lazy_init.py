"""`lazy_init`: creates the variables of wrapped Linen modules from sample inputs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any, NamedTuple, TypeVar

import jax
from flax import nnx

from bridge._conversion.arrays import Arrays
from bridge._conversion.linen_attributes import LinenHolder, held_variables
from bridge._errors import AbstractInputError, InvalidModuleError
from bridge._flax.flattening import GraphDefBuilder, flatten
from bridge._flax.nodes import Nodes, nodes_below
from bridge._flax.objects import set_initializing
from bridge._flax.traces import is_unknown, partially_evaluate
from bridge._flax.variables import leaf_value
from bridge._graphdefs.structure import check_references

from .adopted import adopt
from .creating import CREATING
from .snapshot import Snapshot, drop_sown

F = TypeVar("F", bound=Callable[..., Any])


def lazy_init(fn: F, /, *args: object, **kwargs: object) -> F:
    """Runs a method of an NNX module once, so that every `ToNNX` in it creates its variables.

    Variables that exist keep their values, native state included, so the model is as if native
    construction had made it. A wrapper's RNG stream has advanced if initial values were drawn from
    it. A second call only adds what is missing. Make an `nnx.Optimizer` after this call: it is made
    for the parameters that exist, and updates with more of them raise a `pytree structure error`.

    Args:
      fn: an NNX module, or a method of one.
      *args: sample inputs: arrays, or `jax.ShapeDtypeStruct`s, with which no forward pass is
        computed.
      **kwargs: keyword inputs; a ToNNX takes `method=` and `rngs=` here as in a call.

    Returns:
      `fn`.

    Raises:
      InvalidModuleError: `fn` is neither a callable NNX module nor a method of one.
      AbstractInputError: an input is abstract and a variable depends on its values.

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
        made = initialized(module, _finder(module, fn), args, kwargs, nodes_below(module)).module
        if made is not module:
            adopt(module, made)
    return fn


class Initialized(NamedTuple):
    """A module after a call has created what only calls create.

    `module` is another one if the call needed an axis, and `output` is what the call returned.
    `donated` are the Variables that have new values because the call donated the old ones.
    """

    module: nnx.Module
    output: Any
    donated: list[nnx.Variable[Any]]


def run_initializing(
    module: nnx.Module,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    nodes: Nodes | None = None,
) -> Initialized:
    """Calls `fn` while every ToNNX in `module` creates its variables; undoes its other effects.

    `fn` is the module itself or a method; `nodes` is `nodes_below(module)`, if that is known.
    """
    nodes = after = nodes or nodes_below(module)
    snapshot = Snapshot(nodes)
    moved: set[int] = set()
    set_initializing(nodes.objects, True)
    try:
        output = fn(*args, **kwargs)
        if is_changed := snapshot.is_changed():
            after = nodes_below(module)
        if is_changed or CREATING.get():
            moved = _moved(nodes, is_drawn=snapshot.has_more(after, nnx.Param))
        if is_changed:
            snapshot.keep_created()
        donated = snapshot.restore_values(moved)
    except BaseException:
        after = nodes_below(module)
        snapshot.restore()
        raise
    finally:
        set_initializing(nodes.objects, False)
        if after is not nodes:
            # The call may have added wrappers.
            set_initializing(after.objects, False)
    if after is not nodes:
        drop_sown(nodes_below(module))
    return Initialized(module, output, donated)


def _moved(nodes: Nodes, *, is_drawn: bool) -> set[int]:
    """The ids of the Variables that keep the values that the call has given them.

    Initial values were drawn from their streams, as in native construction. If the streams were put
    back, the first call would draw the same keys again. A wrapper knows which keys it has drawn for
    variables. NNX does not, so every draw from the stream for parameters counts.

    `nodes` is what was there before the call; `is_drawn` says whether there are new parameters.
    """
    holders = [node for node in nodes.objects if isinstance(node, LinenHolder)]
    moved = {id(count) for holder in holders for count in holder.stream_counts()}
    for node in nodes.objects if is_drawn else ():
        if isinstance(node, nnx.Rngs):
            stream = vars(node).get("params", vars(node).get("default"))
            if isinstance(stream, nnx.RngStream):
                moved.add(id(stream.count))
    if CREATING.get():
        # What a Linen module has put into its variables is what was asked for.
        moved |= {id(e.variable) for h in holders for e in held_variables(h).values()}
    return moved


def initialized(
    module: nnx.Module,
    method: Callable[[Any], Callable[..., Any]],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    nodes: Nodes,
) -> Initialized:
    """`run_initializing`, also for a call that needs a mesh axis or `vmap` axis nobody has bound.

    Unlike Linen's, a native `nnx.BatchNorm(axis_name=…)` does not know that it is being
    initialised, and takes its mean over the axis. Only axes that a module names are bound, because
    JAX names the axis that a program asks for only in the text of its error.

    `method` maps a module to the method to call.
    """
    try:
        return run_initializing(module, method(module), args, kwargs, nodes)
    except NameError:
        named = jax.tree.leaves([vars(node).get("axis_name") for node in nodes.objects])
        axes = {name for name in named if isinstance(name, str)}
        if not axes:
            raise
    made, output = _initialized_over(axes, module, method, args, kwargs)
    return Initialized(made, output, [])


def _initialized_over(
    axes: Collection[str],
    module: nnx.Module,
    method: Callable[[Any], Callable[..., Any]],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[nnx.Module, Any]:
    """Initialises a copy of a module below axes of size 1."""
    graphdef, leaves = flatten(module)
    check_references(graphdef, module)
    given = Arrays(list(map(leaf_value, leaves)))
    made: list[tuple[nnx.GraphDef[Any], Arrays]] = []

    def initialize(values: list[Any]) -> list[Any]:
        # Variables belong to the trace they are made in.
        copy = GraphDefBuilder(graphdef).build(given.tree(values)).module
        output = run_initializing(copy, method(copy), args, kwargs).output
        graphdef_made, leaves_made = flatten(copy)
        result = Arrays((list(map(leaf_value, leaves_made)), output))
        made.append((graphdef_made, result))
        return result.values

    run: Callable[..., Any] = initialize
    for axis in axes:
        run = jax.vmap(run, in_axes=None, axis_name=axis, axis_size=1)
    values = [x[(0,) * len(axes)] for x in run(given.values)]
    graphdef_made, result = made[-1]
    leaves_made, output = result.tree(values)
    return GraphDefBuilder(graphdef_made).build(leaves_made).module, output


def _init_abstractly(
    module: nnx.Module, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Initialises a copy with the inputs unknown, then moves the variables into the model."""
    leaves, tree = jax.tree.flatten((args, kwargs))
    abstract = {i: leaf for i, leaf in enumerate(leaves) if _is_abstract(leaf)}
    graphdef, variables = flatten(module)
    check_references(graphdef, module)
    values = list(map(leaf_value, variables))
    method = _finder(module, fn)

    def initialize(*inputs: object) -> nnx.Module:
        # Variables belong to the trace they are made in.
        copy = GraphDefBuilder(graphdef).build(values).module
        known = dict(zip(abstract, inputs, strict=True))
        all_args, all_kwargs = tree.unflatten([known.get(i, x) for i, x in enumerate(leaves)])
        return initialized(copy, method, all_args, all_kwargs, nodes_below(copy)).module

    made = partially_evaluate(initialize, *abstract.values())
    graphdef, variables = flatten(made)
    values = list(map(leaf_value, variables))
    if any(map(is_unknown, jax.tree.leaves(values))):
        raise AbstractInputError(
            "/".join(map(str, path))
            for path, leaf in nnx.to_flat_state(nnx.state(made, graph=True))
            if any(map(is_unknown, jax.tree.leaves(leaf)))
        )
    adopt(module, GraphDefBuilder(graphdef).build(values).module)


def _owner(fn: object) -> nnx.Module:
    owner = fn if isinstance(fn, nnx.Module) else getattr(fn, "__self__", None)
    if isinstance(owner, nnx.Module) and callable(fn):
        return owner
    raise InvalidModuleError(
        "lazy_init",
        fn,
        "a callable NNX module or a method of one",
        "pass the model, or model.method, and then the sample inputs",
    )


def _finder(
    module: nnx.Module, fn: Callable[..., Any]
) -> Callable[[nnx.Module], Callable[..., Any]]:
    """What finds in the module, or in a copy of it, the method to call."""

    def find(target: nnx.Module) -> Callable[..., Any]:
        if target is module:
            return fn
        method: Any = fn
        found: Any = target if fn is module else functools.partial(method.__func__, target)
        return found

    return find


def _is_abstract(leaf: object) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)
