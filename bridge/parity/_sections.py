"""The comparisons of one check, one function for each section of the report."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.core import meta
from flax.traverse_util import flatten_dict
from jax.sharding import PartitionSpec

import registry
from bridge._conversion import linen_leaves
from bridge._conversion.neutral import Address, Leaf, Neutral, nest
from bridge._rules.numbers import folded
from bridge._sharding.specs import mesh_spec

from ._divergence import Layers
from ._layouts import AddressedValues, Layouts, as_text, by_text
from ._models import Model, is_of
from ._numbers import Compared, is_comparable, lacking, magnitude, nan_shows_nothing
from ._programs import ModelProgram, with_values
from ._recorder import Trace
from ._report import Section

_MOST_PLACES = 8
# A gradient that is all rounding, as that of a bias below a norm, is small beside the others.
_FLOOR = 0.1
_SEED = 20240229
_NOT_COMPARED = (nnx.RngState, nnx.Intermediate, nnx.Perturbation)


@dataclasses.dataclass(frozen=True)
class Sides:
    """Two models, how they correspond, and how their values are compared.

    `measure` is `compare` with the tolerances of the check.
    """

    programs: tuple[ModelProgram, ModelProgram]
    layouts: Layouts
    measure: Callable[..., Compared]

    def compare(
        self,
        a: AddressedValues,
        b: AddressedValues,
        floor: float = 0.0,
        *,
        are_weights: bool = False,
    ) -> Iterator[Compared]:
        """Compares values of `a`, in `a`'s layout, with values of `b`.

        Of weights, what only `b` has a place for is compared with the zeros that it has to be, and
        NaN on both sides is agreement. `floor` is the least magnitude that tolerances are relative
        to.
        """
        converted, found = self.layouts.convert(a), by_text(b)
        for address, value in converted.items():
            place = self.layouts.place(address)
            if address not in found:
                yield lacking(place, in_b=False, value=value)
            elif are_weights or self.layouts.sources.get(address):
                yield from self.leaves(place, value, found[address], floor, nan_agrees=are_weights)
        # What a plan has no source for is a problem of the plan, or `b`'s own.
        for address in [x for x in found if x not in converted and self.layouts.plan is None]:
            yield lacking(self.layouts.place(address), in_b=True, value=found[address])

    def leaves(
        self, place: str, a: Any, b: Any, floor: float = 0.0, *, nan_agrees: bool = False
    ) -> Iterator[Compared]:
        """Compares two trees leaf by leaf."""
        mine, other = leaves_of(a), leaves_of(b)
        for path in mine | other:
            where = f"{place}{path}"
            if path not in other:
                yield lacking(where, in_b=False, value=mine[path])
            elif path not in mine:
                yield lacking(where, in_b=True, value=other[path])
            else:
                found = self.measure(where, mine[path], other[path], floor=floor)
                yield found if nan_agrees else nan_shows_nothing(found, mine[path])


def port_plan(layouts: Layouts) -> Section:
    """What `port.plan` says of two models with other paths."""
    problems = [Compared(str(problem), "differs") for problem in layouts.plan.problems]
    return Section("port plan", tuple(problems))


def weights(sides: Sides) -> Section:
    """The values that the models were given with: parameters and state."""
    a, b = (values_of(p.model.values, *_NOT_COMPARED) for p in sides.programs)
    return Section("weights", tuple(sides.compare(a, b, are_weights=True)))


def outputs(sides: Sides, a: Any, b: Any) -> Section:
    """What a call returns."""
    return Section("outputs", tuple(sides.leaves("output", a, b)))


def layers(found: Layers | None, traces: Sequence[Trace]) -> Section:
    """What every layer returns."""
    if found is None:
        return Section("layers")
    notes = [f"{side}: {t.note}" for side, t in zip("ab", traces, strict=True) if t.note]
    for side, places in zip("ab", found.only, strict=True):
        if places:
            notes.append(f"calls without a counterpart, only in {side}: {_listed(places)}")
    if found.not_comparable:
        notes.append(f"calls not compared, of other shapes in and out: {found.not_comparable}")
    if found.nan_from:
        notes.append(f"NaN arises in both models in {found.nan_from}, whose inputs have none")
    return Section("layers", tuple(found.compared), "; ".join(notes))


def fields(found: Layers | None, *, is_advisory: bool) -> Section:
    """The static fields of the layers."""
    compared = []
    for place, differences in (found.fields if found else {}).items():
        compared += [
            Compared(f"{place}: {d.name}", "differs", values=(d.a, d.b)) for d in differences
        ] or [Compared(place, "bitwise")]
    note = "initialisers and functions without a name are not compared" if compared else ""
    return Section("fields", tuple(compared), note, is_advisory=is_advisory)


def _listed(places: Iterable[str]) -> str:
    """The first few places, those of repeated blocks as one, and how many there are besides."""
    places = folded(list(places))
    left = len(places) - _MOST_PLACES
    return ", ".join(places[:_MOST_PLACES]) + (f" and {left} more" if left > 0 else "")


def has_state(model: Model) -> bool:
    """Whether a model has values that are not parameters and that a call may update."""
    return bool(values_of(model.values, nnx.Param, *_NOT_COMPARED))


def state(sides: Sides) -> Section:
    """What a call with updates leaves in the collections that are not parameters."""
    kept = [values_of(p.model.values, nnx.Param, *_NOT_COMPARED) for p in sides.programs]
    if not any(kept):
        return Section("state", note="neither model has any")
    after, is_updated = [], False
    for program, before in zip(sides.programs, kept, strict=True):
        values = program.first().state if before else {}
        if program.state_note:
            return Section("state", note=program.state_note)
        own = {address: values[address].value for address in before}
        after.append(own)
        changes = (c for x in before for c in sides.leaves("", before[x], own[x], nan_agrees=True))
        is_updated |= any(c.verdict != "bitwise" for c in changes)
    if not is_updated:
        return Section("state", note=_NOT_UPDATED)
    return Section("state", tuple(sides.compare(after[0], after[1])))


_NOT_UPDATED = (
    "nothing was updated, so nothing was compared; if an argument such as train=False says that"
    " this is not training, leave it out, or check with train=True"
)


def gradients(sides: Sides) -> Section:
    """The gradients of the loss by parameter."""
    a, b = (program.first().gradients for program in sides.programs)
    compared = tuple(sides.compare(a, b, _floor(a)))
    return Section("gradients", compared, "; ".join(p.note for p in sides.programs if p.note))


def _floor(values: AddressedValues) -> float:
    return _FLOOR * max(map(magnitude, jax.tree.leaves(list(values.values()))), default=0.0)


def steps(sides: Sides, count: int, optimizer: optax.GradientTransformation) -> Section:
    """Parameters and state after each step of training, until one differs."""
    runs = [training(program, optimizer) for program in sides.programs]
    compared: tuple[Compared, ...] = ()
    for step, (a, b) in enumerate(zip(*runs, strict=True), 1):
        compared = tuple(sides.compare(a, b, _floor(a)))
        if not all(c.ok for c in compared):
            return Section("steps", compared, f"step {step} of {count} is the first to differ")
        if step == count:
            break
    return Section("steps", compared, f"values after step {count}; those before it agree too")


def training(
    program: ModelProgram, optimizer: optax.GradientTransformation
) -> Iterator[AddressedValues]:
    """Parameters and state of a model after each step, without end."""
    values, results = program.model.values, program.first()
    memory = None
    while True:
        parameters = _nested({x: values[x].value for x in results.gradients})
        memory = optimizer.init(parameters) if memory is None else memory
        updates, memory = optimizer.update(_nested(results.gradients), memory, parameters)
        new = flatten_dict(optax.apply_updates(parameters, updates))
        changed = {(c, path): new[c, *map(str, path)] for c, path in results.gradients}
        values = with_values(results.after, changed)
        yield values_of(values, *_NOT_COMPARED)
        results = program(values)


def projection(output: Any) -> Any:
    """The default loss: the mean of every float output, each element with a random weight.

    Random weights, because a plain sum has the same gradient in many places, which would hide
    what is swapped.
    """
    real = jax.dtypes.canonicalize_dtype(float)
    total = jnp.zeros((), real)
    for number, leaf in enumerate(leaves_of(output).values()):
        if is_comparable(leaf) and leaf.size and jnp.issubdtype(leaf.dtype, jnp.inexact):
            kind = jnp.promote_types(leaf.dtype, real)
            key = jax.random.fold_in(jax.random.key(_SEED), number)
            weight = jax.random.normal(key, leaf.shape, kind)
            total += jnp.mean(jnp.real(leaf.astype(kind) * weight)).astype(real)
    return total


def _nested(values: AddressedValues) -> dict[Any, Any]:
    """Values as the nested dicts that optimizers take, which sort their keys."""
    return nest({(c, *path): value for (c, path), value in by_text(values).items()})


def partition_specs(sides: Sides) -> Section:
    """The partition spec of every parameter, if either model has any."""
    a, b = (
        {as_text(x): (_specs_of(x, leaf), leaf.value) for x, leaf in p.model.values.items()}
        for p in sides.programs
    )
    if not any(spec for specs, _ in (*a.values(), *b.values()) for spec in specs):
        return Section("partition specs", note="neither model has any")
    compared, left_out = [], 0
    for address, (specs, value) in b.items():
        sources = [a[x] for x in sides.layouts.sources.get(address, ()) if x in a]
        if len({own for own, _ in sources}) > 1 or any(
            _ndim(x) != _ndim(value) for _, x in sources
        ):
            left_out += 1
        elif sources:
            own = sources[0][0]
            verdict = "differs" if set(own).isdisjoint(specs) else "bitwise"
            texts = str(own[0] or "none"), str(specs[0] or "none")
            compared.append(Compared(sides.layouts.place(address), verdict, values=texts))
    note = f"{left_out} values with another layout are not compared" if left_out else ""
    return Section("partition specs", tuple(compared), note)


def _specs_of(address: Address, leaf: Leaf) -> tuple[PartitionSpec, PartitionSpec]:
    """What a leaf's metadata says, with the names as they are and under the rules in it."""
    box = None
    if leaf.box is not None:
        box = linen_leaves.from_leaf(address[0], leaf, registry.current())
    if not isinstance(box, meta.AxisMetadata):
        return PartitionSpec(), PartitionSpec()
    names = getattr(box, "get_partition_spec", PartitionSpec)()
    return _shortest(names), _shortest(mesh_spec(box, ()))


def _shortest(names: Iterable[Any]) -> PartitionSpec:
    spec = [n[0] if isinstance(n, tuple | list) and len(n) == 1 else n for n in names]
    while spec and spec[-1] is None:
        spec.pop()
    return PartitionSpec(*spec)


def _ndim(value: Any) -> int | None:
    return getattr(value, "ndim", None)


def values_of(values: Neutral, *without: type[nnx.Variable[Any]]) -> AddressedValues:
    """The values of all leaves but those of some Variable types."""
    return {
        address: leaf.value
        for address, leaf in values.items()
        if not leaf.is_empty and not is_of(address, *without)
    }


def leaves_of(tree: Any) -> dict[str, Any]:
    """Leaves by where they are; containers of one shape have the same places."""
    leaves = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: x is None)[0]
    return {jax.tree_util.keystr(path): _as_array(leaf) for path, leaf in leaves}


def _as_array(leaf: Any) -> Any:
    is_number = isinstance(leaf, bool | int | float | complex)
    return np.asarray(leaf) if is_number else leaf
