"""Imports new sources before they are files, and makes the new model."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.abc
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from flax import linen as nn
from flax import nnx
from flax.core import FrozenDict

from bridge.rewrite.observe._records import Instance, below
from bridge.rewrite.plan._layers import Layer, field_order, seen
from bridge.rewrite.plan._plans import Program
from bridge.rewrite.plan._refusals import NotRewritableError

_NOWHERE = (0, ("?",))


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules that exist only as texts."""

    def __init__(self, texts: Mapping[str, tuple[str, str]]) -> None:
        self._texts = texts

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname not in self._texts:
            return None
        return importlib.util.spec_from_loader(fullname, self, origin=self._texts[fullname][0])

    def create_module(self, spec: Any) -> Any:
        return None

    def exec_module(self, module: Any) -> None:
        file, text = self._texts[module.__name__]
        module.__file__ = file
        # Without this the text would get the `from __future__ import` of this file.
        exec(compile(text, file, "exec", dont_inherit=True), module.__dict__)


@contextlib.contextmanager
def importable(texts: Mapping[str, tuple[str, str]]) -> Iterator[None]:
    """Lets modules be imported from texts.

    `texts` has file and text by module name.
    """
    finder = _Finder(texts)
    before = {name: sys.modules.pop(name) for name in texts if name in sys.modules}
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in texts:
            sys.modules.pop(name, None)
            parent, _, own = name.rpartition(".")
            if parent in sys.modules and name not in before:
                vars(sys.modules[parent]).pop(own, None)
        sys.modules.update(before)
        for name, module in before.items():
            parent, _, own = name.rpartition(".")
            if parent in sys.modules:
                setattr(sys.modules[parent], own, module)


class Maker:
    """Makes the new model of a run.

    `modules` has the new modules, by the name of the old one.
    """

    def __init__(self, program: Program, modules: Mapping[str, Any]) -> None:
        self.program, self.modules = program, modules

    def make(self, root: Instance, rngs: nnx.Rngs) -> Any:
        """The new model, with the fields of the old one.

        Raises NotRewritableError if a field has no counterpart.
        """
        plan = self.program.plans[root.cls]
        cls = self._class(root.cls)
        self._rngs = rngs
        layer = self.program.layer_of(root.cls)
        if layer is not None:
            return self._layer(root, layer)
        given = {
            f.name: self.mapped(root.fields[f.name], (root.run, (*root.path, f.name)))
            for f in plan.fields
            if f.name in root.fields and f.name not in plan.mode_fields
        }
        return cls(**given, **self.sizes(root), rngs=rngs)

    def sizes(self, root: Instance) -> dict[str, Any]:
        """The size arguments of the model itself."""
        plan = self.program.plans[root.cls]
        return {name: size.values.get((root.run, root.path)) for name, size in plan.sizes.items()}

    def _class(self, cls: type) -> Any:
        return getattr(self.modules[cls.__module__], cls.__name__)

    def mapped(self, value: Any, key: tuple[int, tuple[str, ...]]) -> Any:
        """A field's value for the new model.

        `key` is the run and the path that a module in the value would have.
        """
        if isinstance(value, functools.partial):
            return self._partial(value)
        if isinstance(value, type) and issubclass(value, nn.Module):
            plan, layer = self.program.plan_of(value), self.program.layer_of(value)
            if plan is not None and plan.refusal is None:
                return self._class(value)
            if layer is not None:
                return getattr(nnx, layer.name)
            # What it makes is wrapped where it is called.
            return value
        if isinstance(value, nn.Module):
            return self._module(value, key)
        run, path = key
        if isinstance(value, list | tuple) and type(value) in (list, tuple):
            kind: Any = type(value)
            return kind(
                self.mapped(each, (run, (*path[:-1], f"{path[-1]}_{i}")))
                for i, each in enumerate(value)
            )
        if isinstance(value, dict | FrozenDict) and type(value) in (dict, FrozenDict):
            return {
                name: self.mapped(each, (run, (*path[:-1], f"{path[-1]}_{name}")))
                for name, each in value.items()
            }
        if (
            not isinstance(value, type)
            and callable(value)
            and getattr(value, "__module__", None) in self.modules
        ):
            # A function of the package may itself name classes; the new file may have its own.
            return getattr(self.modules[value.__module__], getattr(value, "__name__", ""), value)
        return value

    def _module(self, value: nn.Module, key: tuple[int, tuple[str, ...]]) -> Any:
        """A module that the model was given, made anew."""
        instance = self.program.records.instances.get(key)
        plan, layer = self.program.plan_of(type(value)), self.program.layer_of(type(value))
        if instance is None:
            raise NotRewritableError("given-uncalled")
        if layer is None and plan is not None and plan.refusal is None:
            return self.make(instance, self._rngs)
        if layer is None or layer.has_parts:
            raise NotRewritableError("given-module", name=type(value).__name__)
        return self._layer(instance, layer)

    def _layer(self, instance: Instance, layer: Layer) -> Any:
        """A layer of Flax, or of a class that derives from one, with the fields of an old one."""
        key = (instance.run, instance.path)
        variables = below(self.program.records.variables[key[0]], key[1])
        known = seen(instance, variables)
        sizes = {name: size(known) for name, size in layer.sizes.items()}
        named = {
            layer.renames.get(name, name): self.mapped(each, (key[0], (*key[1], name)))
            for name, each in instance.fields.items()
            if name not in layer.unsupported and each is not _default(instance.cls, name)
        }
        named.update({name: size for name, size in sizes.items() if size is not None})
        if layer.rngs:
            named["rngs"] = self._rngs
        if "decode" in layer.extra and named.get("decode") is None:
            named["decode"] = False
        return self.mapped(instance.cls, _NOWHERE)(**named)

    def _partial(self, value: functools.partial[Any]) -> Any:
        own: Any = value.func
        layer = self.program.layer_of(own) if isinstance(own, type) else None
        if layer is None:
            return functools.partial(
                self.mapped(value.func, _NOWHERE),
                *(self.mapped(v, _NOWHERE) for v in value.args),
                **{k: self.mapped(v, _NOWHERE) for k, v in value.keywords.items()},
            )
        named = dict(zip(field_order(own), value.args, strict=False)) | value.keywords
        for name in layer.unsupported:
            if named.get(name) is not None:
                raise NotRewritableError("no-argument", layer=layer.name, name=name)
        return functools.partial(
            self.mapped(own, _NOWHERE),
            **{
                layer.renames.get(k, k): self.mapped(v, _NOWHERE)
                for k, v in named.items()
                if k not in layer.unsupported
            },
        )


def _default(cls: type, name: str) -> Any:
    """The default of a field; those of NNX do the same, but may have other signatures."""
    return next(f.default for f in dataclasses.fields(cls) if f.name == name)  # pyright: ignore
