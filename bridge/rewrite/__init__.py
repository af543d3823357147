"""Linen sources become NNX sources, and are proven to do the same."""

from ._rewriter import Rewriter as Rewriter
