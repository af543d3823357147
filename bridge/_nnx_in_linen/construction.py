"""Constructs the NNX module of a ToLinen, for real or abstractly."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from flax import nnx
from flax.core import meta

import registry
from bridge import _train_eval
from bridge._conversion.arrays import Arrays, is_array
from bridge._conversion.neutral import Address
from bridge._conversion.own_leaves import ARRAYS
from bridge._equality.bounded_cache import BoundedCache
from bridge._equality.contents import Contents, Origin, contents
from bridge._equality.walk import identity
from bridge._errors import MismatchError, MissingRngError
from bridge._flax.graphdef_builder import flatten
from bridge._flax.linen_modules import detached
from bridge._flax.nodes import Nodes, nodes_below
from bridge._flax.objects import mark_arrays_as_data
from bridge._flax.traces import partially_evaluate, trace_of
from bridge._graphdefs import static_graphdef
from bridge._graphdefs.leaves import GraphDefLeaves
from bridge._graphdefs.static_graphdef import Given, StaticGraphDef
from bridge._graphdefs.structure import is_equal, structure
from bridge._graphdefs.template import Template
from bridge._initialization.lazy_init import run_initializing
from bridge._randomness.missing_stream import missing_stream
from bridge._sharding import eager

from .arguments import Existing, arrays_in, takes_rngs, thaw
from .bound_module import method_in_modes
from .matched_variables import MatchedVariables

# Constructors are traced once for each set of arguments, not at each call without a GraphDef.
_rebuilt: BoundedCache[tuple[Template, bool]] = BoundedCache(maxsize=256)


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
    def origin(self) -> Origin:
        """What a GraphDef keeps of the constructor and its arguments, as they are now."""
        return self.contents().origin

    def contents(self, *, calls: bool = False) -> Contents:
        """What the constructor and its arguments hold at this moment.

        Args:
          calls: whether what only calls of the module use counts as well.
        """
        # Empty in most cases, and told faster.
        kwargs = self.kwargs or None
        options = (self.skip_rng, self.eager_sharding)
        return contents((self.nnx_class, self.args, kwargs, *options), calls=calls)

    def made(self, graphdef: StaticGraphDef, rebuilt: Callable[[], StaticGraphDef]) -> bool:
        """Whether a GraphDef is that of the module this constructs, or what calls made of it.

        Args:
          graphdef: the GraphDef.
          rebuilt: makes the GraphDef of a new module; it is asked only if calls have changed the
            definition, and the constructor does not tell whether it is the same one.
        """
        origin = graphdef.recipe
        if origin is None or isinstance(self.nnx_class, Existing):
            return True
        now = self.contents()
        if origin.is_still(now):
            return True
        is_equal = origin.is_equal(now)
        if origin.constructed is None or (origin.is_complete and now.is_complete and not is_equal):
            return False
        # The caller may have made an equal configuration, for instance. What only a call creates is
        # not in a new definition.
        new, old = structure(rebuilt()), structure(origin.constructed)
        has_all = new.keys() <= old.keys() if is_equal else new.keys() == old.keys()
        return has_all and all(_is_same(new[path], old[path]) for path in new)

    def arguments(self) -> tuple[Any, Any]:
        """The constructor's arguments as they were given, in containers of their own."""
        kwargs = {name: thaw(value) for name, value in self.kwargs.items()}
        return tuple(map(thaw, self.args)), kwargs

    def kept(self, graphdef: StaticGraphDef) -> dict[Address, Any]:
        """The arrays among the arguments that a module keeps as they are, by address."""
        if not graphdef.given:
            return {}
        arrays = dict(arrays_in((self.arguments(), _bound(self.nnx_class))))
        return {(ARRAYS, path): arrays[p] for path, p in graphdef.given if p in arrays}

    def construct(
        self, streams: Mapping[str, Any], where: str, *, is_abstract: bool = False
    ) -> Constructed:
        """The NNX module and what it consists of.

        Args:
          streams: keys by the stream names of `nnx.Rngs`.
          where: the wrapper, for the error.
          is_abstract: whether only shapes and metadata count; then nothing is sharded.

        Raises:
          MissingRngError: the constructor draws from a stream that is not there.
        """
        arguments: list[Any] = []

        def construct(rngs_type: type[nnx.Rngs] = nnx.Rngs) -> Any:
            arguments[:] = self.arguments()
            args, kwargs = arguments
            kwargs = dict(kwargs)
            if not self.skip_rng and "rngs" not in kwargs and takes_rngs(self.nnx_class):
                kwargs["rngs"] = rngs_type(**streams)
            with detached():
                return self.nnx_class(*args, **kwargs)

        try:
            module, nodes = eager.constructed(
                construct, self.eager_sharding, where, is_abstract=is_abstract
            )
        except (AttributeError, KeyError) as error:
            wanted = missing_stream(construct)
            if wanted is None:
                raise
            raise MissingRngError(
                f"the constructor of {where}",
                [wanted],
                streams,
                f"pass a key, or {{{wanted!r}: key}}, to init",
            ) from error
        mark_arrays_as_data(nodes.objects)
        return Constructed(
            module, nodes, _given(module, (tuple(arguments), _bound(self.nnx_class)))
        )


class Constructed(NamedTuple):
    """A module that was just constructed.

    Attributes:
      module: the module.
      nodes: what it consists of.
      given: which of its bare arrays are arguments of the constructor.
    """

    module: Any
    nodes: Nodes
    given: Given


def _bound(nnx_class: Callable[..., Any]) -> Any:
    """The arguments that a partial has already."""
    is_partial = isinstance(nnx_class, functools.partial)
    return (nnx_class.args, nnx_class.keywords) if is_partial else ()


def _given(module: Any, arguments: Any) -> Given:
    """Which bare arrays of a module are among its constructor's arguments, by identity."""
    places = {id(array): place for place, array in arrays_in(arguments)}
    if not places:
        return ()
    graphdef, leaves = flatten(module)
    return tuple(
        (slot.path, places[id(leaf)])
        for slot, leaf in zip(GraphDefLeaves(graphdef, registry.current()), leaves, strict=True)
        if slot.var_type is None and id(leaf) in places
    )


def _is_same(a: Any, b: Any) -> bool:
    return is_equal(a, b) or contents(a).key == contents(b).key


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
    graphdef, needs_call = _remembered(recipe, names, None, where)
    return _remembered(recipe, names, call, where)[0] if needs_call and call else graphdef


def found_for(
    recipe: Recipe,
    names: tuple[str, ...],
    call: Call,
    variables: Mapping[str, Any],
    where: str,
) -> MatchedVariables:
    """Variables that came without a definition, against the one that fits them.

    A parameter that the constructor does not make may be one that the call makes. So may any
    parameter of a checkpoint that is for another model, so the call is traced: nothing but what it
    creates may hold a parameter, and a layer without a bias stays one. State that the call creates
    has to be there too, as with the definition that `init` stores.

    Args:
      recipe: the constructor.
      names: the RNG streams that the constructor gets.
      call: the call at hand.
      variables: nested mappings by collection, without `nnx`.
      where: the wrapper, for errors.
    """
    found = _found(recipe, rebuild(recipe, names, call, where), variables)
    left = {address for address in found.unknown if address[0] == "params"}
    if not left or isinstance(recipe.nnx_class, Existing):
        return found
    try:
        called = _found(recipe, _remembered(recipe, names, call, where)[0], variables)
    except Exception:
        # The inputs' values decide what the call does. The parameters are reported as unknown.
        return found
    return called if left - called.unknown.keys() else found


def _found(
    recipe: Recipe, graphdef: StaticGraphDef, variables: Mapping[str, Any]
) -> MatchedVariables:
    return MatchedVariables(graphdef, variables, recipe.kept(graphdef))


def _remembered(
    recipe: Recipe, names: tuple[str, ...], call: Call | None, where: str
) -> tuple[StaticGraphDef, bool]:
    """`_abstract`, computed once for all that hold the same."""
    has_call = call is not None
    surroundings = names, identity(registry.current()), _settings()
    inputs = contents(_shapes(call)) if has_call else None
    before = recipe.contents(calls=has_call)
    key = before.key, inputs and inputs.key, surroundings
    found = _rebuilt.find(key)
    is_told = before.is_complete and (inputs is None or inputs.is_complete)
    if found is not None and is_told:
        template, needs_call = found
        return template.fill(before.objects, before.origin), needs_call
    graphdef, needs_call = _abstract(recipe, names, call, where)
    # A constructor may count its calls. What it has changed makes it no other constructor.
    after = recipe.contents(calls=has_call)
    for told in (before, after) if is_told and after.is_complete else ():
        template = Template.of(graphdef, told.objects)
        if template is not None:
            _rebuilt.keep((told.key, inputs and inputs.key, surroundings), (template, needs_call))
    return graphdef, needs_call


def _settings() -> tuple[Any, ...]:
    """The settings of JAX and Flax on which shapes, dtypes and Variables' metadata depend."""
    config: Any = jax.config
    return (
        config.jax_enable_x64,
        config.jax_numpy_dtype_promotion,
        config.jax_default_prng_impl,
        nnx.var_defaults(),
        nnx.using_eager_sharding(),
        jax.sharding.get_abstract_mesh(),
        meta.get_global_mesh(),
    )


def _shapes(call: Call | None) -> Any:
    """What tells calls apart: method, modes and inputs, arrays as shapes and dtypes."""
    if call is None:
        return None
    leaves, tree = jax.tree.flatten((call.args, call.kwargs))
    avals = [(x.shape, x.dtype) if is_array(x) else x for x in leaves]
    return call.method, dict(_train_eval.in_force()), tree, avals


def _abstract(
    recipe: Recipe, names: tuple[str, ...], call: Call | None, where: str
) -> tuple[StaticGraphDef, bool]:
    """(the GraphDef, whether only a call would tell all variables)."""
    given = Arrays((call.args, call.kwargs) if call else ())
    made: list[tuple[StaticGraphDef, bool]] = []
    is_whole: list[bool] = []

    def construct(key: Any, *inputs: Any) -> None:
        streams = dict.fromkeys(names, key)
        module, nodes, kept = recipe.construct(streams, where, is_abstract=True)
        if call is not None:
            args, kwargs = given.tree(list(inputs))
            run_initializing(module, method_in_modes(module, call.method), args, kwargs, nodes)
        kinds = set(map(type, nodes_below(module).objects))
        graphdef, _ = static_graphdef.split(module, recipe.origin, kept)
        made.append((graphdef, any(hasattr(kind, "linen_variables") for kind in kinds)))
        is_whole.append(not _holds_value_of(trace_of(key), graphdef))

    key = jax.eval_shape(lambda: jax.random.key(0))
    problem: Exception | None = None
    for run in (jax.eval_shape, _with_numbers, partially_evaluate):
        try:
            run(construct, key, *given.avals)
        except _NO_NUMBER as error:
            problem = error
        else:
            if is_whole[-1]:
                return made[-1]
    raise MismatchError(
        f"{where}, whose definition depends on a key or an input",
        missing=[("nnx/graphdef", "the definition, which init has put into collection `nnx`")],
    ) from problem


# What JAX raises where a program needs the number behind a tracer.
_NO_NUMBER = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.UnexpectedTracerError,
)


def _with_numbers(function: Callable[..., Any], *inputs: Any) -> None:
    """Computes what does not depend on the inputs, also where a program is being traced."""
    with jax.ensure_compile_time_eval():
        partially_evaluate(function, *inputs)


def _holds_value_of(trace: Any, graphdef: StaticGraphDef) -> bool:
    """Whether a static attribute holds a value of a trace: in a function's cell, for example."""
    found = contents(static_graphdef.static_parts(graphdef))
    # What can be told completely holds no value of any trace.
    return not found.is_complete and any(trace_of(value) is trace for value in found.objects)


def _aval_text(value: Any) -> Any:
    return f"{value.dtype}{value.shape}" if is_array(value) else value
