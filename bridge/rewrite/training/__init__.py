"""The functions that train a model: rewritten for the NNX classes, and proven by running them."""
