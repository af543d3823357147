"""Runs a sample of the training, before and after, and compares the two."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import sys
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState

from bridge import port
from bridge.rewrite._failures import RewriteError, said
from bridge.rewrite.prove._build import importable
from bridge.rewrite.prove._draws import same_key

from ._program import Kind, Place, Recognizer

STEPS = 3
# What may be one object in many modules.
_PLAIN = (bool, int, float, complex, str, bytes, tuple, type(None))
_INIT = inspect.unwrap(nn.Module.init).__code__
_APPLY = inspect.unwrap(nn.Module.apply).__code__


class Seen:
    """The functions that ran, with the kinds of what they were given.

    Without `recognizer`, which tells what a value is, only the places are kept.
    """

    def __init__(self, files: Collection[str], recognizer: Recognizer | None = None) -> None:
        self._files, self._recognizer = frozenset(files), recognizer
        self.kinds: dict[Place, dict[str, Kind]] = {}
        self.lines: dict[str, set[int]] = {}
        self.fields: dict[str, dict[str, Kind]] = {}
        # Where a module is applied that has other fields than the first that was initialised.
        self.others: set[tuple[str, int]] = set()
        self._first: dict[str, Any] | None = None

    @contextlib.contextmanager
    def looking(self) -> Iterator[None]:
        """Looks at every call that begins inside the block."""
        before = sys.gettrace()
        sys.settrace(self._called)
        try:
            yield
        finally:
            sys.settrace(before)

    def _called(self, frame: Any, event: str, argument: Any) -> Any:
        code = frame.f_code
        if event != "call":
            return None
        if code in (_INIT, _APPLY):
            self._configured(frame)
        if code.co_filename not in self._files:
            return None
        self._note(frame)
        return self._ran

    def _configured(self, frame: Any) -> None:
        """Notes whether a module is the one that the state has variables of."""
        module = frame.f_locals["self"]
        own = {f.name: getattr(module, f.name) for f in dataclasses.fields(module) if f.init}
        given = {name: value for name, value in own.items() if name not in ("parent", "name")}
        if frame.f_code is _INIT:
            self._first = self._first or given
        elif self._first is not None and given != self._first:
            while frame is not None and frame.f_code.co_filename not in self._files:
                frame = frame.f_back
            if frame is not None:
                self.others.add((frame.f_code.co_filename, frame.f_lineno))

    def _ran(self, frame: Any, event: str, argument: Any) -> Any:
        self.lines.setdefault(frame.f_code.co_filename, set()).add(frame.f_lineno)
        return self._ran

    def _note(self, frame: Any) -> None:
        code = frame.f_code
        place = Place(code.co_filename, code.co_firstlineno, code.co_name)
        kinds = self.kinds.setdefault(place, {})
        if self._recognizer is None:
            return
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        caller = frame.f_back.f_globals.get("__name__", "").partition(".")[0]
        for name in names:
            value = frame.f_locals.get(name)
            # An optimizer gives a mask or a schedule its own tree, with NNX too.
            kind = Kind.OTHER if caller == "optax" else self._recognizer.kind(value)
            known = kinds.setdefault(name, kind)
            if known is Kind.OTHER or (known is Kind.OPTIONAL and kind is not Kind.OTHER):
                kinds[name] = kind
            if kind is Kind.STATE:
                self.state(value)

    def state(self, value: Any) -> None:
        """Keeps what the fields of a state hold."""
        if self._recognizer is None:
            return
        known = self.fields.setdefault(type(value).__name__, {})
        own = {f.name for f in dataclasses.fields(value)}
        for name in own - {f.name for f in dataclasses.fields(TrainState)}:
            known[name] = self._recognizer.kind(getattr(value, name))
        known["params"] = self._recognizer.kind(value.params)


@dataclasses.dataclass
class Sample:
    """What a sample of the training gives.

    `step` makes one step from a state and what a batch holds. `batches` has the arguments of each
    step besides the state.
    """

    state: Any
    step: Callable[..., Any]
    batches: list[tuple[Any, ...]]

    def with_same_keys(self) -> Sample:
        """The sample with keys that all draw the same."""
        return Sample(with_same_keys(self.state), self.step, with_same_keys(self.batches))

    def run(self, number: int) -> Any:
        """Makes a step, and returns what it gave besides the state."""
        returned = self.step(self.state, *self.batches[number % len(self.batches)])
        leaves = jax.tree.leaves(returned, is_leaf=_is_state)
        states = [leaf for leaf in leaves if _is_state(leaf)]
        if states:
            self.state = states[0]
        return jax.tree.map(lambda x: None if _is_state(x) else x, returned, is_leaf=_is_state)


@dataclasses.dataclass(frozen=True)
class Ran:
    """What the Linen program did.

    `first` and `last` are the states before the first step and after the last one. `returned` has
    what each step gave besides the state, and `batches` what it was given.
    """

    first: Any
    last: Any
    returned: tuple[Any, ...]
    batches: list[tuple[Any, ...]]


def ran(sample: Sample) -> Ran:
    """Makes the steps of a Linen program, whose states do not change in place."""
    # A step may donate the state that it is given.
    first = jax.tree.map(jnp.copy, sample.state)
    returned = tuple(sample.run(number) for number in range(STEPS))
    return Ran(first, sample.state, returned, sample.batches)


def sample_of(function: Callable[[], Any], module: str) -> Sample:
    """Calls a function that gives a sample, as its module has it now.

    Raises RewriteError if the function gives something else.
    """
    returned = getattr(sys.modules.get(module), function.__qualname__, function)()
    try:
        state, step, batches = returned
        # A NamedTuple is one argument.
        given = [each if type(each) is tuple else (each,) for each in batches]
    except (TypeError, ValueError) as error:
        raise RewriteError(
            "train= expects a function that gives a sample of the training",
            [said(error)],
            "Return (state, train_step, batches): the first state, the function that makes a step,"
            " and for each step a tuple of its other arguments.",
        ) from error
    given = given[:STEPS]
    if not given or not callable(step) or not _is_state(state):
        raise RewriteError(
            "train= expects a function that gives a sample of the training",
            [f"it gave {type(state).__name__}, {type(step).__name__}, {len(given)} batches"],
            "Return (state, train_step, batches), with a TrainState of Flax as the state.",
        )
    return Sample(state, step, given)


def _is_state(value: Any) -> bool:
    return isinstance(value, TrainState) or (
        isinstance(value, nnx.Module) and hasattr(value, "optimizer") and hasattr(value, "model")
    )


def with_same_keys(tree: Any) -> Any:
    """A tree with keys that all draw the same; both programs then draw from them."""

    def value(path: Any, leaf: Any) -> Any:
        dtype = getattr(leaf, "dtype", None)
        if dtype is None:
            return leaf
        if jnp.issubdtype(dtype, jax.dtypes.prng_key):
            return jnp.broadcast_to(same_key(), leaf.shape)
        is_raw = dtype == jnp.uint32 and leaf.shape[-1:] == (2,)
        named = jax.tree_util.keystr(path).lower()
        if is_raw and any(word in named for word in ("key", "rng")):
            return jnp.broadcast_to(same_key(), leaf.shape[:-1])
        return leaf

    return jax.tree_util.tree_map_with_path(value, tree)


@contextlib.contextmanager
def world(texts: Mapping[str, tuple[str, str]], sample: Callable[[], Any]) -> Iterator[None]:
    """Lets the program's modules be imported anew, so that all of it is traced again.

    `texts` has file and text by module name. `sample` is a function that uses the program. What it
    and its module have imported of the program is that of the new modules inside the block.
    """
    old = {name: module for name in texts if (module := sys.modules.get(name)) is not None}
    with importable(texts), nnx.use_eager_sharding(False):
        for name in texts:
            # A sample may find them as attributes of their package.
            importlib.import_module(name)
        with _imported_anew(sample, old):
            yield


@contextlib.contextmanager
def _imported_anew(function: Any, old: Mapping[str, types.ModuleType]) -> Iterator[None]:
    """Gives a function what the new modules have for what it has of the old ones."""
    anew: dict[int, Any] = {}
    for name, module in old.items():
        space = vars(sys.modules[name])
        anew[id(module)] = sys.modules[name]
        for own, value in vars(module).items():
            if own in space and not isinstance(value, _PLAIN) and not own.startswith("__"):
                anew.setdefault(id(value), space[own])
    function = inspect.unwrap(function)
    space = getattr(function, "__globals__", {})
    # The module of the function itself may be one of the program.
    is_own = any(space is vars(module) for module in old.values())
    names = {} if is_own else {name: v for name, v in space.items() if id(v) in anew}
    cells = [
        cell for cell in getattr(function, "__closure__", None) or () if id(_held(cell)) in anew
    ]
    kept = [(cell, cell.cell_contents) for cell in cells]
    try:
        space.update({name: anew[id(value)] for name, value in names.items()})
        for cell, value in kept:
            cell.cell_contents = anew[id(value)]
        yield
    finally:
        space.update(names)
        for cell, value in kept:
            cell.cell_contents = value


def _held(cell: types.CellType) -> Any:
    """What a cell holds, None if nothing."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


_TOLERANCE = 1e-5


class DifferenceError(Exception):
    """The two programs differ."""


def compare(
    old: Ran, new: Sample, rules: Mapping[str, str], collections: frozenset[str], *, draws: bool
) -> float:
    """Makes the steps of the Linen program in the new one, from the same state.

    `rules` has NNX paths by Linen paths. With `draws`, keys were replaced by those that draw the
    same in both. Returns the largest difference. Raises DifferenceError, which says where they
    differ.
    """
    new.batches = old.batches
    if draws:
        _replace_keys(new.state)
    _move(old.first, new.state, rules, collections)
    found = 0.0
    for number, before in enumerate(old.returned):
        after = new.run(number)
        # A tree like the parameters has other paths; the parameters are compared themselves.
        if jax.tree.structure(before) == jax.tree.structure(after):
            pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
            for a, b in pairs:
                found = max(found, _apart(a, b, f"what step {number + 1} returns"))
        elif not _has_states(after):
            raise DifferenceError(f"step {number + 1} returns another structure")
    expected = nnx.clone(new.state)
    _move(old.last, expected, rules, collections)
    for name in ("model", "optimizer"):
        values = [_leaves(getattr(each, name)) for each in (expected, new.state)]
        for path, a in values[0].items():
            where = f"{name}.{'.'.join(map(str, path))} after {len(old.returned)} steps"
            found = max(found, _apart(a, values[1][path], where))
    return found


def _move(old: Any, new: Any, rules: Mapping[str, str], collections: frozenset[str]) -> None:
    """Gives the new state the values of the old one, on each device that has its own."""
    if not jnp.shape(old.step):
        _move_one(old, new, rules, collections)
        return
    devices = []
    for number in range(len(old.step)):
        before, after = jax.tree.map(lambda x, number=number: x[number], (old, new))  # pyright: ignore
        _move_one(before, after, rules, collections)
        devices.append(after)

    def together(known: Any, *each: Any) -> Any:
        value, sharding = jnp.stack(each), getattr(known, "sharding", None)
        # What one device has, such as a replaced key, must not become bound to it.
        is_spread = sharding is not None and len(sharding.device_set) > 1
        return jax.device_put(value, sharding) if is_spread else value

    nnx.update(new, nnx.state(jax.tree.map(together, new, *devices)))


def _move_one(old: Any, new: Any, rules: Mapping[str, str], collections: frozenset[str]) -> None:
    if _has_collections(old.params):
        is_leaf = _has_collections
        old = jax.tree.map(lambda x: x["params"] if is_leaf(x) else x, old, is_leaf=is_leaf)
    names = {name: getattr(old, name, None) for name in collections - {"params"}}
    variables = {"params": old.params, **{n: tree for n, tree in names.items() if tree is not None}}
    plan = port.plan(variables, new.model, rules)
    if not plan.ok:
        raise DifferenceError(f"the new state differs: {plan.problems[0]}")
    plan.apply()
    plan.apply_optimizer(old, new.optimizer)


def _has_collections(tree: Any) -> bool:
    """Whether all variables are in the place of the parameters."""
    return isinstance(tree, Mapping) and set(tree) == {"params"}


def _replace_keys(state: Any) -> None:
    # A scan over states needs keys of one type, also in the streams of the model.
    nnx.update(state, with_same_keys(nnx.state(state, nnx.RngKey)))
    fields = {
        name: value
        for name, value in vars(state).items()
        if name not in ("model", "optimizer") and not name.startswith("_")
    }
    arrays = {n: v for n, v in fields.items() if isinstance(v, jax.Array)}
    for name, value in with_same_keys(arrays).items():
        if value is not fields[name]:
            setattr(state, name, value)


def _has_states(tree: Any) -> bool:
    is_state = lambda x: isinstance(x, nnx.State)  # noqa: E731
    return any(is_state(leaf) for leaf in jax.tree.leaves(tree, is_leaf=is_state))


def _leaves(module: Any) -> dict[Any, Any]:
    state = nnx.state(module, nnx.All(nnx.Variable, nnx.Not(nnx.RngState)))
    return {path: leaf[...] for path, leaf in nnx.to_flat_state(state)}


def _apart(a: Any, b: Any, where: str) -> float:
    a, b = np.asarray(a), np.asarray(b)
    if a.shape != b.shape:
        raise DifferenceError(f"{where}: shape {b.shape} instead of {a.shape}")
    if not np.allclose(a, b, rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True):
        apart = float(np.max(np.abs(a - b), initial=0.0))
        raise DifferenceError(f"{where}: {apart:.2g} apart")
    return float(np.max(np.abs(a.astype(float) - b.astype(float)), initial=0.0))
