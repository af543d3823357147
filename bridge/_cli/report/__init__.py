"""`python -m bridge report`: how far a migration has come."""

from ._report import add_command as add_command
