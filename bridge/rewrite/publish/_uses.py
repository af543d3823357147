"""Finds where a package uses the rewritten classes, and what would break."""

from __future__ import annotations

import ast
import pathlib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from bridge.rewrite.syntax._source import Source, imported_from

from ._writing import is_own

_MOST_FILES = 2000
_SKIPPED = {"__pycache__", "node_modules", "site-packages", "build", "dist"}


class ClassName(NamedTuple):
    """A rewritten class: two files may have classes of one name."""

    module: str
    name: str


class Use(NamedTuple):
    """A place that expects a Linen class."""

    file: str
    line: int
    text: str


def package_folder(file: str, module: str) -> tuple[pathlib.Path, pathlib.Path]:
    """The folder that a file's package is imported from, and the package's own."""
    path = pathlib.Path(file).resolve()
    parts = module.split(".")
    is_init = path.name == "__init__.py"
    root = path.parents[len(parts) - 1 + is_init]
    return root, root / parts[0] if len(parts) > 1 or is_init else path.parent


def _texts_below(folder: pathlib.Path) -> Iterator[tuple[str, str]]:
    """The files of a package by path, without those that the rewriter wrote."""
    for path in sorted(folder.rglob("*.py"))[:_MOST_FILES]:
        below = path.relative_to(folder).parts[:-1]
        if any(part in _SKIPPED or part.startswith(".") for part in below) or is_own(path):
            continue
        try:
            yield str(path), path.read_bytes().decode("utf-8")
        except (UnicodeDecodeError, OSError):
            continue


class Uses:
    """The uses of classes in a package.

    `files` has the rewritten files with the names of their modules, and `classes` the rewritten
    classes of each module.
    """

    def __init__(self, files: Mapping[str, str], classes: Mapping[str, Collection[str]]) -> None:
        self.modules = {str(pathlib.Path(f).resolve()): module for f, module in files.items()}
        self.classes = classes
        self.root, self.folder = package_folder(*next(iter(files.items())))
        self._texts = dict(_texts_below(self.folder))
        self._sources: dict[str, Source | None] = {}
        self.known: dict[tuple[str, str], ClassName] = {
            (module, name): ClassName(module, name)
            for module, names in classes.items()
            for name in names
        }

    def found(self) -> list[Use]:
        """Every use that is not in a rewritten class itself."""
        sources = self.parsed(self._importing())
        self.follow(sources)
        return [use for file, source in sources.items() for use in self._uses(file, source)]

    @property
    def files(self) -> Collection[str]:
        """The files of the package."""
        return self._texts.keys()

    def parsed(self, files: Collection[str]) -> dict[str, Source]:
        """Those of the files that are of the package, and Python."""
        own = ((file, self._parsed(file)) for file in self._texts if file in files)
        return {file: source for file, source in own if source is not None}

    def _parsed(self, file: str) -> Source | None:
        """A file that is Python, parsed when it is first asked for."""
        if file not in self._sources:
            try:
                self._sources[file] = Source(file)
            except (SyntaxError, UnicodeDecodeError, OSError):
                self._sources[file] = None
        return self._sources[file]

    def follow(self, sources: Mapping[str, Source]) -> None:
        """Finds the classes under the names that other files import them by, and hand on."""
        while True:
            before = len(self.known)
            for file, source in sources.items():
                for name, target in self._imported(file, source).items():
                    if isinstance(target, ClassName):
                        self.known.setdefault((self._module(file), name), target)
            if len(self.known) == before:
                return

    def classes_in(self, file: str, source: Source) -> Callable[[ast.AST | None], ClassName | None]:
        """Gives the rewritten class that an expression of a file names, or None."""
        module = self._module(file)
        names = self._imported(file, source)
        names |= {n: ClassName(module, n) for n in self.classes.get(module, ())}

        def named(node: ast.AST | None) -> ClassName | None:
            if isinstance(node, ast.Name):
                found = names.get(node.id)
                return found if isinstance(found, ClassName) else None
            if not isinstance(node, ast.Attribute):
                return None
            holder = names.get(ast.unparse(node.value))
            return self.known.get((holder, node.attr)) if isinstance(holder, str) else None

        return named

    def connected(self) -> set[str]:
        """The files that import a rewritten module, by others too, and the files they import."""
        found = self._importing()
        while True:
            imported = set().union(*map(self._modules_in, found))
            more = {file for file in self.files if self._module(file) in imported} - found
            if not more:
                return found
            found |= more

    def _importing(self) -> set[str]:
        """The files that import a rewritten module, by others too; only what may is parsed."""
        found = set(self.modules)
        new, known = found, set(self.modules.values())
        while new:
            naming = re.compile("|".join(_naming(file, self._module(file)) for file in new))
            new = {
                file
                for file, text in self._texts.items()
                if file not in found and naming.search(text) and self._modules_in(file) & known
            }
            found = found | new
            known |= {self._module(file) for file in new}
        return found

    def _modules_in(self, file: str) -> set[str]:
        """What may be a module of all that a file imports."""
        source = self._parsed(file)
        imported = {} if source is None else self._imported(file, source)
        names = {n.module if isinstance(n, ClassName) else n for n in imported.values()}
        return names | {name.rpartition(".")[0] for name in names}

    def _module(self, file: str) -> str:
        if file in self.modules:
            return self.modules[file]
        path = pathlib.Path(file).relative_to(self.root).with_suffix("")
        parts = path.parts[:-1] if path.name == "__init__" else path.parts
        return ".".join(parts)

    def _imported(self, file: str, source: Source) -> dict[str, ClassName | str]:
        """Rewritten classes, and the names of modules and of other things, by local names."""
        found: dict[str, ClassName | str] = {}
        own = self._module(file)
        package = own if pathlib.Path(file).name == "__init__.py" else own.rpartition(".")[0]
        for node in source.imports:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    name = alias.asname or alias.name
                    found[name] = alias.name
            else:
                where = imported_from(node, package)
                for alias in node.names:
                    name = alias.asname or alias.name
                    known = self.known.get((where, alias.name))
                    found[name] = known or (f"{where}.{alias.name}" if where else alias.name)
        return found

    def _uses(self, file: str, source: Source) -> Iterator[Use]:
        named = self.classes_in(file, source)
        seen: set[tuple[int, str]] = set()
        for node in _reads(source.tree.body, self.classes.get(self._module(file), ())):
            cls = named(node)
            if cls is None or (node.lineno, cls.name) in seen:
                continue
            seen.add((node.lineno, cls.name))
            yield Use(file, node.lineno, _text(source, node, cls.name))


def _naming(file: str, module: str) -> str:
    """A pattern of the text of each file that imports a module."""
    name = rf"\b{re.escape(module.rpartition('.')[2])}\b"
    is_package = pathlib.Path(file).name == "__init__.py"
    return rf"{name}|from\s*\.+[\s\\]*import" if is_package else name


def _reads(body: Iterable[ast.AST], rewritten: Collection[str]) -> Iterator[ast.expr]:
    """The names that are read, but in rewritten classes, in annotations and by `isinstance`."""
    stack = [
        node for node in body if not (isinstance(node, ast.ClassDef) and node.name in rewritten)
    ]
    while stack:
        node = stack.pop(0)
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
            yield node
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns"):
                continue
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance":
                continue
            children = value if isinstance(value, list) else [value]
            stack += [each for each in children if isinstance(each, ast.AST)]


def _text(source: Source, node: ast.expr, cls: str) -> str:
    """What is done with a class."""
    around = next((a for a in source.ancestors(node) if isinstance(a, ast.ClassDef)), None)
    inside = f"{around.name} " if around is not None else ""
    parent = source.parents[node]
    if isinstance(parent, ast.ClassDef):
        return f"{parent.name} derives from {cls}"
    if not (isinstance(parent, ast.Call) and parent.func is node):
        return f"{inside}uses {cls}"
    above = source.parents[parent]
    if isinstance(above, ast.Attribute) and above.attr in ("init", "apply", "bind"):
        return f"{inside}calls {cls}(...).{above.attr}"
    return f"{inside}makes a {cls}"
