"""`python -m bridge parity`: whether two models do the same."""

from ._parity import add_command as add_command
