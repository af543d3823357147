"""Reads the JSON beside a checkpoint's arrays; what `save_args` does not write is refused."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from bridge._errors import CheckpointError

from . import _json
from ._files import NOTES, NOTES_FILE, VARIABLES
from ._json import MalformedError, NotCarriedError
from ._stored import PYTHON_TYPES, Names, Record, Stored, names_of, parts

FORMAT_VERSION = 1
_HEADER = {"version", "written_by", "items"}
_RECORD = {"path", "form", "leaves", "names"}
_BOX = {"box", "fields", "left_out"}
_ARRAY_KINDS = ("jax", "numpy", "generic", "key")
_NAME = re.compile(r"[A-Za-z0-9_~%(),-]+")
_DIGEST = re.compile(r"[0-9a-f]{16}")
_SHOWN = 10


@dataclasses.dataclass(frozen=True)
class Notes:
    """What the JSON of a checkpoint says.

    Attributes:
      written_by: the side that the model was saved from.
      items: the records of each tree.
      is_intact: whether its own digest is right; None if it has none.
    """

    written_by: str
    items: Mapping[str, Sequence[Record]]
    is_intact: bool | None


def write(written_by: str, items: Mapping[str, Sequence[Record]], *, digest: bool) -> Any:
    """The JSON for a checkpoint; the inverse of `read`."""
    records = {name: [record.to_json() for record in own] for name, own in items.items()}
    document = {"version": FORMAT_VERSION, "written_by": written_by, "items": records}
    return {**document, "digest": _digest(document)} if digest else document


def read(path: Any) -> Notes:
    """The JSON of the checkpoint at a path.

    Raises:
      CheckpointError: it is newer than this package, or not what this package writes.
    """
    try:
        document = json.loads((path / NOTES / NOTES_FILE).read_bytes())
        if not isinstance(document, dict) or type(document.get("version")) is not int:
            raise MalformedError("there is no version")
        if document["version"] > FORMAT_VERSION:
            raise CheckpointError(
                f"format version {document['version']} is newer than this package's"
                f" {FORMAT_VERSION}:",
                path,
                "Upgrade the package.",
            )
        return _notes(document)
    except (MalformedError, ValueError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise _malformed(path, [(NOTES, str(error).partition("\n")[0])]) from None
    except _ProblemsError as error:
        raise _malformed(path, error.problems) from None


class _ProblemsError(Exception):
    def __init__(self, problems: list[tuple[str, str]]):
        self.problems = problems
        super().__init__(problems)


def _malformed(path: Any, problems: list[tuple[str, str]]) -> CheckpointError:
    rest = len(problems) - _SHOWN
    more = [("…", f"and {rest} more")] if rest > 0 else []
    return CheckpointError(
        "the list of leaves is damaged, or was not written by this package, in the checkpoint at",
        path,
        "Restore an earlier checkpoint. Nothing was changed in memory.",
        unreadable=problems[:_SHOWN] + more,
    )


def _notes(document: dict[str, Any]) -> Notes:
    _expect_keys(document, _HEADER, {"digest"}, "the document")
    written_by, items = document["written_by"], document["items"]
    if written_by not in ("linen", "nnx"):
        raise MalformedError(f"it is not known which side wrote it: {written_by!r:.40}")
    if not isinstance(items, dict) or VARIABLES not in items:
        raise MalformedError(f"there is no tree {VARIABLES!r}")
    problems: list[tuple[str, str]] = []
    made: dict[str, list[Record]] = {}
    for name, records in items.items():
        # Each is the name of a directory in the checkpoint's.
        if name == NOTES or not name.isidentifier() or not isinstance(records, list):
            problems.append((NOTES, f"a tree cannot be called {name!r:.40}"))
        else:
            made[name] = _records(records, name, problems)
    if problems:
        raise _ProblemsError(problems)
    own = document.get("digest")
    bare = {key: value for key, value in document.items() if key != "digest"}
    return Notes(written_by, made, None if own is None else own == _digest(bare))


def _records(records: list[Any], item: str, problems: list[tuple[str, str]]) -> list[Record]:
    made: list[Record] = []
    taken: set[Names] = set()
    paths: set[Any] = set()
    for index, content in enumerate(records):
        try:
            record = _record(content, in_collection=item == VARIABLES)
            if record.path in paths or not taken.isdisjoint(record.stored):
                raise MalformedError("there is another leaf with its path")
        except (MalformedError, NotCarriedError, ValueError, TypeError, RecursionError) as error:
            problems.append((f"{NOTES}, leaf {index} of {item}", str(error)))
        else:
            paths.add(record.path)
            taken.update(record.stored)
            made.append(record)
    above = {names[:depth] for names in taken for depth in range(1, len(names))}
    if not taken.isdisjoint(above):
        problems.append((f"{NOTES}, {item}", "there is a leaf above another one"))
    return made


def _record(content: Any, *, in_collection: bool) -> Record:
    if not isinstance(content, dict):
        raise MalformedError("it is no mapping")
    box = _BOX if "box" in content else set()
    _expect_keys(content, _RECORD | box, {"digests"}, "it")
    path = _json.decode(content["path"])
    if not isinstance(path, tuple) or not all(map(_is_key, path)):
        raise MalformedError("its path is none")
    if in_collection and not (path and isinstance(path[0], str)):
        raise MalformedError("its path has no collection")
    stored = _stored(content)
    _check_names(path, content["form"], list(stored))
    if not box:
        return Record(path, stored, content["form"])
    fields, left_out = content["fields"], content["left_out"]
    if not isinstance(content["box"], str) or not isinstance(fields, dict) or "value" in fields:
        raise MalformedError("its box is none")
    if not isinstance(left_out, list) or not all(isinstance(name, str) for name in left_out):
        raise MalformedError("its box is none")
    return Record(path, stored, content["form"], content["box"], fields, tuple(left_out))


def _stored(content: dict[str, Any]) -> dict[Names, Stored]:
    leaves, all_names = content["leaves"], content["names"]
    if not isinstance(leaves, list) or not isinstance(all_names, list):
        raise MalformedError("its leaves are no list")
    digests = content.get("digests", [None] * len(leaves))
    if not isinstance(digests, list) or not len(leaves) == len(all_names) == len(digests):
        raise MalformedError("it has not as many names and digests as leaves")
    stored: dict[Names, Stored] = {}
    for leaf, listed, digest in zip(leaves, all_names, digests, strict=True):
        if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
            raise MalformedError("a name is no text")
        is_digest = isinstance(digest, str) and _DIGEST.fullmatch(digest)
        if digest is not None and not is_digest:
            raise MalformedError(f"a digest is {digest!r:.40}")
        names = tuple(listed)
        if names in stored:
            raise MalformedError("two leaves have one name")
        stored[names] = _one_stored(leaf, names, digest)
    return stored


def _one_stored(leaf: Any, names: Names, digest: str | None) -> Stored:
    if not isinstance(leaf, list) or len(leaf) != 4:
        raise MalformedError("a leaf is not kind, shape, dtype and content")
    kind, shape, dtype, content = leaf
    if not isinstance(shape, list) or not all(type(n) is int and 0 <= n < 2**63 for n in shape):
        raise MalformedError(f"a shape is {shape!r:.40}")
    if not isinstance(dtype, str):
        raise MalformedError(f"a dtype is {dtype!r:.40}")
    if isinstance(kind, str) and kind in PYTHON_TYPES:
        if shape or dtype != kind:
            raise MalformedError(f"a Python {kind} has a shape or a dtype")
        _check_python(kind, content)
    elif kind not in _ARRAY_KINDS:
        raise MalformedError(f"a leaf is of the unknown kind {kind!r:.40}")
    elif kind == "key":
        _check_implementation(content)
    elif content is not None or jax.numpy.dtype(dtype).hasobject:
        raise MalformedError(f"an array of dtype {dtype:.40} has content beside its file")
    return Stored(kind, tuple(shape), dtype, content, names, digest)


def _check_python(kind: str, content: Any) -> None:
    if kind == "float":
        _json.to_float(content)
    elif type(content) is not PYTHON_TYPES[kind]:
        raise MalformedError(f"a Python {kind} is {content!r:.40}")


def _check_implementation(name: Any) -> None:
    if not isinstance(name, str) or not _is_implementation(name):
        raise MalformedError(f"there is no PRNG {name!r:.40}")


@functools.lru_cache(maxsize=64)
def _is_implementation(name: str) -> bool:
    """Whether JAX knows a PRNG of this name."""
    try:
        jax.eval_shape(lambda: jax.random.key(0, impl=name))
    except Exception:
        # An invalid name raises errors of several types.
        return False
    return True


def _check_names(path: tuple[Any, ...], form: Any, found: list[Names]) -> None:
    """Raises if the names of arrays are not those that a path has: they are read by name."""
    own = names_of(path)
    if type(form) is int and form == 0 and found == [own]:
        # Usually a value is one array.
        return
    try:
        expected = [names_of((*path, *below)) for below, _ in parts(_json.form_of(form))]
    except NotCarriedError:
        # The file does not say which containers these were.
        if not all(names[: len(path)] == own[: len(path)] for names in found):
            raise MalformedError("a name is not below its path") from None
        if not all(_NAME.fullmatch(name) for names in found for name in names):
            raise MalformedError("a name is none that this package gives") from None
        return
    if found != expected:
        raise MalformedError(f"its names are not those of its path, {expected!r:.60}")


def _is_key(key: Any) -> bool:
    return type(key) in (str, int) or (isinstance(key, tuple) and all(map(_is_key, key)))


def _expect_keys(content: dict[str, Any], needed: set[str], allowed: set[str], what: str) -> None:
    missing, unknown = needed - content.keys(), content.keys() - needed - allowed
    if missing or unknown:
        raise MalformedError(
            f"{what} lacks {sorted(missing)}, and has the unknown {sorted(unknown)}"
        )


def _digest(document: Any) -> str:
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
