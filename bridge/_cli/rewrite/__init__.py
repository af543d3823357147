"""`python -m bridge rewrite`: Linen sources become NNX sources, and are proven the same."""

from ._rewrite import add_command as add_command
