r"""Rules for the ways in which Linen and NNX keep the layers of one stack, by name."""

from __future__ import annotations

import re


def numbered_layers(linen: str, nnx: str) -> dict[str, str]:
    r"""The rule for layers that both sides have one by one: `layers_3` is `layers[3]`.

    Args:
      linen: the Linen path up to the number and its `_`, with `/`; plain text, no expression.
      nnx: the NNX path of the list, with dots; an `nnx.Dict` whose keys are numbers is one too.

    Returns:
      A table for `port.plan`, `parity.check` and `checkpoint.restore`; tables are joined by `|`.

    Example::

      >>> from bridge import port
      >>> port.numbered_layers('encoder/layers', 'encoder.layers')
      {'encoder/layers_(\\d+)': 'encoder.layers.\\1'}
    """
    return {rf"{re.escape(linen)}_(\d+)": rf"{nnx}.\1"}


def layers_scanned_in_linen(linen: str, nnx: str, axis: int = 0) -> dict[str, str]:
    """The rule for layers that Linen's `nn.scan` has stacked, and NNX has in a list.

    Args:
      linen: the Linen path of the scanned module, with `/`.
      nnx: the NNX path of the list, with dots.
      axis: the axis of the layers, as in `variable_axes={'params': axis}`; one for all collections.

    Returns:
      A table, as `numbered_layers` returns it. Read backwards it stacks the layers of the list.

    Example::

      >>> from bridge import port
      >>> port.layers_scanned_in_linen('layers', 'blocks', axis=1)
      {'layers': 'blocks.*@1'}
    """
    return {re.escape(linen): f"{nnx}.*{_on(axis)}"}


def layers_scanned_in_nnx(linen: str, nnx: str, axis: int = 0) -> dict[str, str]:
    r"""The rule for layers that Linen has one by one, and NNX has stacked by `nnx.vmap`.

    Args:
      linen: the Linen path up to the number and its `_`, with `/`.
      nnx: the NNX path of the module whose leaves are stacked, with dots.
      axis: the axis of the layers, as in `nnx.StateAxes({...: axis})`.

    Returns:
      A table, as `numbered_layers` returns it. Read backwards it takes the layers apart.

    Example::

      >>> from bridge import port
      >>> port.layers_scanned_in_nnx('layers', 'blocks')
      {'layers_(\\d+)': 'blocks[\\1]'}
    """
    return {rf"{re.escape(linen)}_(\d+)": rf"{nnx}[\1{_on(axis)}]"}


def _on(axis: int) -> str:
    return f"@{axis}" if axis else ""
