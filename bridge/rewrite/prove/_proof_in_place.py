"""The proof of the old files with NNX classes in them, before they are written."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence

from bridge.rewrite.emit._files import NewFile
from bridge.rewrite.observe._entries import Entry
from bridge.rewrite.plan._plans import Program

from ._build import Maker, importable
from ._proof import Prover


def fault_in_place(
    program: Program,
    entries: Sequence[Entry],
    files: Sequence[NewFile],
    texts: Mapping[str, tuple[str, str]],
) -> str | None:
    """What is wrong with texts that take the place of the old files, None if nothing is.

    Args:
        program: everything.
        entries: how the model is made and called.
        files: the files.
        texts: path and text by the module's name.
    """
    try:
        # Only the import sees them: what makes the Linen model looks for it by the same names.
        with importable(texts):
            modules = {f.module: importlib.import_module(f.module) for f in files}
        prover = Prover(program, Maker(program, modules), gradients=False)
        for run, entry in enumerate(entries):
            prover.entry(run, entry, f"entry {run + 1}")
    except Exception as error:
        text = (str(error).strip().splitlines() or [""])[0]
        return f"the new text raised {type(error).__name__}: {text}"
    wrong = [label for label, report in prover.reports.items() if not report.ok]
    return f"the new text differs: {wrong[0]}" if wrong else None
