"""A run as a picture: how every row's subjects grow with the size of the model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .results import Measured

COLUMNS = 3
# The same colour wherever a subject appears; wrappers have that of what they wrap.
_COLOURS = {
    "Linen": "tab:blue",
    "NNX": "tab:green",
    "ToNNX": "tab:orange",
    "ToLinen": "tab:red",
    "ToNNX, bridge.jit_partial": "tab:purple",
}
_SCALES = {"s": "seconds"}


def draw(measured: Sequence[Measured], path: Path) -> None:
    """Draws the growth curves, one picture for each row that has several sizes, if there is one.

    Args:
      measured: the run.
      path: where the PNG goes.
    """
    # Nothing else here needs it, so a run without a picture does without.
    from matplotlib.figure import Figure

    by_row: dict[str, list[Measured]] = {}
    for one in measured:
        if isinstance(one.size, int):
            by_row.setdefault(one.row, []).append(one)
    by_row = {name: found for name, found in by_row.items() if len(found) > 1}
    if not by_row:
        return
    height = -(-len(by_row) // COLUMNS)
    figure = Figure(figsize=(5 * COLUMNS, 3.6 * height), layout="constrained")
    for index, (name, found) in enumerate(by_row.items()):
        axes = figure.add_subplot(height, COLUMNS, index + 1)
        for subject in found[0].subjects:
            points = [
                (one.size, one.subjects[subject].median) for one in found if subject in one.subjects
            ]
            sizes, figures = zip(*points, strict=True)
            is_flax = subject.startswith(("flax", "nnx."))
            axes.plot(
                sizes,
                figures,
                label=subject,
                marker="o",
                markersize=3,
                linestyle="--" if is_flax else "-",
                color=_COLOURS.get(subject.removeprefix("flax ")),
            )
        axes.set(xscale="log", yscale="log", title=name, xlabel="size")
        axes.set_ylabel(_SCALES.get(found[0].unit, found[0].unit))
        axes.legend(fontsize="x-small")
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=100)
