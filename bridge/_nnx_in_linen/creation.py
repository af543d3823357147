"""Makes the module of a ToLinen: with its variables at `init`, or abstractly for its definition."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any

import jax
from flax import nnx
from flax.core import meta
from jax.core import Tracer

import registry
from bridge import _train_eval
from bridge._bounded_cache import BoundedCache
from bridge._conversion.arrays import Arrays
from bridge._conversion.collections import ARRAYS
from bridge._conversion.linen_attributes import LinenHolder, LinenStyle, held_variables
from bridge._conversion.neutral import Address, Path
from bridge._errors import InvalidModuleError, MismatchError, MissingInputsError, listed, path_text
from bridge._fingerprint import fingerprint, identity
from bridge._flax.tracers import trace_of
from bridge._flax.traces import partially_evaluate
from bridge._graphdefs import static_graphdef
from bridge._graphdefs.static_graphdef import Origin, StaticGraphDef
from bridge._graphdefs.structure import tracers
from bridge._graphdefs.template import Template
from bridge._initialization.creating import CREATING
from bridge._initialization.lazy_init import initialized
from bridge._types import is_shaped

from .bound_module import Call, method_of
from .constructor import Constructor
from .matched_variables import MatchedVariables, overlay
from .module_views import SHOWN, showing, unshow
from .scope import WrapperScope

# Constructors are traced once for each set of arguments, not at each call without a GraphDef.
_rebuilt: BoundedCache[Template] = BoundedCache(maxsize=256)


def create(
    scope: WrapperScope, leaves: Mapping[Address, Any], call: Call
) -> tuple[Any, StaticGraphDef]:
    """Constructs the module, and writes it and what the call creates.

    The `leaves` that are there stay as they are. Returns the call's output and the definition.
    """
    scope.store_graphdef(None)
    constructor, keys = scope.constructor, scope.constructor_keys()
    module, nodes, arrays = constructor.construct(keys, scope.where)
    shown: dict[Address, Any] = {}
    if leaves or SHOWN.get():
        graphdef, constructed = static_graphdef.split(module, arrays=arrays)
        if leaves:
            found = scope.matched(graphdef, leaves)
            scope.check(dataclasses.replace(found.comparison(), missing=()))
            overlay(constructed, found)
        if SHOWN.get():
            # At once, for Linen's interceptors to see it.
            shown = scope.as_linen(zip(graphdef.slots.places, constructed, strict=True))
            scope.write(shown, scope.read()[0])
    output = None
    donated: list[nnx.Variable[Any]] = []
    is_outermost = scope.linen.scope.parent is None
    is_called = bool(call.args or call.kwargs) or not is_outermost or _takes_nothing(module, call)
    if is_called:
        with showing(module, scope.linen) if SHOWN.get() else nullcontext():
            module, output, donated = initialized(
                module, call.function, call.args, call.kwargs, nodes
            )
        if SHOWN.get():
            unshow(module)
    else:
        _check_complete(scope, module)
    graphdef, made = static_graphdef.split(module, constructor.origin, arrays)
    is_bound, places = graphdef.is_bound, graphdef.slots.places
    if donated:
        # The call has given the initial values to a program, so those of another module stand in.
        again, constructed = static_graphdef.split(constructor.construct(keys, scope.where).module)
        new = dict(zip(again.slots.places, constructed, strict=True))
        gone = set(map(id, donated))
        made = [new.get(a, x) if id(x) in gone else x for a, x in zip(places, made, strict=True)]
    if [held for held in graphdef.look.objects if isinstance(held, Tracer)]:
        of_call = call if is_called else None
        graphdef = _without_tracers(graphdef, constructor, tuple(keys), of_call, scope.where)
    # An argument is not state: each call passes its own.
    kept = {(ARRAYS, path) for path, _ in graphdef.given}
    if shown:
        now = scope.matched(graphdef, scope.read()[0]).leaves
        kept |= {address for address, leaf in shown.items() if now.get(address) is not leaf}
    items = zip(places, made, strict=True)
    new_leaves = scope.as_linen([(a, item) for a, item in items if a not in kept])
    if left := scope.write(new_leaves, leaves):
        _check_left(scope, left)
    if not is_bound:
        scope.store_graphdef(graphdef)
    return output, graphdef


def _takes_nothing(module: object, call: Call) -> bool:
    """Whether a method can be called without any arguments."""
    try:
        inspect.signature(method_of(module, call.method)).bind()
    except TypeError:
        return False
    except ValueError:
        # It has no signature to be read.
        return True
    return True


def _check_complete(scope: WrapperScope, module: nnx.Module) -> None:
    """Raises if modules lack variables that only a call with inputs can create."""
    lacking = [
        ("/".join(map(str, path)), type(item.to_nnx__module).__name__)
        for path, item in nnx.iter_modules(module)
        if isinstance(item, LinenHolder) and not held_variables(item)
    ]
    if lacking:
        raise MissingInputsError(scope.where, lacking)


def _check_left(scope: WrapperScope, left: Iterable[Address]) -> None:
    """Raises for variables that a lifted transform would leave behind, as Linen does."""
    active = registry.current()
    lost = [
        (path_text(*address), "its collection among those that the transform lifts")
        for address in left
        if not issubclass(active.type_from_name(address[0]), nnx.RngState | nnx.Intermediate)
    ]
    if lost:
        remedy = (
            "Name the collection in the transform: in variable_axes, variable_broadcast or"
            " variable_carry, or in variables of nn.remat and nn.jit."
        )
        raise MismatchError(scope.where, missing=lost, remedy=remedy)


def found_without(
    scope: WrapperScope, leaves: Mapping[Address, Any], call: Call | None = None
) -> MatchedVariables:
    """Variables that came without a definition, against the one that fits them.

    A parameter that the constructor does not make may be one that the call makes, or one of a
    checkpoint for another model. So the call is traced: only what it creates may hold such a
    parameter, and a layer without a bias stays one. State that the call creates has to be there
    too, as with the definition that `init` stores.
    """
    constructor, names = scope.constructor, scope.stream_names(leaves)
    of_constructor = scope.matched(rebuild(constructor, names, call, scope.where), leaves)
    left = {address for address in of_constructor.unknown if address[0] == "params"}
    if not left or isinstance(constructor.nnx_class, StaticGraphDef):
        return of_constructor
    try:
        graphdef = _remembered(constructor, names, call, scope.where)
        of_call = scope.matched(graphdef, leaves)
    except Exception:
        # The call depends on the values of its inputs, so report the parameters as unknown.
        return of_constructor
    return of_call if left - of_call.unknown.keys() else of_constructor


def rebuild(
    constructor: Constructor, names: tuple[str, ...], call: Call | None, where: str
) -> StaticGraphDef:
    """The GraphDef for variables that came without it; nothing is computed.

    The constructor gets the RNG streams in `names`. The call is traced only if the module holds a
    `ToNNX`, whose variables depend on the inputs.
    """
    if isinstance(constructor.nnx_class, StaticGraphDef):
        return constructor.nnx_class
    try:
        graphdef = _remembered(constructor, names, None, where)
        kinds: set[Any] = {getattr(node, "type", None) for node in graphdef.nodes}
        creating = LinenHolder | LinenStyle
        if call is None or not any(isinstance(k, type) and issubclass(k, creating) for k in kinds):
            return graphdef
        return _remembered(constructor, names, call, where)
    except _DependentDefinitionError as error:
        raise MismatchError(
            f"{where}, whose definition depends on a key or an input",
            missing=[("nnx/graphdef", "the definition, which init has put into collection `nnx`")],
        ) from error


def _without_tracers(
    graphdef: StaticGraphDef,
    constructor: Constructor,
    names: tuple[str, ...],
    call: Call | None,
    where: str,
) -> StaticGraphDef:
    """The GraphDef of a module that was made in a trace, with numbers for the trace's values.

    A GraphDef outlives the trace, and no output of the trace can replace what is static in it.
    `names` are the RNG streams that the constructor got, and `call` is the call that has created
    what only a call creates, None if there was none.

    Raises InvalidModuleError if a value depends on a key or an input.
    """
    try:
        return _remembered(constructor, names, call, where)
    except _DependentDefinitionError as error:
        dependent = error.args[0] or tracers(graphdef)
        raise InvalidModuleError(
            f"init of {where} in a JAX transform",
            next(iter(dependent.values()))[0],
            "a constructor that keeps arrays made from keys and inputs as state",
            f"held by {listed('/'.join(map(str, path)) for path in dependent)}, which is static:"
            " a function or a plain object, for example. Keep the value as an attribute of a"
            " module or in a Variable, or call init outside of the transform",
        ) from error


def _remembered(
    constructor: Constructor, names: tuple[str, ...], call: Call | None, where: str
) -> StaticGraphDef:
    """`_abstract`, computed once for all that hold the same."""
    before = constructor.look()
    inputs = fingerprint(call and shapes_of(call))
    surroundings = names, inputs, identity(registry.current()), _settings(), CREATING.get()
    known = _rebuilt.find((before.fingerprint, surroundings))
    if known is not None:
        return known.fill(before.objects, Origin(before.fingerprint))
    graphdef = _abstract(constructor, names, call, where)
    # A constructor may count its calls; that does not make it another constructor.
    for look in (before, constructor.look()):
        template = Template.of(graphdef, look.objects)
        if template is not None:
            _rebuilt.keep((look.fingerprint, surroundings), template)
    return graphdef


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


def shapes_of(call: Call) -> Any:
    """What tells calls apart: method, modes and inputs, arrays as shapes and dtypes."""
    tools: Any = jax.tree
    leaves, tree = tools.flatten((call.args, call.kwargs))
    avals = [(x.shape, x.dtype) if is_shaped(x) else x for x in leaves]
    return call.method, dict(_train_eval.modes_in_force()), tree, avals


def _abstract(
    constructor: Constructor, names: tuple[str, ...], call: Call | None, where: str
) -> StaticGraphDef:
    """The GraphDef, for which nothing is computed unless the constructor needs numbers."""
    given = Arrays((call.args, call.kwargs) if call else ())
    made: list[StaticGraphDef] = []
    held: dict[Path, list[Any]] = {}

    def construct(key: jax.Array, *inputs: object) -> None:
        streams = dict.fromkeys(names, key)
        module, nodes, arrays = constructor.construct(streams, where, is_abstract=True)
        if call is not None:
            args, kwargs = given.tree(list(inputs))
            module = initialized(module, call.function, args, kwargs, nodes).module
        graphdef, _ = static_graphdef.split(module, constructor.origin, arrays)
        made.append(graphdef)
        trace = trace_of(key)
        held.clear()
        for path, values in tracers(graphdef).items():
            # One of an outer trace is the caller's.
            own = [value for value in values if trace_of(value) is trace]
            held.update({path: own} if own else {})

    api: Any = jax
    key = api.eval_shape(lambda: jax.random.key(0))
    problem: Exception | None = None
    ways: tuple[Any, ...] = api.eval_shape, _with_numbers, partially_evaluate
    for run in ways:
        try:
            run(construct, key, *given.avals)
        except _NO_NUMBER as error:
            problem = error
        else:
            if not held:
                return made[-1]
    raise _DependentDefinitionError(held) from problem


class _DependentDefinitionError(Exception):
    """A definition depends on a key or an input.

    Its argument has the values that do, by the path of the attribute that holds them. It is empty
    if the constructor could not run without numbers.
    """


# What JAX raises where a program needs the number behind a tracer.
_NO_NUMBER = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.UnexpectedTracerError,
)


def _with_numbers(function: Callable[..., Any], *inputs: jax.ShapeDtypeStruct) -> None:
    """Computes what does not depend on the inputs, also where a program is being traced."""
    with jax.ensure_compile_time_eval():
        partially_evaluate(function, *inputs)
