"""`python -m bridge diff`: how two checkpoints differ."""

from ._diff import add_command as add_command
