"""Checkpoints that either side can read, with orbax.

`save` takes Linen variables, an NNX module of any mixture, or a State, and writes the same
checkpoint for all of them. `restore` reads it into any of them, on any mesh. It also reads the
checkpoints of orbax and `flax.serialization`. `verify` compares a checkpoint with its digests. A
GraphDef is never stored, and nothing is pickled.
"""

from bridge._errors import CheckpointError as CheckpointError
from bridge._errors import CheckpointNotFoundError as CheckpointNotFoundError
from bridge._rules.rules import RulesError as RulesError

from ._layout import Layout as Layout
from ._layout import LeafLayout as LeafLayout
from ._layout import layout as layout
from ._restore import restore as restore
from ._save import save as save
from ._save import save_args as save_args
from ._verify import verify as verify

__all__ = [
    "CheckpointError",
    "CheckpointNotFoundError",
    "Layout",
    "LeafLayout",
    "RulesError",
    "layout",
    "restore",
    "save",
    "save_args",
    "verify",
]
