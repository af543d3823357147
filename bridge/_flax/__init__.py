"""All that the package uses of Flax and JAX without a public name, a file for each part of Flax.

Each use says what was tried instead. Everything else in the package stands on public names.
"""
