"""The base of `ToNNX`, and the Linen variables among its attributes: read, added and updated."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import numpy as np
from flax import linen as nn
from flax import nnx

import registry
from bridge._errors import ReservedNameError, bullets, unread_hooks_text, warn
from bridge._fingerprint import Look
from bridge._flax.objects import CAPTURES, is_note
from bridge._flax.variables import assign_raw_value, class_hooks
from bridge._types import DICT, VARIABLE, CollectionFilter, Variable

from . import linen_leaves, nnx_leaves
from .collections import holds_state
from .neutral import Address, Leaf, Neutral, Path, laid_over, nest

# No Linen variable can have a name that starts with it.
OWN_PREFIX = "to_nnx__"


class LinenHolder(nnx.Module):
    """An NNX module with the variables of a Linen module as its attributes.

    What stays as it is by default is on the class: NNX walks through every attribute of an
    instance, at each `nnx.jit` for instance.

    Attributes:
      to_nnx__module: the Linen module. The instance keeps it in a `HeldModule`.
      to_nnx__rngs: the streams that its keys are drawn from.
      to_nnx__plain_keys: the names of streams that were given as plain keys.
      to_nnx__mutable: the collections that every call may update.
      to_nnx__modes: what `train()` and `eval()` have set, by name.
      to_nnx__eager_sharding: whether annotated variables are sharded at once.
      to_nnx__graphdefs: collection `nnx` of the modules inside. It is static, so it is in no
        Variable, but an initialisation that creates it must keep it.
      to_nnx__collections: the state collections that an initialisation has made or sown into. They
        may be empty now: `nnx.pop` takes out what a call has sown.
      to_nnx__path: where it is in the outermost module, if it was told.
    """

    to_nnx__module: nn.Module
    to_nnx__rngs: nnx.Rngs | None = None
    to_nnx__plain_keys: frozenset[str] = frozenset()
    to_nnx__mutable: CollectionFilter = False
    to_nnx__modes: tuple[tuple[str, Any], ...] = ()
    to_nnx__eager_sharding: bool | None = None
    to_nnx__graphdefs: tuple[tuple[Path, nnx.GraphDef[Any]], ...] = ()
    to_nnx__collections: tuple[str, ...] = ()
    to_nnx__path: tuple[str, ...] = ()

    def stream_counts(self) -> list[Variable]:
        """The counts of the streams that keys are drawn from."""
        streams = self.to_nnx__rngs
        return [] if streams is None else [streams[name].count for name in streams]


# Equal fields of these types have equal hashes, and hashing them takes no time.
_HASHED = (bool, int, float, str, bytes)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class HeldModule:
    """A Linen module that equals another if a program cannot distinguish them.

    A Linen module compares its fields with `==`. For arrays the result is another array, and `==`
    also holds for 2 and 2.0, which a program distinguishes. So fields are compared by their
    fingerprints, which hold the bytes of arrays.
    """

    module: nn.Module

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, HeldModule):
            return NotImplemented
        if self.module is other.module:
            return True
        own, others = (Look(each.module, made=True).fingerprint for each in (self, other))
        return own == others

    def __hash__(self) -> int:
        # At each call of `nnx.jit`, so not by the fingerprint.
        names = (field.name for field in dataclasses.fields(self.module))
        fields = (getattr(self.module, name, None) for name in names)
        return hash((type(self.module).__name__, *(x for x in fields if isinstance(x, _HASHED))))

    def __repr__(self) -> str:
        return repr(self.module)


class LinenStyle(nnx.Module):
    """The base of `bridge.Module`, which is in a package above."""

    bridge__has_own_init: ClassVar[bool] = False
    # Of each subclass.
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]


# Says of a `bridge.Module` that its `setup` has run, so what that made has to stay.
IS_SETUP = "bridge__is_setup"
# The attributes that an initialisation creates beside the variables.
CREATED_ATTRIBUTES = frozenset(
    {
        "to_nnx__graphdefs",
        "to_nnx__collections",
        IS_SETUP,
        "bridge__names",
        "bridge__priorities",
    }
)


def name_of(holder: LinenHolder) -> str:
    """What messages call a wrapper."""
    return f"ToNNX({type(holder.to_nnx__module).__name__})"


class HeldVariable(NamedTuple):
    """A Linen variable inside a wrapper."""

    path: Path
    variable: Variable
    leaf: Leaf


def held_variables(wrapper: LinenHolder) -> dict[Address, HeldVariable]:
    """Every Linen variable of a wrapper by (collection, path).

    Plain attributes and what NNX's tools leave on a module are not Variables and are passed over.
    Raises ConversionError if there are two Variables for one address.
    """
    active = registry.current()
    found: list[tuple[Path, Variable]] = []
    for name, value in vars(wrapper).items():
        if not is_own_name(name):
            _find_variables((name,), value, found)
    held: dict[Address, HeldVariable] = {}
    for path, variable in found:
        address = nnx_leaves.address_of(path, variable, active)
        if address in held:
            raise nnx_leaves.two_at(*address)
        leaf = nnx_leaves.to_leaf(variable, active, boxed_as_is=True)
        held[address] = HeldVariable(path, variable, leaf)
    return held


def is_own_name(name: str) -> bool:
    """Whether an attribute belongs to the wrapper or to NNX rather than to the Linen module."""
    return name.startswith(OWN_PREFIX) or is_note(name) or name == CAPTURES


def report_hooks(wrapper: LinenHolder, value: object) -> None:
    """Warns that a Linen module does not run the hooks of the Variables that it is given.

    If there is an NNX module inside, it runs them itself, so there is no warning.
    """
    found: list[tuple[Path, Variable]] = []
    if not wrapper.to_nnx__graphdefs:
        _find_variables((), value, found)
    for _, variable in found:
        own = {"on_get_value", "on_set_value"} - class_hooks(variable.var_type)
        hooks = [name for name in sorted(own) if variable.get_metadata(name, None)]
        if hooks:
            warn(unread_hooks_text(name_of(wrapper), hooks))


def as_variables(held: Mapping[Address, HeldVariable], *, boxed: bool = True) -> dict[str, Any]:
    """Nested dicts for `module.apply`, made anew so that Linen may write into them.

    With `boxed`, values come in their metadata boxes, as Linen itself has them.
    """
    leaves = ((a, entry.leaf) for a, entry in held.items())
    return linen_leaves.to_dicts({a: leaf if boxed else Leaf(leaf.value) for a, leaf in leaves})


def state_collections(
    wrapper: LinenHolder, held: Mapping[Address, HeldVariable]
) -> tuple[str, ...]:
    """The collections that training updates, among those that the wrapper has or had."""
    known = {*wrapper.to_nnx__collections, *(collection for collection, _ in held)}
    return tuple(sorted(filter(holds_state, known)))


def note_collections(wrapper: LinenHolder, collections: Collection[str]) -> None:
    """Notes which state collections an initialisation has made or sown into."""
    known = {*wrapper.to_nnx__collections, *filter(holds_state, collections)}
    # On a wrapper without variables the attribute, though empty, says that it was initialised.
    if known != set(wrapper.to_nnx__collections) or not (collections or held_variables(wrapper)):
        wrapper.to_nnx__collections = tuple(sorted(known))


def is_initialized(wrapper: LinenHolder) -> bool:
    """Whether a wrapper has variables, or was initialised and needs none."""
    return "to_nnx__collections" in vars(wrapper) or bool(held_variables(wrapper))


def store(
    wrapper: LinenHolder,
    changed: Neutral,
    held: Mapping[Address, HeldVariable],
    *,
    update: bool = True,
    boxed: bool = True,
    then: Callable[[], None] = lambda: None,
) -> None:
    """Puts leaves into a wrapper: all of them, or none if anything raises.

    Args:
      wrapper: the module that holds the variables.
      changed: leaves; those with a Variable go into it, unless the value is the same object, and
        the others get a Variable.
      held: the Variables that are there.
      update: whether existing Variables may change. Then `changed` holds every leaf of its
        collections, and a variable that is missing there is removed, such as one that held an
        array and holds a dict now. If not, a leaf that has no place beside what is there is left
        out.
      boxed: whether a leaf without a metadata box says that its Variable has lost its metadata.
      then: what else belongs to the change; if it raises, nothing has happened.

    Raises:
      ReservedNameError: a name starts with the wrapper's own prefix.
      TraceContextError: a Variable or the wrapper belongs to another trace.
    """
    new, gone = _difference(changed, held, update)
    tree: dict[str, Any] = {}
    if new:
        occupied = [entry.path for a, entry in held.items() if a not in gone]
        tree = nest(nnx_leaves.to_leaves(new, occupied, all_variables=True))
        _check_names(wrapper, tree)
    attributes = dict(vars(wrapper))
    written: list[tuple[Variable, Any, dict[str, Any]]] = []
    try:
        for address in held.keys() & changed.keys() if update else ():
            entry, leaf = held[address], changed[address]
            before = entry.variable.get_metadata()
            # Linen gets new mappings to write into, so an empty one is a new object each time.
            is_same = leaf.value is entry.leaf.value or (leaf.is_empty and entry.leaf.is_empty)
            if not is_same:
                assign_raw_value(entry.variable, leaf.value)
                written.append((entry.variable, entry.leaf.value, before))
            if (boxed or leaf.box is not None) and leaf[1:] != entry.leaf[1:]:
                entry.variable.set_metadata(nnx_leaves.metadata_with(entry.variable, leaf))
        for address in gone:
            _remove(wrapper, held[address].path)
        # Into copies of the dicts, so that a failing call changes nothing.
        own = {name: value for name, value in vars(wrapper).items() if name in tree}
        for name, value in laid_over(own, tree).items():
            setattr(wrapper, name, nnx.data(value))
        then()
    except BaseException:
        for variable, value, metadata in written:
            assign_raw_value(variable, value)
            variable.set_metadata(metadata)
        vars(wrapper).clear()
        vars(wrapper).update(attributes)
        raise


def _check_names(wrapper: LinenHolder, tree: Mapping[Any, Any]) -> None:
    """Raises ReservedNameError if attributes of the wrapper have these names; it lists them all."""
    problems: list[str] = []
    for name in map(str, tree):
        static = getattr(type(wrapper), name, None)
        if name.startswith(OWN_PREFIX):
            problems.append(
                f"{name!r}: names that start with to_nnx__ hold the wrapper's own state"
            )
        elif is_own_name(name):
            problems.append(f"{name!r}: NNX keeps its own notes on a module under this name")
        elif isinstance(static, property) and static.fset is None:
            problems.append(f"{name!r}: {type(wrapper).__name__} has a property of this name")
    if problems:
        raise ReservedNameError(
            f"these Linen names cannot live in {name_of(wrapper)}:{bullets(problems)}\n"
            "Rename the variables or submodules."
        )


def _difference(
    changed: Neutral, held: Mapping[Address, HeldVariable], update: bool
) -> tuple[Neutral, list[Address]]:
    """The leaves that have no Variable, and the addresses of Variables that make room for them."""
    new = {address: leaf for address, leaf in changed.items() if address not in held}
    if update:
        whole = {collection for collection, _ in changed}
        return new, [a for a in held if a[0] in whole and a not in changed]
    if not new:
        return new, []
    # An empty mapping makes way for leaves; everything else stays.
    empty = {a for a, entry in held.items() if entry.leaf.is_empty}
    kept = held.keys() - empty
    new = {a: leaf for a, leaf in new.items() if not any(_overlap(a, b) for b in kept)}
    return new, [a for a in empty if any(_overlap(a, b) for b in new)]


def _overlap(a: Address, b: Address) -> bool:
    """Whether one of two addresses is above the other, or the same."""
    length = min(len(a[1]), len(b[1]))
    return a[0] == b[0] and a[1][:length] == b[1][:length]


def as_arrays(neutral: Neutral) -> Neutral:
    """The NumPy arrays of a restored checkpoint as JAX arrays, because Variables are written into.

    An array whose dtype JAX would cut, such as int64 without `jax_enable_x64`, stays a NumPy array.
    """
    return {
        address: leaf
        if isinstance(leaf.value, jax.Array)
        else leaf._replace(value=jax.tree.map(_as_jax_array, leaf.value))
        for address, leaf in neutral.items()
    }


def _as_jax_array(value: Any) -> Any:
    if not isinstance(value, _NUMPY):
        return value
    if jax.dtypes.canonicalize_dtype(value.dtype) != value.dtype:
        return np.array(value)
    return _numpy.asarray(value)


_NUMPY: Any = (np.ndarray, np.generic)
_numpy: Any = jax.numpy


# Not a generator: each level would create one, and a ToNNX reads its variables at each call.
def _find_variables(path: Path, value: Any, found: list[tuple[Path, Variable]]) -> None:
    # Cheap test first: a failing `isinstance(…, nnx.Variable)` is slow.
    if isinstance(value, DICT):
        for key, child in value.items():
            _find_variables((*path, key), child, found)
    elif isinstance(value, VARIABLE):
        found.append((path, value))


def _remove(wrapper: LinenHolder, path: Path) -> None:
    name, *below = path
    left = _without(vars(wrapper)[name], below) if below else {}
    if left:
        setattr(wrapper, name, nnx.data(left))
    else:
        delattr(wrapper, name)


def _without(tree: Mapping[Any, Any], path: Sequence[Any]) -> dict[Any, Any]:
    """A copy of nested dicts without a leaf, and without the dicts that it leaves empty."""
    key, *below = path
    left = dict(tree)
    if below and (child := _without(left[key], below)):
        left[key] = child
    else:
        del left[key]
    return left
