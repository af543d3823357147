"""The settings of a run."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Config:
    """What a model and its training are made from.

    Attributes:
        features: the width of the residual stream.
        hidden: the width inside an MLP.
        layers: the number of blocks.
        classes: the number of digits.
        dropout: the dropout rate, in [0, 1).
        learning_rate: of Adam, after a warm-up from zero.
        seed: of initial values and dropout.
    """

    features: int = 16
    hidden: int = 32
    layers: int = 2
    classes: int = 10
    dropout: float = 0.1
    learning_rate: float = 0.01
    seed: int = 0
