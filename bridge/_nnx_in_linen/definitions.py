"""The definition of a module: the stored one, or one that is made without computing anything."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx
from flax.core import meta

import registry
from bridge import _train_eval
from bridge._bounded_cache import BoundedCache
from bridge._conversion.arrays import Arrays
from bridge._conversion.linen_attributes import LinenHolder, LinenStyle
from bridge._conversion.neutral import Address, Path
from bridge._errors import InvalidModuleError, MismatchError, listed
from bridge._fingerprint import fingerprint, identity
from bridge._flax.nodes import nodes_below
from bridge._flax.tracers import trace_of
from bridge._flax.traces import partially_evaluate
from bridge._graphdefs import static_graphdef
from bridge._graphdefs.static_graphdef import Origin, StaticGraphDef
from bridge._graphdefs.structure import tracers
from bridge._graphdefs.template import Template
from bridge._initialization.creating import CREATING
from bridge._initialization.lazy_init import initialized
from bridge._types import is_shaped

from .arguments import Existing
from .bound_module import Call
from .constructor import Constructor
from .matched_variables import MatchedVariables
from .scope import WrapperScope

# Constructors are traced once for each set of arguments, not at each call without a GraphDef.
_rebuilt: BoundedCache[tuple[Template, bool]] = BoundedCache(maxsize=256)


def rebuild(
    constructor: Constructor, names: tuple[str, ...], call: Call | None, where: str
) -> StaticGraphDef:
    """The GraphDef for variables that came without it; nothing is computed.

    The constructor gets the RNG streams in `names`. The call is traced only if the module holds a
    `ToNNX`, whose variables depend on the inputs.
    """
    if isinstance(constructor.nnx_class, Existing):
        return constructor.nnx_class.graphdef
    try:
        graphdef, needs_call = _remembered(constructor, names, None, where)
        return _remembered(constructor, names, call, where)[0] if needs_call and call else graphdef
    except _DependentDefinitionError as error:
        raise MismatchError(
            f"{where}, whose definition depends on a key or an input",
            missing=[("nnx/graphdef", "the definition, which init has put into collection `nnx`")],
        ) from error


def without_tracers(
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
        return _remembered(constructor, names, call, where)[0]
    except _DependentDefinitionError as error:
        dependent = error.held or tracers(graphdef)
        raise InvalidModuleError(
            f"init of {where} in a JAX transform",
            next(iter(dependent.values()))[0],
            "a constructor that keeps arrays made from keys and inputs as state",
            f"held by {listed('/'.join(map(str, path)) for path in dependent)}, which is static:"
            " a function or a plain object, for example. Keep the value as an attribute of a"
            " module or in a Variable, or call init outside of the transform",
        ) from error


def found_without(
    scope: WrapperScope, leaves: Mapping[Address, Any], call: Call
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
    if not left or isinstance(constructor.nnx_class, Existing):
        return of_constructor
    try:
        of_call = scope.matched(_remembered(constructor, names, call, scope.where)[0], leaves)
    except Exception:
        # The call depends on the values of its inputs, so report the parameters as unknown.
        return of_constructor
    return of_call if left - of_call.unknown.keys() else of_constructor


def rebuilt(
    scope: WrapperScope, leaves: Mapping[Address, Any], call: Call | None = None
) -> StaticGraphDef:
    """The GraphDef that the constructor makes, for variables that came without it."""
    return rebuild(scope.constructor, scope.stream_names(leaves), call, scope.where)


def _remembered(
    constructor: Constructor, names: tuple[str, ...], call: Call | None, where: str
) -> tuple[StaticGraphDef, bool]:
    """`_abstract`, computed once for all that hold the same."""
    before = constructor.look()
    inputs = fingerprint(shapes_of(call))
    surroundings = names, inputs, identity(registry.current()), _settings(), CREATING.get()
    known = _rebuilt.find((before.fingerprint, surroundings))
    if known is not None:
        template, needs_call = known
        return template.fill(before.objects, Origin(before.fingerprint)), needs_call
    graphdef, needs_call = _abstract(constructor, names, call, where)
    # A constructor may count its calls; that does not make it another constructor.
    for look in (before, constructor.look()):
        template = Template.of(graphdef, look.objects)
        if template is not None:
            _rebuilt.keep((look.fingerprint, surroundings), (template, needs_call))
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


def shapes_of(call: Call | None) -> Any:
    """What tells calls apart: method, modes and inputs, arrays as shapes and dtypes."""
    if call is None:
        return None
    tools: Any = jax.tree
    leaves, tree = tools.flatten((call.args, call.kwargs))
    avals = [(x.shape, x.dtype) if is_shaped(x) else x for x in leaves]
    return call.method, dict(_train_eval.modes_in_force()), tree, avals


def _abstract(
    constructor: Constructor, names: tuple[str, ...], call: Call | None, where: str
) -> tuple[StaticGraphDef, bool]:
    """(the GraphDef, whether only a call would tell all variables)."""
    given = Arrays((call.args, call.kwargs) if call else ())
    made: list[tuple[StaticGraphDef, bool]] = []
    held: dict[Path, list[Any]] = {}

    def construct(key: jax.Array, *inputs: object) -> None:
        streams = dict.fromkeys(names, key)
        module, nodes, kept = constructor.construct(streams, where, is_abstract=True)
        if call is not None:
            args, kwargs = given.tree(list(inputs))
            module = initialized(module, call.function, args, kwargs, nodes).module
        kinds = set(map(type, nodes_below(module).objects))
        graphdef, _ = static_graphdef.split(module, constructor.origin, kept)
        made.append((graphdef, any(issubclass(kind, LinenHolder | LinenStyle) for kind in kinds)))
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

    `held` has the values that do, by the path of the attribute that holds them. It is empty if the
    constructor could not run without numbers.
    """

    def __init__(self, held: Mapping[Path, list[Any]]):
        self.held = held
        super().__init__()


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
