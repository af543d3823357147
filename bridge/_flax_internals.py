"""The one place that touches parts of Flax which have no public name.

Each use says what was tried instead. Everything else in the package stands on public names.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import inspect
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

import jax
from flax import linen as nn
from flax import nnx
from flax.core import Scope, partial_eval
from flax.core.scope import LazyRng, union_filters
from flax.linen import module as linen_module
from flax.nnx import variablelib
from flax.nnx.bridge import module as bridge_module
from flax.nnx.pytreelib import PytreeState
from flax.nnx.tracers import TraceState
from flax.typing import HashableMapping
from jax.core import Tracer

from ._errors import MissingRngError
from ._rngs import Draws, LazyKeys, used_streams

F = TypeVar("F", bound=Callable[..., Any])

# What every Variable's metadata holds, and what therefore says nothing about one Variable.
REQUIRED_METADATA: frozenset[str] = nnx.Variable.required_metadata
_TABULATE_ID = "_nnx_tabulate_id"
# The metadata of a Variable that its type, too, may define.
HOOKS = ("on_get_value", "on_set_value", "on_create_value", "on_add_axis", "on_remove_axis")


def variable_from_metadata(
    var_type: type[nnx.Variable[Any]], value: Any, metadata: Mapping[str, Any]
) -> nnx.Variable[Any]:
    """A Variable with exactly this value and metadata.

    The constructor would run the create hooks a second time and shard an annotated value at once,
    which fails without a mesh; `from_metadata` is what Flax's own merge calls.
    """
    defaults = nnx.var_defaults()
    full = {"hijax": defaults.hijax, "ref": defaults.ref, "eager_sharding": False}
    full.update((hook, getattr(var_type, hook)) for hook in class_hooks(var_type))
    full.update(metadata)
    if full["ref"]:
        value = jax.new_ref(value)
    return var_type.from_metadata(value, full)


def trace_state() -> TraceState:
    """What a Variable keeps to tell whether it is written into under the trace it was made in."""
    return TraceState()


def variable_in_trace(
    var_type: type[nnx.Variable[Any]], value: Any, metadata: dict[str, Any], trace: TraceState
) -> nnx.Variable[Any]:
    """`from_metadata` of many Variables, for which JAX is asked once which trace this is.

    Asking is most of what making a Variable costs, and `from_metadata` does it for each.
    """
    if metadata["hijax"]:
        return var_type.from_metadata(value, dict(metadata))
    variable = _new(var_type)
    _put_trace(variable, trace)
    _put_metadata(variable, metadata.copy())
    _put_value(variable, value)
    return variable


# By name each of them would be looked up again, for every Variable of every call.
_new = object.__new__
_slots: Any = nnx.Variable
_put_trace = _slots._trace_state.__set__
_put_metadata = _slots._var_metadata.__set__
_put_value = _slots._raw_value.__set__


def object_state_in_trace(noted: StaticObjectState, trace: TraceState) -> Any:
    """Such a state as an object has it; its constructor would ask JAX again which trace this is."""
    made = _new(PytreeState)
    made._trace_state = trace
    made._initializing, made._is_setup = noted
    return made


class StaticObjectState(NamedTuple):
    """What an NNX object keeps for NNX itself, as a static attribute of its GraphDef."""

    initializing: bool
    is_setup: bool

    @classmethod
    def of(cls, state: Any) -> Self:
        """The same of either form."""
        return cls(state.initializing, state.is_setup)


# What every NNX object keeps for NNX itself, in either form, and which attributes it has as data.
OBJECT_STATES = PytreeState, StaticObjectState
DATA_ATTRIBUTES = HashableMapping
# The dict in a `HashableMapping`; through its public methods every item is a call of Python.
attributes_dict = operator.attrgetter("_mapping")


def graph_attributes(node: nnx.Pytree) -> list[tuple[str, Any]]:
    """An object's attributes for its GraphDef, what it keeps for NNX itself as a static one.

    `nnx.Pytree` has that as a node of its own, and asks for every attribute in Python whether it is
    data: for a small model a good part of what a call of `nnx.jit` costs.
    """
    attributes = vars(node)
    if type(attributes.get(_TABULATE_ID)) is _NewTabulateId:
        object.__setattr__(node, _TABULATE_ID, int(attributes[_TABULATE_ID]))
        return list(_tabulated(graph_attributes(node)))
    is_data = attributes["_pytree__nodes"]._mapping.get
    data, static = nnx.graphlib.DataElem, nnx.graphlib.StaticElem
    state = attributes["_pytree__state"]
    noted = StaticObjectState.of(state)
    found: list[tuple[str, Any]] = []
    for name in sorted(attributes):
        value = attributes[name]
        if value is state:
            value = static(noted)
        elif not is_data(name):
            value = static(value)
        elif type(value) is not dict:
            # What a dict is Flax can tell by itself.
            value = data(value)
        found.append((name, value))
    return found


def set_graph_attributes(node: nnx.Pytree, attributes: Iterable[tuple[Any, Any]]) -> None:
    """The inverse of `graph_attributes`, for an object without attributes."""
    own = vars(node)
    own.update(attributes)
    own["_pytree__state"] = PytreeState(*own["_pytree__state"])


@functools.lru_cache(maxsize=1024)
def class_hooks(var_type: type[nnx.Variable[Any]]) -> frozenset[str]:
    """The hooks that a Variable type defines itself; every Variable of it has them as metadata."""
    return frozenset(hook for hook in HOOKS if hasattr(var_type, hook))


def raw_value(variable: nnx.Variable[Any]) -> Any:
    """What a Variable holds, before its get hooks, and read out of its reference if it has one."""
    value = variable.get_raw_value()
    return value[...] if variable.ref else value


def assign_raw_value(variable: nnx.Variable[Any], value: Any) -> None:
    """Puts a value into a Variable as it is: set hooks would change it a second time."""
    if variable.ref:
        variable.get_raw_value()[...] = value
    else:
        variable.set_raw_value(value)


# `get_raw_value` of a Variable that is not a hijax one, which would be a call of Python.
held_value = operator.attrgetter("_raw_value")


class RawValues:
    """What some Variables hold, before their hooks and references as they are.

    `get_raw_value` is a call of Python for each Variable, and `set_raw_value` asks JAX twice which
    trace this is; either costs more than passing the array to a program. Here the Variables are
    asked once which traces they belong to, which never changes.

    Args:
      variables: the Variables.
    """

    def __init__(self, variables: Iterable[nnx.Variable[Any]]):
        self._variables = list(variables)
        self._is_plain = not any(variable.hijax for variable in self._variables)
        self._traces: list[TraceState] = []
        for variable in self._variables if self._is_plain else ():
            if variable._trace_state not in self._traces:
                self._traces.append(variable._trace_state)

    def get(self) -> list[Any]:
        """The values, in the order of the Variables."""
        if self._is_plain:
            return list(map(held_value, self._variables))
        return [variable.get_raw_value() for variable in self._variables]

    def set(self, values: Mapping[int, Any]) -> None:
        """Puts in values by the index of their Variable: all of them or none.

        Raises:
          TraceContextError: a Variable belongs to another trace.
        """
        variables = self._variables
        if self._is_plain and all(trace.is_valid() for trace in self._traces):
            for index, value in values.items():
                object.__setattr__(variables[index], "_raw_value", value)
            return
        before = {index: variables[index].get_raw_value() for index in values}
        try:
            for index, value in values.items():
                variables[index].set_raw_value(value)
        except BaseException:
            for index, value in before.items():
                if variables[index].get_raw_value() is not value:
                    variables[index].set_raw_value(value)
            raise


def is_initializing(node: nnx.Pytree) -> bool:
    """Whether `lazy_init` is running through this module.

    The flag is Flax's own, because it is part of the GraphDef: a thread-local of ours would not be
    part of the cache key of an `nnx.jit` inside the model.
    """
    return node._pytree__state.initializing


def set_initializing(nodes: Sequence[nnx.Pytree], value: bool) -> None:
    """Sets the flag that `is_initializing` reads."""
    for node in nodes:
        node._pytree__state._initializing = value


def unbound_axis(error: NameError) -> str | None:
    """The axis that JAX says is not bound, None for another error.

    JAX tells which axes are bound, and not which a program asks for before it runs.
    """
    found = re.search(r"unbound axis name: ?'?([^\s'.]+)", str(error))
    return found[1] if found else None


def is_data_attribute(node: nnx.Pytree, name: str) -> bool:
    """Whether an attribute is state rather than static; there is no public reader."""
    return bool(node._pytree__nodes.get(name, False))


def mark_arrays_as_data(nodes: Iterable[nnx.Pytree]) -> None:
    """Makes array attributes that are no Variables data, whatever they are while traced.

    Flax 0.12.8 tells arrays by `issubclass`, which a tracer's type fails, and then keeps the tracer
    as a static attribute. `nnx.data` at the assignment would do, but the constructors are the
    user's.
    """
    for node in nodes:
        for name, value in list(vars(node).items()):
            if isinstance(value, jax.Array) and not is_data_attribute(node, name):
                setattr(node, name, nnx.data(value))


# For `nnx.use_eager_sharding`: as good as False, and told from a False that a constructor asks for.
LATER: Any = 0


def mark_eager_sharding(variables: Iterable[nnx.Variable[Any]]) -> None:
    """Says that Variables were made with eager sharding on, which were made with `LATER`.

    Those that are made abstractly, or where there is no mesh, are to be equal to the others; the
    public setter refuses a change.
    """
    late: list[Any] = [v for v in variables if v.eager_sharding is LATER]
    for variable in late:
        if not variable.hijax:
            variable._var_metadata["eager_sharding"] = True
        elif variable.has_qdd:
            state = variablelib._get_hijax_state(variable)
            state._var_metadata["eager_sharding"] = True
            variablelib._set_hijax_state(variable, state)
        # One around a reference cannot be changed at all.


class _NewTabulateId(int):
    """An id that `nnx.tabulate` has just put on an object, whose Variables it asks for next."""


def as_tabulated(name: str, value: Any) -> Any:
    """An attribute's value, marked if it is what `nnx.tabulate` 0.12.8 sets on an object.

    It shows names and shapes for the Variables that an object itself has, and only counts for those
    in a dict of it; a native model has an object for each dict that a ToNNX has. Nothing in its
    interface says how an object is to be shown.
    """
    return _NewTabulateId(value) if name == _TABULATE_ID else value


def _tabulated(attributes: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Attributes with the items of dicts in the place of the dicts, for this one look at them."""
    for name, value in attributes:
        if type(value) is dict:
            yield from _tabulated((f"{name}/{key}", item) for key, item in value.items())
        else:
            yield name, value


_tabulate_id: contextvars.ContextVar[int | None] = contextvars.ContextVar("id", default=None)


@contextlib.contextmanager
def tabulated_as(node: nnx.Pytree) -> Iterator[None]:
    """Objects that are made inside of a node count as that node for `nnx.tabulate`.

    It patches the methods of every class in a model, and the patched ones look for an id that it
    put on the objects it found; those that a wrapped module makes while it is called have none.
    """
    token = _tabulate_id.set(vars(node).get(_TABULATE_ID, _tabulate_id.get()))
    try:
        yield
    finally:
        _tabulate_id.reset(token)


def mark_tabulated(nodes: Sequence[nnx.Pytree]) -> None:
    """Gives objects the id of the node they are made inside of, if `nnx.tabulate` runs."""
    own = _tabulate_id.get()
    for node in nodes if own is not None else ():
        object.__setattr__(node, _TABULATE_ID, own)


@contextlib.contextmanager
def detached() -> Iterator[None]:
    """Linen modules made in this block do not attach themselves to the module that is being called.

    `parent=None` says the same for one module, but the constructors that run here are the user's.
    """
    stack = linen_module._context.module_stack
    stack.append(None)
    try:
        yield
    finally:
        stack.pop()


@contextlib.contextmanager
def capturing(intermediates: bool | Callable[[nn.Module, str], bool]) -> Iterator[None]:
    """Says what `capture_intermediates` says; `nn.apply` does it too, but makes its own scope."""
    if intermediates is True:
        intermediates = linen_module.capture_call_intermediates
    stack = linen_module._context.capture_stack
    stack.append(intermediates)
    try:
        yield
    finally:
        stack.pop()


def outer_mutable() -> Any:
    """The `mutable` of the Linen or bridge module that is being called, None outside of any."""
    bridge_parent = bridge_module.current_module()
    if bridge_parent is not None and bridge_parent.scope is not None:
        return bridge_parent.scope.mutable
    stack = linen_module._context.module_stack
    parent = stack[-1] if stack else None
    if parent is not None and parent.scope is not None:
        return parent.scope.mutable
    return None


def unbound_function(method: Callable[..., Any]) -> Callable[..., Any]:
    """The function behind a method that may be bound to a Linen module."""
    return linen_module._get_unbound_fn(method)


def children(module: nn.Module) -> Mapping[str, Any]:
    """The submodules of a bound Linen module by name, beside names that are no submodules.

    They exist once `setup` has run, which Linen does when an attribute is asked for that is not
    there; asking for one that nobody has would go through the model's own `__getattr__`.
    """
    module._try_setup()
    return module._state.children


def is_made_in_call(module: nn.Module) -> bool:
    """Whether a Linen module above is inside of its compact method, or of `setup`."""
    above = module.parent
    while isinstance(above, nn.Module):
        if above._state.in_compact_method or above._state.in_setup:
            return True
        above = above.parent
    return False


class _Packed(NamedTuple):
    args: Sequence[Any]
    kwargs: Mapping[str, Any]


_unpacks: contextvars.ContextVar[bool] = contextvars.ContextVar("unpacks", default=False)


@contextlib.contextmanager
def intercepting(interceptor: Callable[..., Any]) -> Iterator[None]:
    """`nn.intercept_methods`, in which `call_method` passes every keyword on."""

    def intercept(next_function: Any, args: Any, kwargs: Any, context: Any) -> Any:
        if args and type(args[0]) is _Packed:
            args, kwargs = args[0]
        return interceptor(next_function, args, kwargs, context)

    token = _unpacks.set(True)
    try:
        with nn.intercept_methods(intercept):
            yield
    finally:
        _unpacks.reset(token)


def call_method(
    function: Callable[..., Any], bound: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Calls an unbound method, or another function, on a bound Linen module.

    While there are interceptors, Flax 0.12.8 passes the arguments of a method through a function
    whose own are called `orig_method` and `module`, so keywords of these names are hidden from it.
    """
    is_method = getattr(function, "method_handler_wrapped", False)
    if is_method and _unpacks.get() and kwargs.keys() & {"orig_method", "module"}:
        args, kwargs = (_Packed(args, kwargs),), {}
    return function(bound, *args, **kwargs)


def registered_names(module: nn.Module) -> frozenset[str]:
    """What a bound Linen module has registered itself; `variables` does not tell whose they are."""
    return frozenset(module._state.children)


def remove_variable(module: nn.Module, collection: str, path: Sequence[Any]) -> None:
    """Removes a leaf from a mutable collection of a bound Linen module, with what it leaves empty.

    `put_variable` merges, and `variables` may be a copy.
    """
    scope: Any = module.scope
    tree = scope._mutable_collection(collection)
    parents: list[tuple[Any, Any]] = []
    for key in path:
        if not isinstance(tree, dict) or key not in tree:
            return
        parents.append((tree, key))
        tree = tree[key]
    del parents[-1][0][parents[-1][1]]
    for (parent, key), (below, _) in zip(parents[-2::-1], parents[:0:-1], strict=True):
        if not below:
            del parent[key]


def shares_scope(module: nn.Module) -> bool:
    """Whether a module that is being called has the scope of this one, as of `nn.share_scope`."""
    scope: Any = module.scope
    return any(
        other is not None
        and other is not module
        and other.scope is not None
        and (other.scope is scope or _is_same_place(other.scope, scope))
        for other in linen_module._context.module_stack
    )


def _is_same_place(a: Scope, b: Scope) -> bool:
    return a.root is b.root and a.path == b.path


@contextlib.contextmanager
def overridden(module: nn.Module, fields: Mapping[str, Any]) -> Iterator[None]:
    """Other values for fields of a bound Linen module during one method call.

    `clone` makes another module with another scope; this one has to keep its place in the tree. The
    instance is the one that Linen made for this very call, so nobody else sees it.
    """
    before = {name: getattr(module, name) for name in fields}
    for name, value in fields.items():
        object.__setattr__(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            object.__setattr__(module, name, value)


class PlainFields(nn.Module):
    """A Linen module some of whose fields hold no module.

    Linen searches every field for modules, three times at each `apply`, and a dataclass field that
    is to be an argument of the constructor cannot be kept out of that.

    Attributes:
      _plain_fields: names of the fields that are not searched, of the class or of an instance.
    """

    # Annotated it must be a ClassVar: a field would be an argument of the constructor itself.
    _plain_fields: ClassVar[frozenset[str]] = frozenset()

    # Else Linen takes it for a method of the model, and every call of it for one of the model's.
    @nn.nowrap
    def _register_submodules(self, name: str, val: Any) -> None:
        if name not in self._plain_fields:
            super()._register_submodules(name, val)

    @nn.nowrap
    def clone(self, *, _deep_clone: Any = False, **options: Any) -> Self:
        # What is deep about it is a search for modules.
        is_plain = _are_all_fields(type(self), self._plain_fields)
        return super().clone(_deep_clone=False if is_plain else _deep_clone, **options)


@functools.lru_cache(maxsize=1024)
def _are_all_fields(module_type: type[nn.Module], names: frozenset[str]) -> bool:
    own = {field.name for field in dataclasses.fields(module_type) if field.init}
    return own <= names | {"parent", "name"}


def with_signature(function: F) -> F:
    """A function that knows its signature, which Linen else works out at each call of a method."""
    signed: Any = function
    signed.__signature__ = inspect.signature(function)
    return signed


class StreamScope(Scope):
    """A Linen scope whose keys are drawn when a module asks for them.

    Flax's scope wants every key at the start and hands all of them to every child, which would
    advance each RNG stream in each call. `make_rng`, `push` and `rewound` are public, but a child
    shares its parent's variables through an attribute that is not.
    """

    rngs: Any

    def __init__(self, variables: Any, streams: LazyKeys, counters: dict[Any, Any], **options: Any):
        super().__init__(variables, **options)
        self.rngs = streams
        self.rng_counters = counters
        for name in streams:
            counters.setdefault(name, 0)

    def make_rng(self, name: str = "params") -> Any:
        draws = self.rngs.draws if isinstance(self.rngs, LazyKeys) else None
        is_served = draws is not None and draws.serves(name)
        if not is_served and not self.has_rng(name):
            if not self.has_rng("params"):
                raise MissingRngError(
                    f"the Linen module at {self.path_text}",
                    [name],
                    self.rngs,
                    f"pass rngs= with a stream {name!r}, params or default to ToNNX or to the call",
                )
            name = "params"
        if draws is not None and draws.initializers:
            draws.initial.add(name)
        if not is_served:
            return super().make_rng(name)
        # Flax's would turn to `params` for a stream that `default` serves.
        self._check_valid()
        self._validate_trace_level()
        self.rng_counters[name] = self.rng_counters.get(name, 0) + 1
        return LazyRng.create(self.rngs[name], self.rng_counters[name]).as_jax_rng()

    def param(self, name: str, init_fn: Any, *init_args: Any, **options: Any) -> Any:
        return super().param(name, self._initializer(init_fn), *init_args, **options)

    def variable(
        self, col: str, name: str, init_fn: Any = None, *init_args: Any, **options: Any
    ) -> Any:
        return super().variable(col, name, self._initializer(init_fn), *init_args, **options)

    def _initializer(self, init_fn: Any) -> Any:
        """Tells keys of initial values from those that a forward pass draws."""
        if init_fn is None or not isinstance(self.rngs, LazyKeys):
            return init_fn
        draws = self.rngs.draws

        def initialize(*args: Any, **kwargs: Any) -> Any:
            draws.initializers += 1
            try:
                return init_fn(*args, **kwargs)
            finally:
                draws.initializers -= 1

        return initialize

    def push(self, name: str | None = None, prefix: str = "", reuse: bool = False) -> Scope:
        if not isinstance(self.rngs, LazyKeys):
            # A lifted transform has put keys of its own in the place of these.
            return super().push(name, prefix, reuse)
        child = self._without_keys(lambda: super(StreamScope, self).push(name, prefix, reuse))
        return self._adopt(child, self.rngs.below(child.name))

    def rewound(self, rewind_rngs: bool = False) -> Scope:
        if not isinstance(self.rngs, LazyKeys):
            return super().rewound(rewind_rngs)
        plain = self._without_keys(lambda: super(StreamScope, self).rewound(rewind_rngs))
        return self._adopt(plain, self.rngs)

    def _without_keys(self, make: Callable[[], Scope]) -> Scope:
        """Flax would compute all keys to pass them on."""
        own, self.rngs = self.rngs, {}
        try:
            return make()
        finally:
            self.rngs = own

    @staticmethod
    def _adopt(plain: Scope, streams: LazyKeys) -> StreamScope:
        """A scope that Flax has just made, as one of these; a copy would be a second one."""
        adopted: Any = plain
        adopted.__class__ = StreamScope
        adopted.rngs = streams
        for name in streams:
            adopted.rng_counters.setdefault(name, 0)
        return adopted


def run_linen(
    module: nn.Module,
    function: Callable[..., Any],
    variables: dict[str, Any],
    draws: Draws,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    mutable: Any,
    initializing: bool,
    capture_intermediates: Any,
    fields: Mapping[str, Any],
    modes: Mapping[str, Any],
) -> tuple[Any, Mapping[str, Any], set[str]]:
    """`module.apply`, or `module.init_with_output` if `initializing`, with keys drawn on demand.

    `nn.apply` and `flax.core.apply` make a scope of their own that holds every key, and neither can
    initialise a module some of whose variables exist.

    Args:
      module: the Linen module.
      function: its unbound method.
      variables: nested dicts, which Linen writes into.
      draws: where keys come from.
      args: the method's positional arguments.
      kwargs: the method's keyword arguments.
      mutable: the collections that may be updated.
      initializing: whether variables are created.
      capture_intermediates: as for `apply`.
      fields: other values for fields of the module.
      modes: what else the program depends on; `nn.jit` looks at a scope's flags, and not at
        interceptors, to tell whether it has compiled this before.

    Returns:
      (output, variables of the mutable collections, RNG streams that were used).
    """
    if capture_intermediates:
        mutable = union_filters(mutable, "intermediates")
    flags: dict[str, Any] = {"initializing": True} if initializing else {}
    if modes:
        flags["bridge_modes"] = tuple(sorted(modes.items()))
    counters: dict[Any, Any] = {}
    scope = StreamScope(variables, LazyKeys(draws), counters, mutable=mutable, flags=flags)
    with scope.temporary(), capturing(capture_intermediates):
        bound = module.clone(parent=scope, _deep_clone=True, **fields)
        output = call_method(function, bound, args, kwargs)
    updates = scope.mutable_variables() if mutable is not False else {}
    return output, updates, used_streams(counters)


def trace_of(value: Any) -> Any:
    """The trace that a value belongs to, None if it is a number."""
    return value._trace if isinstance(value, Tracer) else None


def partially_evaluate(function: Callable[..., Any], *inputs: jax.ShapeDtypeStruct) -> Any:
    """Runs only what does not depend on the abstract inputs, as Linen's own `lazy_init` does.

    `Module.lazy_init` does it for one Linen module, and a mixed model has no such method.
    """
    return partial_eval.lazy_init(function)(*inputs)
