"""The whole: run, plan, write, run again, compare."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import pathlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
from flax import nnx
from flax.training.train_state import TrainState

from bridge.rewrite._failures import RewriteError, said
from bridge.rewrite.emit._files import SUFFIX, NewFile
from bridge.rewrite.plan._plans import Program as Classes
from bridge.rewrite.plan._refusals import NotRewritableError, Refusal, refused
from bridge.rewrite.prove._build import Maker, importable
from bridge.rewrite.prove._draws import drawn_in_calls, draws
from bridge.rewrite.prove._pairing import made
from bridge.rewrite.publish._places import Made
from bridge.rewrite.publish._result import FunctionResult, Training
from bridge.rewrite.publish._uses import ClassName, Uses
from bridge.rewrite.publish._writing import check_sources

from ._changes import Before, Change
from ._functions import UNREACHED, is_concerned, plan_function
from ._program import File, Place, Program, Recognizer, first_line
from ._run import DifferenceError, Ran, Seen, compare, ran, sample_of, world
from ._texts import modules_in, state_class, text_of

# What a module is under its new name, while the new program is proven. Its text runs under the old
# name, as modules that register something, such as absl's flags, may not do so by two names.
_ALIAS = "import importlib, sys\nsys.modules[__name__] = importlib.import_module({!r})\n"


class TrainingRewriter:
    """Rewrites the functions that train a model.

    All of `classes` are proven. `texts` has file and text by the new module's name. `rules` has NNX
    paths by Linen paths. `sample` gives a state, what makes a step, and the other arguments of each
    step. `on_progress` is given a line about what goes on.
    """

    def __init__(
        self,
        classes: Classes,
        files: Sequence[NewFile],
        texts: Mapping[str, tuple[str, str]],
        rules: Mapping[str, str],
        made: Mapping[ClassName, Made],
        sample: Callable[[], Any],
        on_progress: Callable[[str], None],
    ) -> None:
        self.classes, self.class_files, self.class_texts = classes, files, texts
        self.rules, self.made, self.sample, self.on_progress = rules, made, sample, on_progress
        self.old = {f.module: set[str]() for f in files}
        for each in made:
            self.old[each.module].add(each.name)
        self.files = self._files()
        self.recognizer = Recognizer(classes.records.variables[0])

    def _files(self) -> dict[str, File]:
        """The files of the package that are imported."""
        uses = Uses({f.source.file: f.module for f in self.class_files}, self.old)
        loaded = {
            str(pathlib.Path(file).resolve()): module
            for module in [*sys.modules.values()]
            if (file := getattr(module, "__file__", None))
            and file.endswith(".py")
            # Running a script again would rewrite again.
            and module.__name__ != "__main__"
        }
        own = {str(pathlib.Path(f.source.file).resolve()): f.source for f in self.class_files}
        sources = uses.parsed(loaded)
        uses.follow(sources)
        found = {}
        for path, source in sources.items():
            if pathlib.Path(path).name != "__init__.py":
                known = own.get(path, source)
                named = uses.classes_in(path, known)
                found[known.file] = File(
                    known,
                    loaded[path],
                    lambda n, named=named: self.made.get(named(n)),  # pyright: ignore
                )
        return found

    def run(self) -> Training:
        """Rewrites, and proves.

        Raises RewriteError if `sample` gives no sample, or if it cannot be run.
        """
        self.on_progress("running the training")
        texts = {f.module.__name__: (path, f.source.text) for path, f in self.files.items()}
        seen = Seen(self.files, self.recognizer)
        module = self.sample.__module__
        try:
            with world(texts, self.sample), seen.looking():
                sample = sample_of(self.sample, module)
                seen.state(sample.state)
                if draws(self.classes):
                    sample = sample.with_same_keys()
                old = ran(sample)
        except RewriteError:
            raise
        except Exception as error:
            raise RewriteError(
                "the sample of the training cannot be run",
                [said(error)],
                "Give a sample whose steps run in the program as it is.",
            ) from error
        program = self._program(seen)
        found = [*self._planned(program)]
        if any(each.refusal is not None for each in found) or not found:
            return Training(tuple(self._left(found)))
        found += [*self._branches(program), *self._not_run(program)]
        return self._proven(old, sorted(found, key=lambda each: (each.file, each.line)), texts)

    def _program(self, seen: Seen) -> Program:
        return Program(
            self.files,
            self.recognizer,
            seen.kinds,
            seen.lines,
            seen.fields,
            seen.others,
            next(each for each in self.made.values() if each.is_model),
            drawn_in_calls(self.classes),
            self._is_stacked(),
            any(each.kind == "sow" for each in self.classes.records.makings),
        )

    def _is_stacked(self) -> bool:
        """Whether the new model has layers that are stacked, with keys of their own."""
        with importable(self.class_texts):
            modules = {f.module: importlib.import_module(f.name) for f in self.class_files}
            model = made(Maker(self.classes, modules), self.classes.records.instances[(0, ())])
        return any(leaf.ndim for leaf in jax.tree.leaves(nnx.state(model, nnx.RngKey)))

    def _not_run(self, program: Program) -> Iterator[FunctionResult]:
        """Functions that did not run, and would have to be others."""
        for path, file in program.files.items():
            for node in file.source.tree.body:
                if not isinstance(node, ast.FunctionDef):
                    continue
                place = Place(path, first_line(node), node.name)
                if place in program.kinds or not is_concerned(program, place):
                    continue
                refusal = refused("training-not-run")
                yield FunctionResult(node.name, path, *_lines(node), refusal)

    def _planned(self, program: Program) -> Iterator[FunctionResult]:
        """Decides what each function that ran becomes."""
        for place in [*program.kinds]:
            node = program.node_at(place)
            if node is None:
                continue
            file = program.files[place.file]
            try:
                plan_function(program, place)
            except NotRewritableError as error:
                yield FunctionResult(place.name, place.file, *_lines(node), error.refusal)
        for path, file in program.files.items():
            for node in file.source.tree.body:
                try:
                    self._module_statement(program, file, node)
                except NotRewritableError as error:
                    name = getattr(node, "name", "module")
                    yield FunctionResult(name, path, *_lines(node), error.refusal)
            changed = {id(c.statement if hasattr(c, "statement") else c.node) for c in file.changes}  # pyright: ignore
            for node in file.source.tree.body:
                if any(id(each) in changed for each in ast.walk(node)):
                    name = getattr(node, "name", None)
                    if name is not None:
                        yield FunctionResult(name, path, *_lines(node))

    def _module_statement(self, program: Program, file: File, node: ast.stmt) -> None:
        """A class of states."""
        if isinstance(node, ast.ClassDef):
            cls = vars(file.module).get(node.name)
            if isinstance(cls, type) and issubclass(cls, TrainState) and cls is not TrainState:
                kinds = program.fields.get(node.name)
                if kinds is not None:
                    file.changes.append(Change(node, state_class(node, kinds)))

    def _branches(self, program: Program) -> Iterator[FunctionResult]:
        """Lines that did not run, would have to be others, and raise in the new program."""
        for path, file in program.files.items():
            for each in file.changes:
                if isinstance(each, Before) and each.parts == UNREACHED:
                    node = each.statement
                    around = [*file.source.ancestors(node)][-2]
                    refusal = refused("training-branch", node.lineno)
                    name = getattr(around, "name", "module")
                    yield FunctionResult(name, path, *_lines(node), refusal)

    def _left(self, found: Iterable[FunctionResult]) -> Iterator[FunctionResult]:
        """The functions. None is rewritten where one is not."""
        for each in found:
            other = refused("training-left", each.line)
            yield each if each.refusal else dataclasses.replace(each, refusal=other)

    def _proven(
        self, old: Ran, found: Sequence[FunctionResult], texts: Mapping[str, tuple[str, str]]
    ) -> Training:
        changed = {path: file for path, file in self.files.items() if file.changes}
        # Of a module that is imported as one, all names have to be in its new file.
        wanted = set().union(*map(modules_in, changed.values())) & {*self.old}
        changed |= {p: f for p, f in self.files.items() if f.module.__name__ in wanted}
        whole = {file.module.__name__ for file in changed.values()}
        names = {module: names for module, names in self.old.items() if module not in whole}
        own = {
            file.module.__name__: (
                str(_new_path(path)),
                text_of(self.classes, file, whole, names),
            )
            for path, file in changed.items()
        }
        aliases = {
            f"{module}{SUFFIX}": (path, _ALIAS.format(module)) for module, (path, _) in own.items()
        }
        self.on_progress("proving the training")
        self._old = old
        proof = self._compared({**texts, **self.class_texts, **own, **aliases})
        if isinstance(proof, Refusal):
            return Training(tuple(dataclasses.replace(each, refusal=proof) for each in found))
        olds = {str(_new_path(path)): path for path in changed}
        return Training(tuple(found), dict(own.values()), olds, proof)

    def _compared(self, texts: Mapping[str, tuple[str, str]]) -> float | Refusal:
        """The largest difference of a program to the old one, or why there is none."""
        try:
            with world(texts, self.sample):
                return compare(
                    self._old,
                    sample_of(self.sample, self.sample.__module__),
                    self.rules,
                    self.recognizer.collections,
                    draws=draws(self.classes),
                )
        except DifferenceError as error:
            return refused("training-differs", error=str(error))
        except RewriteError:
            raise
        except Exception as error:
            return refused("training-fails", error=said(error))

    def in_place(self, classes: Mapping[str, str]) -> dict[str, str]:
        """The old files with the new training, and with the new classes.

        `classes` has the old files with the new classes, by path. Raises RewriteError if a file was
        changed since it was read, or the program differs.
        """
        files = self.files.values()
        check_sources([file.source for file in files if file.changes])
        texts = {
            file.source.file: text_of(self.classes, file, (), {}) for file in files if file.changes
        }
        # The model's file stays the last one: the rules are named after it.
        texts = {**texts, **classes, **texts}
        modules = {f.source.file: f.module.__name__ for f in files}
        modules |= {f.source.file: f.module for f in self.class_files}
        old = {f.module.__name__: (f.source.file, f.source.text) for f in files}
        proof = self._compared(old | {modules[path]: (path, t) for path, t in texts.items()})
        if isinstance(proof, Refusal):
            raise RewriteError(
                "the files cannot be rewritten in place",
                [str(proof)],
                "Write new files beside them, and move what they have over by hand.",
            )
        return texts


def _lines(node: ast.stmt) -> tuple[int, int]:
    """The first and the last line of a function or class, decorators included."""
    decorators = getattr(node, "decorator_list", ())
    return min([node.lineno, *(d.lineno for d in decorators)]), node.end_lineno or node.lineno


def _new_path(path: str) -> pathlib.Path:
    old = pathlib.Path(path)
    return old.with_name(f"{old.stem}{SUFFIX}.py")
