"""`python -m bridge convert`: from one layout of checkpoints to the other."""

from ._convert import add_command as add_command
