"""Draw the README's two pictures: the mixed model of its quick start, and what crossing costs.

``python scripts/pictures.py write`` puts them into ``docs/pictures``. The picture of the cost shows
``benchmarks/results/cpu/cost.json``, and keeps the figures that it shows in its metadata.
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "pictures"
MODEL, COST = FOLDER / "mixed_model.png", FOLDER / "cost.png"
RESULTS = ROOT / "benchmarks" / "results" / "cpu" / "cost.json"
LINEN, NNX, OTHER = "#d7e6f5", "#d9efd9", "0.6"
SIZE = 32

# (left, bottom, width, height), colour, what it is: outer boxes first.
BOXES = [
    ((0.1, 0.1, 5.4, 4.0), LINEN, "Classifier, a Linen module"),
    ((0.4, 1.3, 4.8, 2.3), NNX, "Residual, an NNX module in bridge.to_linen"),
    ((0.7, 1.6, 4.2, 0.9), LINEN, "nn.Dense in bridge.ToNNX"),
    ((0.4, 0.4, 4.8, 0.6), LINEN, "nn.Dense"),
]
# Height, a variable's name in its module, and its path in the variables of the Classifier.
VARIABLES = [
    (2.85, "scale", "params/ToLinen_0/scale"),
    (2.2, "kernel", "params/ToLinen_0/inner/kernel"),
    (1.85, "bias", "params/ToLinen_0/inner/bias"),
    (0.83, "kernel", "params/Dense_0/kernel"),
    (0.53, "bias", "params/Dense_0/bias"),
]
# A bar's text, the benchmark's row, our subject and Flax's, and the native one.
BARS = [
    ("ToLinen, eager call", "eager call", "ToLinen", "flax ToLinen", "NNX"),
    ("ToLinen, trace and lower", "trace and lower", "ToLinen", "flax ToLinen", "NNX"),
    ("ToLinen, init", "init", "ToLinen", "flax ToLinen", "NNX"),
    ("ToNNX, eager call", "eager call", "ToNNX", "flax ToNNX", "Linen"),
    ("ToNNX, trace and lower", "trace and lower", "ToNNX", "flax ToNNX", "Linen"),
    ("ToNNX, init", "init", "ToNNX", "flax ToNNX", "Linen"),
    ("ToNNX, nnx.jit gradient step", "gradient step", "ToNNX", "flax ToNNX", "NNX"),
    (
        "ToNNX, dispatch in a hot loop\n(bridge.jit_partial; nnx.jit)",
        "call in a hot loop, dispatch",
        "bridge.jit_partial",
        "nnx.jit",
        "jax.jit of Linen",
    ),
]


def ratios() -> list[tuple[str, str, float, float]]:
    """Return what the picture of the cost shows: text, what is native, our ratio and Flax's."""
    rows = {
        row["row"]: {
            (ratio["of"], ratio["to"]): ratio["found"]["median"] for ratio in row["ratios"]
        }
        for row in json.loads(RESULTS.read_text())["rows"]
        if row["size"] == SIZE
    }
    return [
        (text, native, round(rows[row][ours, native], 2), round(rows[row][flax, native], 2))
        for text, row, ours, flax, native in BARS
    ]


def draw_model() -> None:
    """Draw the quick start's mixed model as nested boxes, beside the paths of its variables."""
    from matplotlib.figure import Figure
    from matplotlib.patches import FancyBboxPatch

    figure = Figure(figsize=(8.2, 3.4), layout="constrained")
    axes = figure.add_subplot(xlim=(0, 10.4), ylim=(0, 4.2))
    axes.set_axis_off()
    for (left, bottom, width, height), colour, text in BOXES:
        style = "round,pad=0,rounding_size=0.08"
        axes.add_patch(
            FancyBboxPatch(
                (left, bottom), width, height, boxstyle=style, facecolor=colour, edgecolor=OTHER
            )
        )
        axes.text(left + 0.12, bottom + height - 0.1, text, va="top", fontsize=10)
    for height, name, path in VARIABLES:
        axes.text(4.0, height, name, va="center", ha="right", family="monospace")
        axes.plot([4.1, 5.8], [height, height], color=OTHER, linewidth=1)
        axes.text(5.9, height, path, va="center", family="monospace")
    axes.text(5.9, 3.85, "path in the Linen variables", va="top", style="italic")
    figure.savefig(MODEL, dpi=110, metadata={"Software": None})


def draw_cost() -> None:
    """Draw the ratios to native code as bars, ours above those of flax.nnx.bridge."""
    from matplotlib.figure import Figure

    found = ratios()
    figure = Figure(figsize=(8.2, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for shift, column, label, colour in (
        (-0.2, 2, "bridge", "tab:blue"),
        (0.2, 3, "flax.nnx.bridge", "0.7"),
    ):
        bars = axes.barh(
            [place + shift for place in range(len(found))],
            [line[column] for line in found],
            height=0.4,
            label=label,
            color=colour,
        )
        axes.bar_label(bars, fmt="%.2f", padding=2, fontsize=8)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_yticks(range(len(found)), [f"{text} / {native}" for text, native, *_ in found])
    axes.tick_params("y", labelsize=8)
    axes.invert_yaxis()
    axes.set(xscale="log", xlim=(0.3, 60))
    axes.set_xticks([0.5, 1, 2, 5, 10, 20, 50], ["0.5", "1", "2", "5", "10", "20", "50"])
    axes.set_xlabel(f"time, where the native code takes 1 ({SIZE} blocks, CPU)")
    axes.legend(loc="center right", fontsize="small")
    figure.savefig(COST, dpi=110, metadata={"Software": None, "Description": json.dumps(found)})


if __name__ == "__main__":
    if sys.argv[1:] != ["write"]:
        raise SystemExit(__doc__)
    draw_model()
    draw_cost()
