"""Names the collections that have a role of their own, and those that hold state."""

# Linen's own collections. Those in OUTPUTS come from a call and are not state of the model.
PARAMS = "params"
OUTPUTS = frozenset({"intermediates", "perturbations"})

# The collection that holds GraphDefs, and the name that a ToLinen gives to its own.
STATIC = "nnx"
GRAPHDEF = "graphdef"
# The collection of an NNX module's arrays that are in no Variable: their type says nothing, as it
# changes under tracing. In it a Variable is one of the user's.
ARRAYS = "nnx_arrays"


def holds_state(collection: str) -> bool:
    """Whether training updates a collection from call to call."""
    return collection != PARAMS and collection not in OUTPUTS
