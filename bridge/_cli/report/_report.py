"""The report on the model of a TARGET, in a terminal, a pipe or a page."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from rich.text import Text

from bridge._cli import _target
from bridge._cli._command import InputError
from bridge._cli._output import Result, byte_text, html_of, new_table
from bridge._html_page import page_of

from ._document import document_of
from ._observed import observing
from ._tree import ModuleEntry, modules_of

_LABELS = {
    "linen": "Linen",
    "nnx": "NNX",
    "wrapped-linen": "Linen in ToNNX",
    "wrapped-nnx": "NNX in ToLinen",
}
_STYLES = {"linen": "yellow", "nnx": "green", "wrapped-linen": "magenta", "wrapped-nnx": "cyan"}
_HEADINGS = (
    "module",
    "class",
    "kind",
    "own",
    "parameters",
    "bytes",
    "source",
    "NNX counterpart",
)
_NUMBERS = ("own", "parameters", "bytes")
# The terminal's colors are for a light page.
_STYLE = "@media (prefers-color-scheme: dark) { span { filter: brightness(1.7); } }"


def reported(arguments: argparse.Namespace) -> Result:
    """Makes the model, looks at it, and writes the page that `--html` asks for.

    Raises InputError if TARGET gives no model, or the share for `--min-migrated` is not known.
    """
    modules = modules_in(arguments.target, arguments)
    document = document_of(arguments.target, modules)
    ok = True
    if arguments.min_migrated is not None:
        if any(module.is_empty for module in modules):
            raise InputError(
                arguments.target,
                document["notes"][0],
                "a model whose parameters are all known, for --min-migrated",
                "the share would leave them out",
            )
        share = document["migrated"]["parameters"]["share"]
        ok = share >= arguments.min_migrated
        document["check"] = {"min_migrated": arguments.min_migrated, "passed": ok}
    if arguments.html is not None:
        shown = html_of([Text(document["target"], "bold"), "", *_shown(document)])
        page = page_of(document["target"], [shown], _STYLE)
        arguments.html.write_text(page, encoding="utf-8")
    return Result("report", document, _shown(document), ok)


def modules_in(target: str, arguments: argparse.Namespace) -> list[ModuleEntry]:
    """Makes the model of a TARGET and looks at its modules, without allocating anything.

    A model that asks for the values of arrays is made again, with real ones. Raises InputError if
    TARGET gives no model.
    """
    with _target.opened(target, arguments) as make:
        made: list[list[ModuleEntry]] = []

        def run() -> None:
            with observing() as observed:
                model, variables = _target.initialised(make(), target)
                # Inside the trace, because traced values must not leave it.
                made.append(modules_of(model, observed, variables))

        try:
            jax.eval_shape(run)
        except jax.errors.JAXTypeError:
            run()
        return made[0]


def _shown(document: Mapping[str, Any]) -> Iterator[Any]:
    """The table of modules, the migrated shares and the notes."""
    yield new_table(_HEADINGS, map(_row, document["modules"]), right=_NUMBERS)
    yield ""
    parameters, modules = document["migrated"]["parameters"], document["migrated"]["modules"]
    size = f"{byte_text(parameters['native_bytes'])} of {byte_text(parameters['total_bytes'])}"
    yield f"migrated to NNX  parameters  {_share(parameters)}, {size}"
    yield f"                 modules     {_share(modules)}"
    for note in document["notes"]:
        yield f"note: {note}"
    if (check := document["check"]) is not None:
        yield (
            f"check {'passed' if check['passed'] else 'FAILED'}:"
            f" {_percentage(parameters['share'])} of the parameters are native NNX, at least"
            f" {check['min_migrated']:.1%} wanted"
        )


def _row(module: Mapping[str, Any]) -> tuple[str | Text, ...]:
    return (
        "  " * module["depth"] + (module["name"] or "model"),
        module["class"] or "?",
        Text(_LABELS[module["kind"]], _STYLES[module["kind"]]),
        f"{module['own']['parameters']:,}",
        f"{module['total']['parameters']:,}",
        byte_text(module["total"]["bytes"]),
        _source_text(module["source"]),
        _counterpart_text(module),
    )


def _source_text(source: Mapping[str, Any] | None) -> str:
    """A class's place in the program, or what it is imported by."""
    if source is None:
        return "?"
    return source["import_path"] if source["file"] is None else f"{source['file']}:{source['line']}"


def _counterpart_text(module: Mapping[str, Any]) -> str:
    """What stands for a Linen class in NNX."""
    exists = module["counterpart"]["exists"]
    if exists is None:
        return "" if module["kind"] in ("nnx", "wrapped-nnx") else "to be written"
    return module["counterpart"]["name"] if exists else "none"


def _share(counts: Mapping[str, Any]) -> str:
    share = _percentage(counts["share"])
    return f"{share:>6}  {counts['native']:,} of {counts['total']:,}"


def _percentage(share: float) -> str:
    """A share as a percentage that never rounds up to 100% or down to 0%."""
    text = f"{share:.1%}"
    if share < 1 and text == "100.0%":
        return ">99.9%"
    return "<0.1%" if share > 0 and text == "0.0%" else text
