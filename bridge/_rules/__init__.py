"""The language of rules: which Linen path is which NNX path, and how values move between them.

`port`, `parity`, `checkpoint`, the command line and `rewrite` read rules here. The rest of the
package knows nothing of them.
"""
