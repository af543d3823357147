"""One program that creates a model in its shards: its shapes first, then their shardings."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
from flax import linen as nn
from flax import nnx
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding

from bridge._conversion.arrays import Arrays
from bridge._conversion.collections import graphdefs_in
from bridge._errors import InvalidModuleError, InvalidRngsError, mapping_error
from bridge._fingerprint import Look
from bridge._flax.nodes import nodes_below
from bridge._flax.objects import mark_arrays_as_data
from bridge._graphdefs.structure import structure
from bridge._initialization.lazy_init import lazy_init
from bridge._randomness.streams import is_one_key
from bridge._types import State

from .explicit_axes import NO_MESH, all_auto
from .specs import AxisRules, Mesh, shardings


class ShardedProgram:
    """One initialisation: how the model is made, and where its leaves belong."""

    def __init__(
        self,
        build: object,
        mesh: Mesh,
        inputs: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        rules: AxisRules | Mapping[str, Any],
        rngs: object,
        method: object,
        name: str = "init_sharded",
    ):
        self._mesh = mesh
        self._method: Any = method
        self._rules = _pairs(rules)
        self._inner_mesh = mesh
        self._linen: Any = build if isinstance(build, nn.Module) else None
        self._state: Any = None
        if isinstance(build, nnx.Module):
            if rngs is not None:
                raise InvalidModuleError(
                    f"{name} with rngs",
                    build,
                    "a Linen module, or a function of rngs that returns an NNX module",
                    "give `lambda rngs: Model(…, rngs=rngs)`, or give the module its rngs: it draws"
                    " from its own streams",
                )
            self._given, self._state = nnx.split(build)
        elif self._linen is None and not _is_constructor(build):
            raise InvalidModuleError(
                name,
                build,
                "a Linen module, or a function that returns an NNX module",
                "give a Linen class as an instance, and an NNX model as `lambda: Model(…)`",
            )
        self._build: Any = build
        cls = build if isinstance(build, type) else type(build)
        self._where = getattr(build, "__qualname__", cls.__name__)
        needed = self._linen is not None or (self._state is None and _needs_rngs(build))
        _check_rngs(rngs, f"{name} of {self._where}", needed=needed)
        inputs = (inputs, dict(kwargs))
        self._inputs = Arrays(inputs)
        self._is_abstract = any(isinstance(x, jax.ShapeDtypeStruct) for x in self._inputs.values)
        # Abstract arrays cannot be arguments of a program.
        arrays = [] if self._is_abstract else self._inputs.values
        self._given_arguments = (arrays, rngs, self._state)
        self._definitions: list[nnx.GraphDef[Any]] = []

    def run(self) -> Any:
        """The model."""
        tree, shards = self._plan()
        with self._context():
            leaves = self.jitted(shards)(*self._arguments)
        leaves = [
            jax.device_put(leaf, NamedSharding(self._mesh, shard.spec))
            for leaf, shard in zip(leaves, shards, strict=True)
        ]
        return self._model(jax.tree.unflatten(jax.tree.structure(tree), leaves))

    def abstract(self) -> Any:
        """The model's shapes and shardings."""
        tree, shards = self._plan()
        leaves = [
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=shard)
            for leaf, shard in zip(jax.tree.leaves(tree), shards, strict=True)
        ]
        return self._model(jax.tree.unflatten(jax.tree.structure(tree), leaves))

    def lower(self) -> Any:
        """The jitted program, lowered and not compiled; nothing is allocated."""
        _, shards = self._plan()
        # An abstract mesh has no devices to take the platform from.
        is_abstract = isinstance(self._mesh, jax.sharding.AbstractMesh)
        platforms = (jax.default_backend(),) if is_abstract else None
        with self._context():
            return self.jitted(shards).trace(*self._arguments).lower(lowering_platforms=platforms)

    def jitted(self, shards: list[NamedSharding]) -> Any:
        """The program that makes the leaves."""
        out = [NamedSharding(self._inner_mesh, shard.spec) for shard in shards]
        return jax.jit(lambda *a: jax.tree.leaves(self._make(*a)), out_shardings=out)

    def _plan(self) -> tuple[Any, list[NamedSharding]]:
        """The tree of abstract leaves, and the shardings of its leaves in order."""
        try:
            tree = self._shapes()
        except ValueError as error:
            # Flax stops at the first leaf that does not fit the mesh; without one it has none to
            # look at.
            with self._context(NO_MESH), nnx.use_eager_sharding(False):
                try:
                    tree = jax.eval_shape(self._make, *self._arguments)
                except Exception:
                    raise error from None
            shardings(tree, self._mesh, self._rules, self._where)
            raise
        return tree, shardings(tree, self._mesh, self._rules, self._where)

    def _shapes(self) -> Any:
        """The tree of abstract leaves; sets the mesh that the model is made in.

        With all axes Auto the compiler splits a value before it exists. In a mesh with Explicit
        axes, NNX makes the whole value on every device and then reshards it. Linen does not know
        Explicit axes, and NNX knows no mesh with both types. A model that names its Explicit axes
        when it is made is made with them, and so is one that holds an array of this mesh, for
        instance in a function that the constructor keeps.
        """
        self._inner_mesh = all_auto(self._mesh)
        shapes: Any = None
        problem: Exception | None = None
        try:
            with self._context():
                shapes = jax.eval_shape(self._make, *self._arguments)
        except Exception as error:
            problem = error
        if AxisType.Explicit in self._mesh.axis_types and (problem or self._is_bound()):
            self._inner_mesh = self._mesh
            try:
                with self._context():
                    return jax.eval_shape(self._make, *self._arguments)
            except Exception:
                # Flax does not make there what is annotated: a native Linen module, or any with
                # axes of both types.
                if self._linen is None and AxisType.Auto not in self._mesh.axis_types:
                    raise
            self._inner_mesh = all_auto(self._mesh)
        if problem is not None:
            raise problem
        return shapes

    @property
    def _arguments(self) -> tuple[Any, ...]:
        """Inputs, keys and state, on the mesh that the model is made in."""
        if self._inner_mesh is self._mesh:
            return self._given_arguments
        return jax.tree.map(_on_auto_axes, self._given_arguments)

    def _is_bound(self) -> bool:
        """Whether a definition holds an array that the constructor has made on this mesh."""
        kept = (at for graphdef in self._definitions for at in structure(graphdef).values())
        held = (x for at in kept for x in Look(at, made=True).objects if isinstance(x, jax.Array))
        return any(not jax.typeof(x).sharding.mesh.empty for x in held)

    def _make(
        self, arrays: list[Any], rngs: jax.Array | Mapping[str, Any] | None, state: State | None
    ) -> Any:
        """The Linen variables, or the State of the NNX model."""
        inputs, kwargs = self._inputs.tree(arrays if arrays else self._inputs.values)
        if self._linen is not None:
            variables = self._variables(rngs, inputs, kwargs)
            self._definitions = [graphdef for _, graphdef in graphdefs_in(variables)]
            return variables
        model = self._nnx_module(rngs, state)
        if inputs or kwargs:
            lazy_init(getattr(model, self._method) if self._method else model, *inputs, **kwargs)
        # In a trace, NNX takes an array for static until it is marked.
        mark_arrays_as_data(nodes_below(model).objects)
        self._graphdef, made = nnx.split(model)
        return made

    def _variables(self, rngs: object, inputs: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        init = self._linen.lazy_init if self._is_abstract else self._linen.init
        options = {} if self._method is None else {"method": self._method}
        return init(rngs, *inputs, **options, **kwargs)

    def _nnx_module(
        self, rngs: jax.Array | Mapping[str, Any] | None, state: State | None
    ) -> nnx.Module:
        if state is not None:
            return nnx.merge(self._given, state)
        if rngs is None:
            model = self._build()
        else:
            streams = nnx.Rngs(**rngs) if isinstance(rngs, Mapping) else nnx.Rngs(rngs)
            model = self._build(rngs=streams)
        if not isinstance(model, nnx.Module):
            raise InvalidModuleError(
                self._where, model, "to return an NNX module", "return the model itself"
            )
        return model

    def _model(self, tree: object) -> Any:
        return tree if self._linen is not None else nnx.merge(self._graphdef, tree)

    @contextlib.contextmanager
    def _context(self, mesh: Mesh | None = None) -> Iterator[None]:
        """The mesh and the rules in force."""
        mesh = self._inner_mesh if mesh is None else mesh
        with contextlib.ExitStack() as stack:
            if isinstance(mesh, jax.sharding.Mesh):
                stack.enter_context(jax.set_mesh(mesh))
            else:
                stack.enter_context(jax.sharding.use_abstract_mesh(mesh))
            if self._rules is not None:
                stack.enter_context(nn.logical_axis_rules(self._rules))
            yield


def _on_auto_axes(leaf: object) -> Any:
    """An argument on the same mesh with all axes Auto, if it is on one with others."""
    if not isinstance(leaf, jax.Array) or isinstance(leaf, Tracer):
        return leaf
    sharding = leaf.sharding
    if not isinstance(sharding, NamedSharding) or AxisType.Explicit not in sharding.mesh.axis_types:
        return leaf
    return jax.device_put(leaf, NamedSharding(all_auto(sharding.mesh), sharding.spec))


def _is_constructor(build: object) -> bool:
    is_linen = isinstance(build, type) and issubclass(build, nn.Module)
    return callable(build) and not is_linen


def _pairs(rules: object) -> AxisRules:
    """The rules as pairs, None for those in force."""
    if rules is None:
        return None
    pairs = rules.items() if isinstance(rules, Mapping) else rules
    if not isinstance(pairs, Iterable) or isinstance(pairs, str):
        raise mapping_error(rules, _RULES)
    pairs = tuple(pairs)
    if not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):
        raise mapping_error(rules, _RULES)
    return tuple((name, axis) for name, axis in pairs)


_RULES = "rules as (logical name, mesh axis) pairs or a dict, such as {'embed': 'data'}"


def _check_rngs(rngs: object, where: str, *, needed: bool) -> None:
    if rngs is None:
        if not needed:
            return
        remedy = "pass rngs=jax.random.key(0); shapes and shardings do not depend on the key"
        raise InvalidRngsError(rngs, where, "a key", remedy)
    keys = list(rngs.values()) if isinstance(rngs, Mapping) else [rngs]
    if not keys or not all(map(is_one_key, keys)):
        raise InvalidRngsError(rngs, where, "a key")


def _needs_rngs(build: Any) -> bool:
    """Whether a function of an NNX module cannot be called without `rngs`."""
    try:
        given = inspect.signature(build).parameters.get("rngs")
    except (TypeError, ValueError):
        return False
    return given is not None and given.default is given.empty
