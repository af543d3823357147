"""A ToLinen in its scope: its variables and streams, and what is said about them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from flax import nnx
from flax.core import meta

from bridge._bounded_cache import BoundedCache
from bridge._conversion.collections import GRAPHDEF, STATIC, is_static
from bridge._conversion.matching import Comparison
from bridge._conversion.neutral import Address, Path, by_address, nest
from bridge._errors import (
    LostUpdateError,
    MismatchError,
    ReservedNameError,
    kept_definition_text,
    lost_update_text,
    path_text,
    unknown_paths_text,
    warn,
)
from bridge._fingerprint import fingerprint
from bridge._flax.linen_modules import remove_variable, shares_scope
from bridge._graphdefs import static_graphdef
from bridge._graphdefs.static_graphdef import StaticGraphDef
from bridge._randomness.streams import stream_of
from bridge._rules.rules import Renaming, RulesError, read_backward, rules_of
from bridge._types import VARIABLE, Variable

from .constructor import Constructor, class_of
from .matched_variables import MatchedVariables
from .module_views import SHOWN

_GRAPHDEF_ADDRESS: Address = STATIC, (GRAPHDEF,)
_warned: BoundedCache[bool] = BoundedCache(maxsize=4096)


class WrapperScope:
    """A ToLinen during one call, which need not be bound for what reads no variables.

    `is_extended` says whether a subclass has a `__call__` of its own. `rngs` are the keys of the
    call, by Linen's stream names.
    """

    def __init__(self, linen: Any, *, is_extended: bool = False):
        self.linen = linen
        self.rngs: Mapping[str, Any] = linen.scope.rngs if linen.scope is not None else {}
        self._is_extended = is_extended
        # Most have none, and each leaf of each call would be asked for.
        self._paths = _paths_by(linen.linen_paths) if linen.linen_paths else None
        fields = linen.nnx_class, linen.args, linen.kwargs, linen.skip_rng, linen.eager_sharding
        self.constructor = Constructor(*fields)

    @property
    def where(self) -> str:
        """What messages call the wrapper."""
        target = class_of(self.linen.nnx_class)
        place = "/".join(self.linen.path) if self.linen.scope is not None else ""
        name = getattr(target, "__name__", None) or repr(target)
        return f"ToLinen({name})" + (f" at {place}" if place else "")

    @property
    def keeps_graphdef(self) -> bool:
        """Whether the definition has a place: modules that share a scope would share it too."""
        return self.linen.store_graphdef and not shares_scope(self.linen)

    def read(self) -> tuple[dict[Address, Any], StaticGraphDef | None]:
        """The leaves of the variables, and the definition: None if a checkpoint has a stand-in."""
        leaves = by_address(self.linen.variables)
        if self._paths is not None:
            leaves = self._paths.by_nnx(leaves)
        stored = leaves.get(_GRAPHDEF_ADDRESS)
        is_graphdef = isinstance(stored, nnx.GraphDef)
        graphdef = static_graphdef.as_static(leaves[_GRAPHDEF_ADDRESS]) if is_graphdef else None
        for address in [a for a in leaves if a[0] == STATIC]:
            if leaves[address] is stored or is_static(*address, leaves[address]):
                del leaves[address]
        return leaves, graphdef

    def matched(self, graphdef: StaticGraphDef, leaves: Mapping[Address, Any]) -> MatchedVariables:
        """Leaves against a definition."""
        arguments = self.constructor.kept(graphdef) if graphdef.given else {}
        return MatchedVariables(graphdef, leaves, arguments)

    def check(self, compared: Comparison) -> None:
        """Raises MismatchError for parameters that are missing, or of another shape."""
        if compared.missing or (compared.mis_shaped and self.linen.strict is not False):
            raise compared.moved(self._in_linen).error(self.where)

    def _in_linen(self, address: Address) -> Address:
        """Where the variables have a leaf of the module."""
        return address if self._paths is None else self._paths.to_linen(address)

    def stream_names(self, leaves: Mapping[Address, Any]) -> tuple[str, ...]:
        """The RNG streams that a constructor gets which is only traced."""
        stored = (stream_of(address, leaf) for address, leaf in leaves.items())
        return tuple(sorted({*self.rngs, "default", *filter(None, stored)} - {"params"}))

    def constructor_keys(self) -> dict[str, Any]:
        """The keys by the stream names of `nnx.Rngs`; `params` serves what is missing."""
        keys = {name: rng.as_jax_rng() for name, rng in self.rngs.items()}
        if "params" in keys and "default" not in keys:
            keys["default"] = keys.pop("params")
        return keys

    def as_linen(self, items: Iterable[tuple[Address, Any]]) -> dict[Address, Any]:
        """The leaves of Linen variables for Variables and bare arrays."""
        to_leaf: Callable[[Any], Any] = self.linen.metadata_fn or Variable.get_value
        leaves: dict[Address, Any] = {}
        for address, item in items:
            if not isinstance(item, VARIABLE):
                leaves[address] = item
            elif self.linen.rng_state or not issubclass(item.var_type, nnx.RngState):
                leaves[address] = to_leaf(item)
        return leaves

    def store_graphdef(self, graphdef: StaticGraphDef | None) -> None:
        """Keeps the definition, unless a lifted transform has left its collection out.

        None keeps a place for it, because its collection must be the first one, but its content is
        known last.
        """
        linen = self.linen
        if linen.is_mutable_collection(STATIC) and self.keeps_graphdef:
            linen.put_variable(STATIC, GRAPHDEF, graphdef)

    def remove(self, addresses: Iterable[Address]) -> None:
        """Removes leaves from mutable collections, and the mappings that held nothing else."""
        for collection, path in map(self._in_linen, addresses):
            remove_variable(self.linen, collection, (str(path[0]), *path[1:]))

    def write(self, leaves: Mapping[Address, Any], found: Mapping[Address, Any]) -> list[Address]:
        """Writes leaves into the mutable collections, and leaves the others alone.

        A box among the leaves that are there (`found`) stays and gets the new value. Returns the
        addresses of new leaves outside of these collections.
        """
        linen = self.linen
        # Linen tries the filter of each outer scope in turn.
        is_mutable = functools.cache(linen.is_mutable_collection)
        by_collection: dict[str, dict[Path, Any]] = {}
        left: list[Address] = []
        for address, leaf in leaves.items():
            collection = address[0]
            if not is_mutable(collection):
                left += () if address in found else (address,)
                continue
            path = address[1] if self._paths is None else self._in_linen(address)[1]
            # Linen has only text at the top.
            own = tuple(map(str, path)) if linen.string_keys else (str(path[0]), *path[1:])
            if (collection, own[:1]) == _GRAPHDEF_ADDRESS:
                raise ReservedNameError(
                    f"{path_text(*address)} of a ToLinen holds its GraphDef; rename the attribute,"
                    " or register its Variable type for another collection"
                )
            new = _boxed_as(found[address], leaf) if address in found else leaf
            by_collection.setdefault(collection, {})[own] = new
        for collection, flat in by_collection.items():
            for name, tree in nest(flat).items():
                linen.put_variable(collection, name, tree)
        return left

    def may_update(self, address: Address, item: Any) -> bool:
        """Whether an update can be kept; warns once if it cannot.

        Raises LostUpdateError if it cannot and `strict` is True.
        """
        collection = address[0]
        if self.linen.is_mutable_collection(collection):
            return True
        is_rng = isinstance(item, VARIABLE) and issubclass(item.var_type, nnx.RngState)
        is_sown = isinstance(item, VARIABLE) and issubclass(item.var_type, nnx.Intermediate)
        if not is_sown and (self.linen.rng_state or not is_rng):
            self.report_lost(collection, lost_update_text(self.where, collection, is_rng))
        return False

    def report_lost(self, what: object, text: str) -> None:
        """Says once that an update is lost, or raises LostUpdateError if `strict` is True."""
        if self.linen.strict:
            raise LostUpdateError(text)
        self._warn_once(what, text)

    def report_unknown(self, unknown: Iterable[Address]) -> None:
        """Says once which variables the module does not have, as `strict` asks for it."""
        linen = self.linen
        if self._is_extended or shares_scope(linen) or SHOWN.get():
            # A subclass may have variables of its own, also some that it makes after this, and so
            # may a module that shares the scope, and interceptors that see the NNX modules.
            return
        # Names that are reserved belong to an interceptor; `variables` does not show the owner.
        reserved = linen.scope.name_reserved
        unknown = map(self._in_linen, unknown)
        unknown = [a for a in unknown if not a[1] or not reserved(a[1][0], a[0])]
        paths = tuple(path_text(*address) for address in unknown)
        if not paths or linen.strict is False:
            return
        updated = sorted({c for c, _ in unknown if linen.is_mutable_collection(c)})
        is_lost = updated and linen.store_graphdef and not linen.is_mutable_collection(STATIC)
        definition = kept_definition_text(updated[0]) if is_lost else ""
        if linen.strict:
            remedy = definition + MismatchError.REMEDY
            raise MismatchError(self.where, unknown=list(paths), remedy=remedy)
        self._warn_once(paths, unknown_paths_text(self.where, paths, definition))

    def _warn_once(self, what: object, text: str) -> None:
        if _warned.is_new((fingerprint(self.linen.nnx_class), self.linen.path, what)):
            warn(text)


def _boxed_as(old: Any, leaf: Any) -> Any:
    box, new = old, leaf
    is_boxed = isinstance(leaf, meta.AxisMetadata)
    if isinstance(old, meta.AxisMetadata):
        return box.replace_boxed(new.unbox() if is_boxed else new)
    if isinstance(old, dict) and box and is_boxed:
        # It came without its box, as `nn.unbox` leaves it; an empty one would be nothing.
        return new.unbox() or new
    return new


class LinenPaths:
    """Linen paths by the paths of the NNX module that replaces a Linen module, and back.

    `table` has NNX paths by Linen paths, as rules that only rename. Raises RulesError if a rule
    cannot be read, or changes arrays.
    """

    def __init__(self, table: Mapping[str, str]):
        routes = [route for rule in rules_of(table) for route in rule.routes]
        changing = [r.rule.linen for r in routes if r.is_stacked or r.rule.form.text]
        if changing:
            raise RulesError(
                f"{changing}, which change arrays",
                "rules that only rename",
                "give both modules leaves of the same shapes",
            )
        self._forward = [route.renaming() for route in routes]
        self._backward = read_backward(table)

    def by_nnx(self, leaves: dict[Address, Any]) -> dict[Address, Any]:
        """Linen leaves by their addresses in the NNX module."""
        return {_moved(self._forward, address): leaf for address, leaf in leaves.items()}

    def to_linen(self, address: Address) -> Address:
        """The address of an NNX leaf in the Linen variables."""
        return _moved(self._backward, address)


# The rules of a table are read once.
_paths_by = functools.lru_cache(maxsize=256)(LinenPaths)


def _moved(rules: Iterable[Renaming], address: Address) -> Address:
    collection, path = address
    if not rules or collection == STATIC:
        return address
    names = [str(key) for key in path]
    for end in range(len(names), 0, -1):
        for one in rules:
            hit = one.pattern.fullmatch("/".join(names[:end]))
            if hit is not None:
                start: Path = tuple(hit.expand(one.template).split("/"))
                return collection, (*start, *path[end:])
    return address
