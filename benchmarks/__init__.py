"""Measures the cost of crossing the boundary beside native Flax and `flax.nnx.bridge`, in one run.

``python -m benchmarks`` measures every row of `rows.ROWS`, prints the ratios, and writes them as
JSON and as a picture. See the README beside this file.
"""
