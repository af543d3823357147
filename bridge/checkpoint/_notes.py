"""The JSON beside a checkpoint's arrays, written and read.

A file is not trusted: what `write` does not write is refused.
"""

from __future__ import annotations

import contextlib
import dataclasses
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
from ._stored import PYTHON_TYPES, Names, Record, Stored, names_of

FORMAT_VERSION = 1
_ARRAY_KINDS = ("jax", "numpy", "generic")
_NAME = re.compile(r"[A-Za-z0-9_~%(),-]+")
_DIGEST = re.compile(r"[0-9a-f]{16}")


@dataclasses.dataclass(frozen=True)
class Notes:
    """What the JSON of a checkpoint says.

    The model was saved from the side `written_by`. `items` has the records of each tree.
    `is_intact` says whether its own digest is right, None if it has none.
    """

    written_by: str
    items: Mapping[str, Sequence[Record]]
    is_intact: bool | None


def write(
    written_by: str, items: Mapping[str, Sequence[Record]], digests: Mapping[Names, str] | None
) -> dict[str, Any]:
    """The JSON for a checkpoint; the inverse of `read`.

    `written_by` is the side that the model is saved from. `digests` are those of arrays by the name
    of the tree and their own; None for none at all.
    """
    made = {}
    for item, records in items.items():
        made[item] = []
        for record in records:
            leaf = {
                "path": _json.encode(record.path),
                "form": record.form,
                "leaves": [[s.kind, s.shape, s.dtype, s.content] for s in record.stored.values()],
                "names": list(record.stored),
            }
            own = [(digests or {}).get((item, *names)) for names in record.stored]
            if any(own):
                leaf["digests"] = own
            if record.box is not None:
                leaf |= {"box": record.box, "fields": record.fields, "left_out": record.left_out}
            made[item].append(leaf)
    document = {"version": FORMAT_VERSION, "written_by": written_by, "items": made}
    return document if digests is None else {**document, "digest": _digest(document)}


def read(path: Any) -> Notes:
    """The JSON of the checkpoint at a path.

    Raises CheckpointError if it is newer than this package, and some other error if it is not what
    this package writes.
    """
    content = json.loads((path / NOTES / NOTES_FILE).read_bytes())
    version = content["version"]
    if type(version) is int and version > FORMAT_VERSION:
        raise CheckpointError(
            f"format version {version} is newer than this package's {FORMAT_VERSION}:",
            path,
            "Upgrade the package.",
        )
    noted = content.pop("digest", None)
    found = _digest(content)
    items = {
        item: [_record(leaf, item) for leaf in leaves] for item, leaves in content["items"].items()
    }
    notes = Notes(content["written_by"], items, None if noted is None else noted == found)
    _check(notes, found)
    return notes


def _record(leaf: Mapping[str, Any], item: str) -> Record:
    names = [tuple(each) for each in leaf["names"]]
    digests = leaf.get("digests", [None] * len(names))
    stored = {
        own: Stored(kind, tuple(shape), dtype, content, own, digest, item)
        for own, (kind, shape, dtype, content), digest in zip(
            names, leaf["leaves"], digests, strict=True
        )
    }
    box, fields, left_out = leaf.get("box"), leaf.get("fields", {}), leaf.get("left_out", ())
    return Record(_json.decode(leaf["path"]), stored, leaf["form"], box, fields, tuple(left_out))


def _check(notes: Notes, digest: str) -> None:
    """Raises MalformedError for notes that no checkpoint of this package has.

    Written again they must have the digest of what was read: nothing is unknown, missing or twice.
    """
    if notes.written_by not in ("linen", "nnx"):
        raise MalformedError("the side that it was saved from is not valid")
    digests: dict[Names, str] = {}
    for item, records in notes.items.items():
        # Each is the name of a directory in the checkpoint's.
        if item == NOTES or not item.isidentifier():
            raise MalformedError(f"a tree cannot be called {item!r:.40}")
        if len({record.path for record in records}) < len(records):
            raise MalformedError(f"two leaves of {item} have one path")
        for record in records:
            _check_record(record, item)
            digests |= {(item, *n): s.digest for n, s in record.stored.items() if s.digest}
    if write(notes.written_by, notes.items, digests)["digest"] != digest:
        raise MalformedError("it has other entries than this package writes")


def _check_record(record: Record, item: str) -> None:
    own = names_of(record.path)
    is_path = isinstance(record.path, tuple)
    if not is_path or (item == VARIABLES and not isinstance(record.path[0], str)):
        raise MalformedError(f"{record.path!r:.40} where a path is expected")
    # Arrays are read by name, and orbax would follow some of them out of the checkpoint.
    if not all(n[: len(own)] == own and all(map(_NAME.fullmatch, n)) for n in record.stored):
        raise MalformedError("a name is not below its path, or is not one that this package gives")
    if not all(map(_is_valid, record.stored.values())):
        raise MalformedError(f"an array of {'/'.join(own):.40} has another form than it says")
    with contextlib.suppress(NotCarriedError):
        _json.decode_form(record.form, [0] * len(record.stored))
    if not isinstance(record.box, str | None) or "value" in record.fields:
        raise MalformedError(f"the box of {'/'.join(own):.40} is not valid")


def _is_valid(stored: Stored) -> bool:
    """Whether kind, shape, dtype, content and digest are of the types that go together."""
    kind, content = stored.kind, stored.content
    if not all(type(size) is int and 0 <= size < 2**63 for size in stored.shape):
        return False
    if stored.digest is not None and not _DIGEST.fullmatch(stored.digest):
        return False
    if kind in PYTHON_TYPES:
        expected = str if kind == "float" else PYTHON_TYPES[kind]
        return not stored.shape and stored.dtype == kind and type(content) is expected
    if kind == "key":
        return isinstance(stored.dtype, str) and isinstance(content, str)
    return kind in _ARRAY_KINDS and content is None and not jax.numpy.dtype(stored.dtype).hasobject


def _digest(document: Any) -> str:
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
