"""NNX modules as functions: `functional` and `jit_partial`."""
