"""The table of layers: one row says how a layer of Linen and one of NNX are the same.

`flax_layers` has the rows of Flax's own layers, `table` finds rows and takes those of users. The
tools `port`, `parity` and `rewrite` and the command `report` keep no list of their own.
"""
