"""Records what every layer of a model got and returned, in the order in which calls ended.

Linen has `nn.intercept_methods` for this. NNX has no counterpart. Replacing `__call__` of the
classes, as `nnx.capture` and `nnx.tabulate` do, changes them for every thread, misses classes that
are first met during the call, and two checks at once would restore each other's replacement. So NNX
calls are observed from outside by Python's profiling hook, which belongs to one thread and is put
back as it was. The model runs as it is, on any kind of module.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping, MutableSequence
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

import jax
from flax import linen as nn
from flax import nnx
from jax.core import Tracer

from bridge._conversion.neutral import Path
from bridge._flax.linen_modules import InterceptorContext
from bridge._flax.linen_scans import is_looking_for_constants
from bridge._graphdefs.structure import OBSERVED_PLACE
from bridge._linen_in_nnx.to_nnx import ToNNX
from bridge._nnx_in_linen.to_linen import ToLinen
from bridge._randomness.typed_keys import to_bits

from ._fields import fields_of
from ._models import Observing
from ._numbers import is_comparable

# Static, so that it goes where a module's definition goes: through split and merge, into the copies
# that transforms call.
_MARK = OBSERVED_PLACE


@dataclasses.dataclass(frozen=True)
class LayerCall:
    """One call of one layer.

    Attributes:
      path: where the layer is in the model, as text.
      nth: which call of that method it is, from 0.
      inputs: arrays by the name of the argument and where they are in it.
      outputs: arrays by where they are in the output.
      is_leaf: whether it called no other layer.
      fields: the layer's static fields, in the form that `_fields` compares.
    """

    path: tuple[str, ...]
    method: str
    nth: int
    layer: type[Any]
    inputs: Mapping[str, Any]
    outputs: Mapping[str, Any]
    is_leaf: bool
    fields: Mapping[str, Any]

    @property
    def module(self) -> str:
        """The name of the layer's class."""
        return self.layer.__name__


@dataclasses.dataclass(frozen=True)
class Trace:
    """The calls that one run of a model made, and what the run returned.

    The calls are in the order in which they ended, so a layer comes after those it calls. `note`
    says what could not be observed.
    """

    calls: tuple[LayerCall, ...]
    note: str = ""
    output: Any = None


def trace(run: Callable[[Observing], Any]) -> Trace:
    """Runs a model and returns what its layers did.

    The run is eager, also inside of `nnx.jit` and `nn.scan`, so that each step of a scan is a call
    of its own with ordinary values; `vmap` and `remat` still trace, and their values come out by
    callbacks. `run` calls the model. It gets a function for the NNX module that it makes, if it
    makes one, which says that this is where paths begin, and gives the context of the call.
    """
    recorder = _Recorder()
    try:
        with jax.disable_jit(), recorder.recording():
            output = run(recorder.observing)
    except Exception as error:
        error.add_note(
            "raised while parity.check ran the model eagerly to observe its layers"
            f"{recorder.position()}; to leave them out:"
            " sections=('weights', 'outputs', 'gradients')"
        )
        raise
    return recorder.trace(output)


@dataclasses.dataclass(frozen=True)
class _Place:
    """A path on an NNX module.

    `run` identifies the run: JAX keeps the traces of `remat` by what they were made for, and one of
    an earlier run would call back the recorder of that run. A place does not refer to its recorder,
    which holds the modules: a ToLinen makes static attributes that refer to its module's nodes
    anew, by pickling them, at every call.
    """

    path: Path
    run: object


@dataclasses.dataclass(eq=False)
class _Open:
    """A call that has begun.

    `frame` is None for a Linen call. Paths of Linen modules called from here are relative to
    `base`. `call` has no outputs yet, and is None if the call is not recorded.
    """

    frame: FrameType | None
    key: tuple[Path, str]
    base: Path
    call: LayerCall | None = None
    is_leaf: bool = True


class _Recorder:
    """The observation of one run."""

    def __init__(self) -> None:
        self._run = object()
        self._deepest: tuple[str, ...] = ()
        self._open: list[_Open] = []
        self._marked: list[nnx.Module] = []
        self._calls: list[LayerCall] = []
        self._counts: collections.Counter[tuple[Any, str]] = collections.Counter()
        # By id: hashing a code object reads all of it.
        self._no_layers: dict[int, CodeType] = {}
        self._previous: Any = None
        self._problem = ""

    def position(self) -> str:
        """The last layer that was called, for the error of a run that raised."""
        return f" (the last layer called is {'/'.join(self._deepest)})" if self._deepest else ""

    def trace(self, output: Any) -> Trace:
        """Gives the records away: JAX's cached traces keep a recorder alive."""
        calls, self._calls = tuple(self._calls), []
        note = f"not all layers could be observed: {self._problem}" if self._problem else ""
        return Trace(calls, note, output)

    @contextmanager
    def recording(self) -> Iterator[None]:
        self._previous = sys.getprofile()
        try:
            with nn.intercept_methods(self._on_linen_call):
                yield
            jax.effects_barrier()
        finally:
            for module in self._marked:
                vars(module).pop(_MARK, None)

    @contextmanager
    def observing(self, root: nnx.Module) -> Iterator[None]:
        """The call of the model itself, if it is an NNX module."""
        self.mark(root)
        with self._watching_nnx(True):
            yield

    @contextmanager
    def _watching_nnx(self, on: bool) -> Iterator[None]:
        """Whether NNX calls are observed; it slows Python down, so not where Linen's are."""
        before = sys.getprofile()
        _set_profile(self._hook() if on else self._previous)
        try:
            yield
        finally:
            _set_profile(before)

    def _on_linen_call(
        self, function: Any, args: Any, kwargs: Any, context: InterceptorContext
    ) -> Any:
        module, method = context.module, context.method_name
        is_own = hasattr(type(module), method) and not hasattr(nn.Module, method)
        if method != "__call__" and (method[0] == "_" or not is_own):
            # Transforms give names to functions of their own.
            return function(*args, **kwargs)
        base = self._open[-1].base if self._open else ()
        key = (*base, *module.path), method
        if self._is_open(key):
            return function(*args, **kwargs)
        entry = _Open(None, key, base)
        if not isinstance(module, ToLinen):
            with self._told():
                named = _linen_arguments(getattr(type(module), method), (module, *args), kwargs)
                self._describe(entry, module, named)
        self._open.append(entry)
        try:
            with self._watching_nnx(isinstance(module, ToLinen)):
                output = function(*args, **kwargs)
            with self._told():
                self._close(entry, output)
        finally:
            # All inner calls have ended, even if they raised.
            del self._open[self._open.index(entry) :]
        return output

    def _hook(self) -> Callable[[FrameType, str, Any], None]:
        # Called for every call and return of Python and C, so everything is in a local name.
        previous = self._previous if callable(self._previous) else None
        no_layers, opened = self._no_layers, self._open

        def on_event(frame: FrameType, event: str, arg: Any) -> None:
            if previous is not None:
                previous(frame, event, arg)
            if event == "call":
                if id(frame.f_code) not in no_layers:
                    with self._told():
                        self._on_call(frame)
            elif event == "return" and opened and opened[-1].frame is frame:
                with self._told():
                    self._close(opened[-1], arg)
                opened.pop()

        return on_event

    @contextmanager
    def _told(self) -> Iterator[None]:
        """What goes wrong with observing is said in the report; the model is not to fail of it."""
        try:
            yield
        except Exception as error:
            self._problem = self._problem or f"{type(error).__name__}: {error}"

    def _on_call(self, frame: FrameType) -> None:
        code = frame.f_code
        name = code.co_name
        is_other = name != "__call__" and (name[0] in "_<" or name in _NNX_NAMES)
        if not code.co_argcount or is_other or code.co_filename.startswith(_NO_LAYERS_IN):
            # A frame's locals take time to read, and this runs for every function of Flax and JAX.
            self._no_layers[id(code)] = code
            return
        module: Any = frame.f_locals.get(code.co_varnames[0])
        if not issubclass(type(module), nnx.Module) or _is_container(module):
            return
        if not hasattr(type(module), name) or (isinstance(module, ToNNX) and name != "__call__"):
            return
        place = vars(module).get(_MARK)
        if place is None:
            self.mark(module)
            place = vars(module)[_MARK]
        key = place.path, name
        if self._is_open(key):
            return
        entry = _Open(frame, key, place.path)
        if not isinstance(module, ToNNX):
            self._describe(entry, module, _frame_arguments(frame))
        self._open.append(entry)

    def _describe(self, entry: _Open, module: Any, arguments: Mapping[str, Any]) -> None:
        path, method = entry.key
        self._deepest = tuple(map(str, path))
        entry.call = LayerCall(
            self._deepest, method, 0, type(module), _arrays(arguments), {}, False, fields_of(module)
        )

    def _is_open(self, key: tuple[Path, str]) -> bool:
        """Whether this is a method that calls the one it overrides."""
        return bool(self._open) and self._open[-1].call is not None and self._open[-1].key == key

    def mark(self, root: nnx.Module) -> None:
        """Gives a module that was made for this run, and all below it, their paths."""
        base = self._open[-1].key[0] if self._open else ()
        for path, module in nnx.iter_modules(root, graph=True):
            if module is root or (_MARK not in vars(module) and not _is_container(module)):
                object.__setattr__(module, _MARK, _Place((*base, *path), self._run))
                self._marked.append(module)

    def _close(self, entry: _Open, output: Any) -> None:
        if entry.call is None:
            return
        for outer in self._open:
            if outer is not entry:
                outer.is_leaf = False
        outputs = _arrays(output)
        values = [*entry.call.inputs.values(), *outputs.values()]
        call = dataclasses.replace(
            entry.call, inputs=dict.fromkeys(entry.call.inputs), is_leaf=entry.is_leaf
        )
        keep = functools.partial(self._keep, call, tuple(outputs))
        if not any(isinstance(value, Tracer) for value in values):
            keep(*values)
        elif not is_looking_for_constants():
            jax.debug.callback(keep, *values)

    def _keep(self, call: LayerCall, outputs: tuple[str, ...], *values: Any) -> None:
        given = dict(zip(call.inputs, values, strict=False))
        returned = dict(zip(outputs, values[len(given) :], strict=True))
        key = call.path, call.method
        nth = self._counts[key]
        self._counts[key] += 1
        self._calls.append(dataclasses.replace(call, nth=nth, inputs=given, outputs=returned))


def _frame_arguments(frame: FrameType) -> dict[str, Any]:
    """The arguments of a call that has just begun by name, without the module itself."""
    code = frame.f_code
    count = code.co_argcount + code.co_kwonlyargcount
    count += bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    values = frame.f_locals
    return {name: values[name] for name in code.co_varnames[1:count] if name in values}


def _linen_arguments(
    function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments of a Linen call by name, without the module itself."""
    bound = inspect.signature(function).bind(*args, **kwargs)
    return dict(list(bound.arguments.items())[1:])


def _arrays(tree: Any) -> dict[str, Any]:
    """The arrays in a tree by where they are; modules and Variables are not looked into."""
    leaves = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda x: isinstance(x, nnx.Pytree | nnx.Variable | nn.Module)
    )[0]
    return {
        jax.tree_util.keystr(path): to_bits(leaf) for path, leaf in leaves if is_comparable(leaf)
    }


_NNX_NAMES = frozenset(dir(nnx.Module))
_NO_LAYERS_IN = os.path.join(os.path.dirname(jax.__file__), "")


def _is_container(module: Any) -> bool:
    """Whether this is an `nnx.List` or `nnx.Dict`: an attribute would be an item of it."""
    return isinstance(module, MutableMapping | MutableSequence)


def _set_profile(hook: Any) -> None:
    """Sets a hook of this thread, or what `sys.getprofile` gave."""
    if hook is None or callable(hook):
        sys.setprofile(hook)
    else:
        # A profiler in C, such as cProfile's, stands there for itself.
        hook.enable()
