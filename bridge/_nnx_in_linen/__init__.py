"""`ToLinen` and `to_linen_class`, and what only they need."""
