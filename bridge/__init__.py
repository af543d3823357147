from ._to_nnx import ToNNX as ToNNX
from ._lazy_init import lazy_init as lazy_init
from ._meta import NNXMeta, with_partitioning
from ._conversion import linen_to_nnx, nnx_to_linen
from ._to_linen import ToLinen, to_linen
