"""The differences of two checkpoints, as a JSON document and as a table."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from flax import nnx

from bridge._cli import _checkpoints, _command, _conversion
from bridge._cli._checkpoints import CheckpointContents, text_of
from bridge._cli._command import InputError
from bridge._cli._output import Result, new_table, short_shape
from bridge._conversion.neutral import Path
from bridge._randomness.typed_keys import is_key, to_bits
from bridge.parity._numbers import Compared, Tolerance, compare, lacking

Values: TypeAlias = dict[Path, Any]
_HEADINGS = ("difference", "path", "shape", "dtype", "max |a - b|", "relative")
# Kinds of dtype that are not numbers: texts, dates and objects.
_NO_NUMBERS = "OSUMm"


def compared(arguments: argparse.Namespace) -> Result:
    """Compares the leaves of two checkpoints.

    Raises CheckpointError if one of them cannot be read, PortError if the Linen checkpoint does not
    fit `--model`, and InputError if there is no Linen checkpoint to convert.
    """
    rules = _command.load_rules(arguments.rules)
    contents = [
        _checkpoints.read(arguments.a, arguments.a_within or arguments.within, arguments.a_layout),
        _checkpoints.read(arguments.b, arguments.b_within or arguments.within, arguments.b_layout),
    ]
    if not arguments.rngs:
        contents = [each.without_rngs() for each in contents]
    if rules is not None or arguments.model:
        a, b = _in_one_layout(contents, rules, arguments)
    else:
        both = all(each.has_collections for each in contents)
        a, b = (each.values(by_collection=both) for each in contents)
    a, b = _as_in(b, a), _as_in(a, b)
    tolerance = Tolerance(arguments.rtol, arguments.atol)
    every = [
        _compared(path, a, b, tolerance, dtypes=not arguments.ignore_dtype)
        for path in sorted({**a, **b}, key=_checkpoints.in_order)
    ]
    differences = [each for each in every if not each.ok]
    sides = {
        side: {
            "checkpoint": path,
            "layout": each.layout.layout,
            "format": each.layout.format,
            "extra": [*_checkpoints.beside(each.layout)],
        }
        for side, path, each in zip("ab", (arguments.a, arguments.b), contents, strict=True)
    }
    document = {
        "same": not differences,
        **sides,
        "equal": len(every) - len(differences),
        "differences": [_entry(each) for each in differences],
    }
    return Result("diff", document, _shown(document), not differences)


def _in_one_layout(
    contents: Sequence[CheckpointContents],
    rules: Mapping[str, str] | None,
    arguments: argparse.Namespace,
) -> tuple[Values, ...]:
    """The values of both checkpoints by NNX path: those of the Linen one as the model has them."""
    linen = [content for content in contents if content.is_linen]
    if len(linen) != 1:
        both, remedy = ("Linen's", "nnx") if linen else ("NNX's", "linen")
        raise InputError(
            "--rules and --model",
            f"two checkpoints that are {both}",
            "one of Linen's and one of NNX's",
            "leave them out: paths are compared as they are; or, if a checkpoint is taken for what"
            f" it is not, give --a-layout {remedy} or --b-layout {remedy}",
        )
    plan = _conversion.plan_for(linen[0], rules, arguments)
    if not plan.to_nnx:
        raise InputError("--model", "a Linen model", "an NNX model", "name the other one")
    state = nnx.to_flat_state(_conversion.applied(plan))
    converted = {tuple(map(str, path)): leaf.get_raw_value() for path, leaf in state}
    return tuple(
        converted if each.is_linen else each.values(by_collection=False) for each in contents
    )


def _as_in(others: Values, values: Values) -> Values:
    """The values, without `value`, the key that orbax and msgpack write for a Variable or a box."""
    return {
        path[:-1] if path[-1:] == ("value",) and path[:-1] in others else path: value
        for path, value in values.items()
    }


def _compared(path: Path, a: Values, b: Values, tolerance: Tolerance, *, dtypes: bool) -> Compared:
    """The comparison of a leaf, by the measure of `bridge.parity`."""
    text = text_of(path)
    if path not in a or path not in b:
        return lacking(text, in_b=path in b, value=b[path] if path in b else a[path])
    x, y = a[path], b[path]
    if is_key(x) != is_key(y):
        # Flax and orbax store a typed key as its bits.
        x, y = to_bits(x), to_bits(y)
    x, y = _comparable(x), _comparable(y)
    table = {str(each.dtype): tolerance for each in (x, y) if hasattr(each, "dtype")}
    return compare(text, x, y, table, dtypes=dtypes)


def _comparable(value: Any) -> Any:
    """Numbers as an array, texts and dates as what Python compares."""
    if is_key(value):
        return value
    array = np.asarray(value)
    return array.tolist() if array.dtype.kind in _NO_NUMBERS else array


def _entry(found: Compared) -> dict[str, Any]:
    return {
        "path": found.place,
        "difference": found.note or "values",
        "shapes": [None if shape is None else list(shape) for shape in found.shapes],
        "dtypes": list(found.dtypes),
        "max_abs": _finite(found.max_abs),
        "max_rel": _finite(found.max_rel),
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _shown(document: Mapping[str, Any]) -> Iterator[Any]:
    for side in "ab":
        entry = document[side]
        yield f"{side}: {entry['checkpoint']} (layout {entry['layout']}, {entry['format']})"
    differences = document["differences"]
    if differences:
        yield ""
        yield new_table(_HEADINGS, map(_row, differences))
        yield ""
    equal, differ = document["equal"], len(differences)
    are = "leaf is" if equal == 1 else "leaves are"
    yield f"{equal:,} {are} the same, {differ:,} {'differs' if differ == 1 else 'differ'}"
    extra = {side: ", ".join(document[side]["extra"]) for side in "ab"}
    if any(extra.values()):
        both = "; ".join(f"{side} has {names or 'nothing'}" for side, names in extra.items())
        yield f"beside the model, and not compared: {both}"


def _row(entry: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        entry["difference"],
        entry["path"],
        _both(map(short_shape, entry["shapes"])),
        _both(dtype or "" for dtype in entry["dtypes"]),
        *("" if entry[key] is None else f"{entry[key]:.3g}" for key in ("max_abs", "max_rel")),
    )


def _both(texts: Iterable[str]) -> str:
    return " -> ".join(dict.fromkeys(filter(None, texts)))
