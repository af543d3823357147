"""The entry points of a rewriting: what makes the model, and how it is called."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from bridge._train_eval import MODE_NAMES, TRAINING

from ._snapshots import is_array

_SMALL = 4
_LOW = ("bfloat16", "float16")
# What a field gets that may be an initializer and is None.
_INITIALIZER = nn.initializers.normal(0.1)


@dataclasses.dataclass(frozen=True)
class Entry:
    """A model and a call of it.

    Inputs are shapes or arrays, and `method` is None for `__call__`.
    """

    make: Callable[[], nn.Module]
    inputs: tuple[Any, ...]
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    method: str | None = None

    @property
    def called(self) -> tuple[tuple[Any, ...], Mapping[str, Any], str | None]:
        """The arguments of a call, and the method."""
        return self.inputs, self.kwargs, self.method


@dataclasses.dataclass(frozen=True)
class Varied:
    """A run with other fields or inputs than the program gives.

    `what` says the difference in words. `is_flag` says that every size is the given one.
    """

    run: int
    entry: Entry
    what: str
    is_flag: bool

    @property
    def is_training(self) -> bool:
        """Whether a mode is flipped to training."""
        name, _, value = self.what.rpartition(".")[2].partition("=")
        is_train = name in TRAINING
        return name in MODE_NAMES and value == str(is_train)


def arguments_of(
    cls: type, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The arguments of a call as an entry has them: arrays by position, and the rest by name.

    A mode has to be given by name to be flipped. `args` has shapes in the place of arrays. Returns
    None if the method takes any number of arguments, or others.
    """
    try:
        signature = inspect.signature(getattr(cls, method))
        bound = signature.bind(None, *args, **kwargs)
    except (AttributeError, TypeError):
        return None
    kinds = {each.kind for each in signature.parameters.values()}
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        return None
    inputs = tuple(itertools.takewhile(_has_arrays, args))
    named: dict[str, Any] = {}
    for name, value in list(bound.arguments.items())[1 + len(inputs) :]:
        is_rest = signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
        named |= value if is_rest else {name: value}
    return inputs, named


def _has_arrays(value: Any) -> bool:
    return any(is_array(leaf) for leaf in jax.tree.leaves(value))


def difference(before: Any, after: Any, name: str = "") -> Iterator[str]:
    """What differs between two models or configurations, as `width=8`."""
    if before is after or not dataclasses.is_dataclass(before) or isinstance(before, type):
        return
    for field in dataclasses.fields(before):
        if field.name in ("parent", "name") or not field.init:
            continue
        one, other = getattr(before, field.name), getattr(after, field.name)
        if dataclasses.is_dataclass(one) and not isinstance(one, type):
            yield from difference(one, other, f"{name}{field.name}.")
        elif one is not other and repr(one) != repr(other):
            text = _dtype(other) or repr(other)
            text = "an initializer" if other is _INITIALIZER else text
            yield f"{name}{field.name}={text}"


def is_flag(what: str) -> bool:
    """Whether a difference changes no size."""
    value = what.rpartition("=")[2]
    return ", " not in what and value in ("True", "False", "None", "an initializer", "float32")


def variations(
    module: nn.Module, inputs: tuple[Any, ...], *, flags_alone: bool = False
) -> Iterator[tuple[nn.Module, Any]]:
    """Models and inputs with one size changed in each, to tell equal sizes apart.

    Sizes are doubled, so that what divides them still does. With `flags_alone`, only flags and the
    lengths of lists change.
    """
    shapes = jax.tree.map(_spec, inputs)
    for index, spec in enumerate(() if flags_alone else shapes):
        if not isinstance(spec, jax.ShapeDtypeStruct):
            continue
        for axis in reversed(range(1, len(spec.shape))):
            sizes = list(spec.shape)
            sizes[axis] *= 2
            changed = list(shapes)
            changed[index] = jax.ShapeDtypeStruct(tuple(sizes), spec.dtype)
            yield module, tuple(changed)
        if (
            len({s.shape for s in shapes if isinstance(s, jax.ShapeDtypeStruct)}) == 1
            and len(shapes) > 1
            and spec.shape
        ):
            break
    for field in dataclasses.fields(module):
        if field.name in ("parent", "name") or not field.init:
            continue
        for value in _changed(getattr(module, field.name), field, flags_alone=flags_alone):
            try:
                yield module.clone(**{field.name: value}), shapes
            except Exception:
                continue


def combined(
    module: nn.Module, inputs: tuple[Any, ...], *, apart: bool
) -> tuple[nn.Module, Any] | None:
    """The model and inputs with all sizes changed at once, each by a factor of its own.

    With `apart`, equal sizes of one input, such as those of a square image, get several factors, so
    that what is equal by chance is told apart. Returns None if the constructor refuses.
    """
    factors = _Factors()
    by_size: dict[tuple[int, int], int] = {}

    def dimension(size: int, before: Sequence[int]) -> int:
        # What inputs have in common, such as the number of tokens, stays in common.
        key = size, before.count(size) if apart else 0
        if key not in by_size:
            by_size[key] = size * factors.of(size) if size > 1 else size
        return by_size[key]

    def scaled(leaf: Any) -> Any:
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        batch, own = leaf.shape[:1], leaf.shape[1:]
        sizes = (dimension(size, own[:axis]) for axis, size in enumerate(own))
        return jax.ShapeDtypeStruct((*batch, *sizes), leaf.dtype)

    fields = {
        field.name: _scaled(getattr(module, field.name), factors)
        for field in dataclasses.fields(module)
        if field.name not in ("parent", "name") and field.init
    }
    try:
        # A class of the program may check what its inputs are made of.
        shapes = jax.tree.map(scaled, jax.tree.map(_spec, inputs))
        return module.clone(**fields), shapes
    except Exception:
        return None


class _Factors:
    """Gives numbers that are equal by chance factors of their own."""

    def __init__(self) -> None:
        self._order = itertools.cycle((3, 5, 2, 7))
        self._taken: set[tuple[int, int]] = set()

    def of(self, *sizes: int) -> int:
        """A factor that none of these sizes had yet, as long as there is one."""
        known = [*itertools.islice(self._order, 4), 11, 13]
        free = (f for f in known if self._taken.isdisjoint((each, f) for each in sizes))
        factor = next(free, known[0])
        # Goes on behind it.
        while factor in known[:4] and next(self._order) != factor:
            pass
        return self.taken(factor, *sizes)

    def taken(self, factor: int, *sizes: int) -> int:
        """Notes that these sizes have a factor, which it returns."""
        self._taken |= {(each, factor) for each in sizes}
        return factor


def _scaled(value: Any, factors: _Factors) -> Any:
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        # Small numbers are numbers of layers, heads or strides.
        is_small = 0 < value <= _SMALL
        return value * (factors.taken(2, value) if is_small else factors.of(value))
    if type(value) in (list, tuple) and value and all(type(v) is int for v in value):
        factor = factors.of(*value) if max(value) > _SMALL else 1
        return type(value)(v * factor for v in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type | nn.Module):
        changed = {
            f.name: _scaled(getattr(value, f.name), factors)
            for f in dataclasses.fields(value)
            if f.init
        }
        return dataclasses.replace(value, **changed)
    return value


def _spec(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array | np.ndarray):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    return leaf


def _dtype(value: Any) -> str | None:
    """The name of a floating dtype, None for anything else."""
    is_scalar = isinstance(value, type) and (
        issubclass(value, np.generic) or isinstance(getattr(value, "dtype", None), np.dtype)
    )
    if not is_scalar and not isinstance(value, str):
        # NumPy warns where it is asked for the dtype of another class.
        return None
    try:
        name = jnp.dtype(value).name
    except (TypeError, ValueError):
        return None
    return name if "float" in name else None


def _changed(value: Any, field: Any = None, *, flags_alone: bool) -> Iterator[Any]:
    if isinstance(value, bool):
        yield not value
    elif field is not None and field.name.endswith("_init") and field.default is None:
        yield _INITIALIZER if value is None else None
    elif value is None and field is not None and "int" in str(field.type):
        # Sizes that are equal where it is None may differ where it is not.
        yield from (1, 6)
    elif _dtype(value) in _LOW:
        # In another precision Flax's own layers round at other places.
        yield jnp.float32
    elif isinstance(value, int):
        if not flags_alone:
            yield value * 2 if value else 1
    elif type(value) in (list, tuple) and value and all(type(v) is int for v in value):
        if not flags_alone:
            yield type(value)(v * 2 for v in value)
        yield type(value)([*value, 2 * value[-1]])
    elif dataclasses.is_dataclass(value) and not isinstance(value, type | nn.Module):
        for own in dataclasses.fields(value):
            for inner in _changed(getattr(value, own.name), own, flags_alone=flags_alone):
                if own.init:
                    yield dataclasses.replace(value, **{own.name: inner})
    elif type(value).__name__ == "ConfigDict":
        config: Any = value
        for name, inner in config.items():
            for changed in _changed(inner, flags_alone=flags_alone):
                copied = config.copy_and_resolve_references()
                with copied.unlocked():
                    copied[name] = changed
                yield copied


def shaped(entry: Entry) -> Entry:
    """An entry whose arrays are shapes."""
    return dataclasses.replace(entry, inputs=tuple(jax.tree.map(_spec, entry.inputs)))


def second_batch(given: Any) -> Any:
    """The arguments of a call with another batch size, None if there is no single one."""
    sizes = {
        leaf.shape[0] for leaf in jax.tree.leaves(given) if hasattr(leaf, "shape") and leaf.shape
    }
    if len(sizes) != 1:
        return None

    def larger(leaf: Any) -> Any:
        if not (hasattr(leaf, "shape") and leaf.shape):
            return leaf
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jnp.concatenate([leaf, leaf[:1]])
        # For which nothing is compiled.
        own = np.asarray(leaf)
        return jax.device_put(np.concatenate([own, own[:1]]))

    return jax.tree.map(larger, given)


def has_mode_field(entry: Entry) -> bool:
    """Whether the model has a mode among its fields."""
    return any(field.name in MODE_NAMES for field in dataclasses.fields(entry.make()))


def entry_kwargs(entry: Entry) -> dict[str, Any]:
    """The keyword arguments of an entry's call, with the defaults of modes written out.

    `parity.check` would set a mode that is not given on the Linen side alone.
    """
    return {
        **{name: p.default for name, p in _modes(entry).items() if isinstance(p.default, bool)},
        **entry.kwargs,
    }


def training_kwargs(entry: Entry) -> dict[str, Any] | None:
    """The same for training; None if the call has no mode, or is in training already."""
    given = entry_kwargs(entry)
    names = [name for name in _modes(entry) if name in given]
    training = {name: name in TRAINING for name in names}
    if not names or all(given[name] == training[name] for name in names):
        return None
    return {**given, **training}


def _modes(entry: Entry) -> dict[str, inspect.Parameter]:
    function = getattr(type(entry.make()), entry.method or "__call__")
    parameters = inspect.signature(function).parameters
    return {name: parameters[name] for name in MODE_NAMES if name in parameters}
