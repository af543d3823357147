"""`bridge.Module`: an NNX module whose class is written as a Linen class."""
