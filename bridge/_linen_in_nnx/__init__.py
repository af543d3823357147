"""`ToNNX`, and what only it needs."""
