"""`python -m bridge inspect`: what is in a checkpoint."""

from ._inspect import add_command as add_command
