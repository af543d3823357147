"""The new files: what a rewritten class needs of the old one, and nothing else."""

from __future__ import annotations

import ast
import pathlib
import symtable
import sys
import types
from collections.abc import Iterable
from typing import Any

from flax import linen as nn

from bridge.rewrite.plan._function_plans import FunctionPlan
from bridge.rewrite.plan._plans import Program
from bridge.rewrite.plan._references import References
from bridge.rewrite.plan._refusals import NotRewritableError
from bridge.rewrite.syntax._source import Source, bound_in, imported_from, is_import, names_in

SUFFIX = "_nnx"


class NewFile:
    """The file beside one source file."""

    def __init__(self, program: Program, source: Source, module: str) -> None:
        self.program, self.source, self.module = program, source, module
        self.namespace = vars(sys.modules[module])
        self.references = References(program, source, self.namespace)
        self.plans = [plan for plan in program.plans.values() if plan.source is source]
        self._pieces: dict[ast.stmt, str] = {}
        self._old_classes: set[str] = set()

    @property
    def name(self) -> str:
        """The name of the new module."""
        return f"{self.module}{SUFFIX}"

    @property
    def path(self) -> pathlib.Path:
        """Where the new file goes."""
        old = pathlib.Path(self.source.file)
        return old.with_name(f"{old.stem}{SUFFIX}.py")

    def text(self, extra: Iterable[str] = ()) -> str:
        """The text of the file.

        `extra` names what is needed besides the rewritten classes.
        """
        return self._assembled(self._needed(extra))

    def read_elsewhere(self, text: str) -> dict[str, set[str]]:
        """What a text reads of modules that have new files, by the names of the old ones."""
        found: dict[str, set[str]] = {}
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                value = self.namespace.get(node.value.id)
                name = value.__name__ if isinstance(value, types.ModuleType) else ""
                if name in self.program.new_modules:
                    found.setdefault(name, set()).add(node.attr)
        return found

    def pieces(self) -> dict[ast.stmt, str]:
        """The new text of each statement that rewritten classes are or need, imports apart."""
        self._needed(())
        return dict(self._pieces)

    def _needed(self, extra: Iterable[str]) -> set[str]:
        rewritten = [plan for plan in self.plans if plan.refusal is None]
        inner = [p for p in rewritten if isinstance(p, FunctionPlan) and p.around is not None]
        written = self.program.written
        self._pieces = {p.node: written[p.cls].text for p in rewritten if p not in inner}
        for plan in inner:
            around: Any = plan.around
            above = "\n".join([*self.source.comments_above(plan.function), written[plan.cls].text])
            self._pieces[around] = f"{above}\n\n\n{self._pieces[around]}"
        waiting = [name for text in self._pieces.values() for name in names_of(text)]
        waiting += list(extra)
        binding: dict[str, list[ast.stmt]] = {}
        imported = {
            name for each in self.source.tree.body if is_import(each) for name in bound_in(each)
        }
        for statement in self.source.tree.body:
            for name in _bound_at_top(statement) | (_changed_at_top(statement) - imported):
                binding.setdefault(name, []).append(statement)
        needed: set[str] = set()
        while waiting:
            name = waiting.pop()
            if name in needed:
                continue
            needed.add(name)
            for statement in binding.get(name, ()):
                if statement in self._pieces or is_import(statement):
                    continue
                if self._is_old_class(name):
                    self._old_classes.add(name)
                    continue
                text = self._statement(statement)
                self._pieces[statement] = text
                waiting += names_of(text)
        return needed

    def _is_old_class(self, name: str) -> bool:
        """Whether a name is a class that stays what it is: a copy of an `Enum` is another one."""
        value = self.namespace.get(name)
        return (
            isinstance(value, type)
            and value.__module__ == self.module
            and not issubclass(value, nn.Module)
        )

    def _statement(self, statement: ast.stmt) -> str:
        if isinstance(statement, ast.ClassDef):
            cls = self.namespace.get(statement.name)
            if isinstance(cls, type) and issubclass(cls, nn.Module):
                # A class that was not rewritten, by a name that nothing replaces.
                return f"{statement.name} = _linen.{statement.name}"
        try:
            return self.source.render(statement, list(self.references.edits(statement)))
        except NotRewritableError:
            return self.source.render(statement)

    def _assembled(self, needed: set[str]) -> str:
        imports: list[str] = []
        body: list[str] = []
        future: list[str] = []
        docstring = ""
        for index, statement in enumerate(self.source.tree.body):
            if (
                index == 0
                and isinstance(statement, ast.Expr)
                and isinstance(statement.value, ast.Constant)
            ):
                docstring = self.source.render(statement)
            elif isinstance(statement, ast.ImportFrom) and statement.module == "__future__":
                future.append(self.source.render(statement))
            elif is_import(statement):
                imports += self._import(statement, needed)
            elif statement in self._pieces:
                comments = self.source.comments_above(statement)
                body.append("\n".join([*comments, self._pieces[statement]]))
        text = _joined(body)
        has_linen = "_linen." in text
        imports = [each for each in imports if _is_used(each, text)]
        added = []
        if "nnx." in text and not any("nnx" in bound_in(ast.parse(each)) for each in imports):
            added.append("from flax import nnx")
        added += [f"import {name}" for name in ("bridge", "registry") if f"{name}." in text]
        if self._old_classes:
            added.append(import_line(self.module, sorted(self._old_classes)))
        if has_linen:
            package, _, own = self.module.rpartition(".")
            added.append(
                f"from {package} import {own} as _linen" if package else f"import {own} as _linen"
            )
        head = [part for part in (self._header(), docstring) if part]
        groups = ["\n".join(head)] if head else []
        if future:
            groups.append("\n".join(future))
        if imports or added:
            package = self.module.partition(".")[0] if "." in self.module else ""
            groups.append(grouped(sorted_imports(imports, added, package), package))
        blank = "\n\n" if _is_short(text) else "\n\n\n"
        return "\n\n".join(groups) + blank + text + "\n"

    def _header(self) -> str:
        lines = []
        for line in self.source.text.split("\n"):
            if not line.startswith("#") or line.startswith("#!"):
                break
            lines.append(line)
        return "\n".join(lines)

    def _import(self, statement: ast.stmt, needed: set[str]) -> list[str]:
        """An import with only the names that are needed, each from where it now is."""
        if isinstance(statement, ast.Try):
            return [self.source.render(statement)] if bound_in(statement) & needed else []
        names = [
            a
            for each in statement.names  # pyright: ignore
            for a in self._spelled_out(statement, each)
            if not needed.isdisjoint(self._new_names(a)) or a.name == "*"
        ]
        if not names:
            return []
        if isinstance(statement, ast.Import):
            return [f"import {self._new_module(a)}" for a in names]
        if not isinstance(statement, ast.ImportFrom):
            return []
        return self._import_from(statement, names)

    def _spelled_out(self, statement: ast.stmt, alias: ast.alias) -> list[ast.alias]:
        """The names that `*` stands for, but for those that another statement sets."""
        if alias.name != "*" or not isinstance(statement, ast.ImportFrom):
            return [alias]
        module = sys.modules.get(self._absolute(statement))
        if module is None:
            return [alias]
        others = (bound_in(each) for each in self.source.tree.body if each is not statement)
        taken = set[str]().union(*others)
        names = getattr(module, "__all__", [name for name in vars(module) if name[0] != "_"])
        return [ast.alias(name, None) for name in names if name not in taken]

    def _new_module(self, alias: ast.alias) -> str:
        """An imported module, the new one if there is one, by the name that it has here."""
        name, new = alias.asname or alias.name, self.program.new_modules.get(alias.name)
        # A dotted name binds that of its package.
        return alias_text(alias) if new is None or "." in name else f"{new} as {name}"

    def _import_from(self, statement: ast.ImportFrom, names: list[ast.alias]) -> list[str]:
        dots = "." * statement.level
        where = f"{dots}{statement.module or ''}"
        absolute = self._absolute(statement)
        by_place: dict[str, list[str]] = {}
        for alias in names:
            value = self.namespace.get(alias.asname or alias.name)
            plan = self.program.plan_of(value) if isinstance(value, type) else None
            if (made := self._function(value)) is not None:
                text = alias_text(alias) if made.returns_layers else made.name_in_file
                by_place.setdefault(f"{where}{SUFFIX}", []).append(text)
                continue
            new = self.program.new_modules
            maker = self.program.makers.get(getattr(value, "__code__", None))  # pyright: ignore
            if maker is not None and maker.module in new:
                place = f"{where}{SUFFIX}" if absolute == maker.module else new[maker.module]
                by_place.setdefault(place, []).append(alias_text(alias))
                continue
            full = f"{absolute}.{alias.name}"
            if plan is not None and plan.refusal is None and absolute in new:
                by_place.setdefault(f"{where}{SUFFIX}", []).append(alias_text(alias))
            elif plan is not None and plan.refusal is None:
                by_place.setdefault(new[plan.cls.__module__], []).append(alias_text(alias))
            elif full in new and not isinstance(value, type):
                own = alias.asname or alias.name
                by_place.setdefault(where, []).append(f"{alias.name}{SUFFIX} as {own}")
            else:
                by_place.setdefault(where, []).append(alias_text(alias))
        return [import_line(place, aliases) for place, aliases in by_place.items()]

    def _function(self, value: Any) -> FunctionPlan | None:
        """The plan of a function of another file that makes layers."""
        code = getattr(value, "__code__", None)
        plans = (p for p in self.program.plans.values() if isinstance(p, FunctionPlan))
        return next(
            (
                plan
                for plan in plans
                if code is not None
                and plan.refusal is None
                and (plan.source.file, plan.function.lineno)
                == (code.co_filename, code.co_firstlineno)
            ),
            None,
        )

    def _new_names(self, alias: ast.alias) -> set[str]:
        """What an imported name is called in the new file."""
        name = (alias.asname or alias.name).split(".")[0]
        made = self._function(self.namespace.get(name))
        is_class = made is not None and not made.returns_layers
        return {made.name_in_file} if made is not None and is_class else {name}

    def _absolute(self, statement: ast.ImportFrom) -> str:
        return imported_from(statement, self.namespace.get("__package__") or "")


def names_of(text: str) -> list[str]:
    """The names of the module that a text reads."""
    found: set[str] = set()
    tables = [symtable.symtable(text, "new file", "exec")]
    while tables:
        table = tables.pop()
        for symbol in table.get_symbols():
            if symbol.is_referenced() and (symbol.is_global() or table.get_type() == "module"):
                found.add(symbol.get_name())
        tables += table.get_children()
    for node in ast.walk(ast.parse(text)):
        # Annotations, which are texts under `from __future__ import annotations`.
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
            found |= _annotated(node.annotation)
        elif isinstance(node, ast.FunctionDef) and node.returns is not None:
            found |= _annotated(node.returns)
    return sorted(found)


def _annotated(node: ast.expr) -> set[str]:
    found = names_in(node)
    for each in ast.walk(node):
        if isinstance(each, ast.Constant) and isinstance(each.value, str):
            try:
                found |= names_in(ast.parse(each.value, mode="eval"))
            except SyntaxError:
                continue
    return found


def _bound_at_top(statement: ast.stmt) -> set[str]:
    if isinstance(statement, ast.If) and "__name__" in ast.unparse(statement.test):
        return set()
    return bound_in(statement)


def _changed_at_top(statement: ast.stmt) -> set[str]:
    """The names whose values a statement changes, as `clip.defvjp(forward, backward)` does."""
    match statement:
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name() as name))):
            return {name.id}
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript() as target]):
            return {target.value.id} if isinstance(target.value, ast.Name) else set()
    return set()


def _joined(pieces: list[str]) -> str:
    """Statements as a file has them: classes and functions apart, assignments together."""
    found = ""
    before = ""
    for piece in pieces:
        if before:
            both_short = _is_short(before) and _is_short(piece)
            found += "\n" if both_short else "\n\n\n"
        found += piece
        before = piece
    return found


def _is_short(piece: str) -> bool:
    code = [line for line in piece.split("\n") if not line.startswith("#")]
    return not code[0].startswith(("class ", "def ", "@", "async "))


def _is_used(statement: str, text: str) -> bool:
    tree = ast.parse(statement)
    used = set(names_of(text))
    return bool(bound_in(tree) & used) or "*" in statement


def modules_of(program: Program) -> dict[str, Any]:
    """The old module of each file."""
    found: dict[str, Any] = {}
    for plan in program.plans.values():
        found.setdefault(plan.source.file, plan.cls.__module__)
    return found


def import_line(place: str, aliases: list[str]) -> str:
    """An import of names, on several lines if it is long."""
    line = f"from {place} import {', '.join(aliases)}"
    if len(line) <= 100:
        return line
    return "\n".join([f"from {place} import (", *(f"    {alias}," for alias in aliases), ")"])


def alias_text(alias: ast.alias) -> str:
    """A name in an import."""
    return alias.name if alias.asname is None else f"{alias.name} as {alias.asname}"


def sorted_imports(imports: list[str], added: list[str], package: str = "") -> list[str]:
    """The old order, with what is new behind the imports of other packages.

    `package` is the program's own.
    """
    relative = [each for each in imports if each.startswith("from .")]
    others = [each for each in imports if each not in relative]
    flax = [i for i, each in enumerate(others) if each.startswith(("from flax", "import flax"))]
    new_flax = [each for each in added if "flax" in each]
    rest = [each for each in added if each not in new_flax]
    own = [i for i, each in enumerate(others) if _top(each) == package]
    position = flax[-1] + 1 if flax else own[0] if own else len(others)
    others[position:position] = new_flax
    return [
        *others,
        *[each for each in rest if "_linen" not in each],
        *relative,
        *[each for each in rest if "_linen" in each],
    ]


def _top(line: str) -> str:
    """The name of the package that a line imports from, `""` for a relative import."""
    return line.split()[1].split(".")[0]


def grouped(imports: list[str], package: str = "") -> str:
    """Imports with blank lines between Python's own, those of others, `package`, relative ones."""
    found, before = "", None
    for each in imports:
        name = _top(each)
        kind = 0 if name in sys.stdlib_module_names else 1
        kind = 3 if not name else 2 if name == package else kind
        found += ("\n" if before is not None and kind != before else "") + each + "\n"
        before = kind
    return found.rstrip("\n")
