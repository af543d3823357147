"""A report as one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from bridge._cli._output import byte_text, share_text

from ._page import MARK, PAGE, SCRIPT, STYLE
from ._text import LABELS, check_text, counterpart_text, source_text


def page(document: Mapping[str, Any]) -> str:
    """The page.

    Args:
        document: the report, see `_report_document`.
    """
    notes = [*document["notes"]]
    if document["check"] is not None:
        notes.append(check_text(document["check"]))
    return PAGE.substitute(
        title=escape(f"{document['target']}: from Linen to NNX"),
        target=escape(document["target"]),
        mark=MARK,
        style=STYLE,
        script=SCRIPT,
        cards="".join(_cards(document["migrated"])),
        notes="".join(f'<p class="note">{escape(note)}</p>\n' for note in notes),
        tree="".join(_tree(document["modules"])),
        remaining=_remaining(document["modules"]),
    )


def _cards(migrated: Mapping[str, Any]) -> Iterator[str]:
    parameters, modules = migrated["parameters"], migrated["modules"]
    size = f"{byte_text(parameters['native_bytes'])} of {byte_text(parameters['total_bytes'])}"
    yield _card("parameters", parameters, f" ({size})")
    yield _card("modules", modules, "")


def _card(what: str, counts: Mapping[str, Any], detail: str) -> str:
    return (
        f'<div class="card"><div class="figure">{escape(share_text(counts["share"]))}</div>'
        f"<div>of the {what} are in NNX modules</div>{_bar(counts['share'])}"
        f'<div class="soft">{counts["native"]:,} of {counts["total"]:,}{escape(detail)}</div></div>'
    )


def _bar(share: float) -> str:
    shown = escape(share_text(share), quote=True)
    return f'<div class="bar" title="{shown}"><i style="width:{share:.2%}"></i></div>'


def _tree(modules: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Each module that has submodules as a `details` around theirs."""
    opened: list[int] = []
    following = [m["depth"] for m in modules[1:]] + [0]
    for module, after in zip(modules, following, strict=True):
        while opened and opened[-1] >= module["depth"]:
            opened.pop()
            yield "</details>\n"
        text = escape(_search_text(module), quote=True)
        if after > module["depth"]:
            opened.append(module["depth"])
            unfolded = " open" if module["depth"] < 2 else ""
            yield f'<details{unfolded} data-text="{text}"><summary class="row">'
            yield f"{_cells(module)}</summary>\n"
        else:
            yield f'<div class="row" data-text="{text}">{_cells(module)}</div>\n'
    yield from ("</details>\n" for _ in opened)


def _search_text(module: Mapping[str, Any]) -> str:
    path, source = module["path"] or "model", source_text(module["source"])
    parts = (path, module["class"] or "", LABELS[module["kind"]], source, counterpart_text(module))
    return " ".join(parts).lower()


def _cells(module: Mapping[str, Any]) -> str:
    name, cls = module["name"] or "model", module["class"] or "class not known"
    source = source_text(module["source"])
    import_path = module["source"]["import_path"] if module["source"] else source
    full = escape(module["path"] or "model", quote=True)
    return (
        f'<span class="name" style="--depth:{module["depth"]}" title="{full}">'
        f'<b>{escape(name)}</b> <span class="soft">{escape(cls)}</span></span>'
        f'<span class="kind {module["kind"]}">{escape(LABELS[module["kind"]])}</span>'
        f'<span class="number">{module["total"]["parameters"]:,}</span>'
        f'<span class="number soft">{escape(byte_text(module["total"]["bytes"]))}</span>'
        f"{_bar(module['migrated']) if module['total']['parameters'] else '<span></span>'}"
        f'<span class="mono" title="{escape(import_path, quote=True)}">{escape(source)}</span>'
        f'<span class="mono">{escape(counterpart_text(module))}</span>'
    )


def _remaining(modules: Sequence[Mapping[str, Any]]) -> str:
    """The Linen classes that are left, the largest first."""
    classes: dict[tuple[str, str, str], tuple[int, int]] = {}
    for module in modules:
        if module["kind"] in ("linen", "wrapped-linen"):
            source, counterpart = source_text(module["source"]), counterpart_text(module)
            key = (module["class"] or "class not known", source, counterpart)
            count, parameters = classes.get(key, (0, 0))
            classes[key] = count + 1, parameters + module["own"]["parameters"]
    if not classes:
        return ""
    rows = "".join(
        f'<tr><td><b>{escape(cls)}</b></td><td class="number">{count:,}</td>'
        f'<td class="number">{parameters:,}</td><td class="mono">{escape(source)}</td>'
        f'<td class="mono">{escape(counterpart)}</td></tr>\n'
        for (cls, source, counterpart), (count, parameters) in sorted(
            classes.items(), key=lambda item: (-item[1][1], -item[1][0], item[0])
        )
    )
    return (
        "<h2>Linen classes that are left</h2>\n"
        '<div class="scroll"><table class="classes">\n<thead><tr><th>class</th>'
        '<th class="number">modules</th><th class="number">own parameters</th><th>source</th>'
        f"<th>NNX counterpart</th></tr></thead>\n<tbody>\n{rows}</tbody></table></div>"
    )
