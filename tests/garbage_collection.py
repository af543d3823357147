"""Full collections in a process that holds what thousands of tests made."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def earlier_objects_left_out() -> Iterator[None]:
    """Collections inside of the block look at the objects that were made in it.

    One over all that earlier tests left in JAX's caches takes a second. What was garbage before
    stays where it is until the block ends.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
