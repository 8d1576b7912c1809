"""kvtier keeps the KV cache of large language models outside the GPU and brings it back.

Start reading at `docs/design.md`; the rooms of this package are listed there in the order in which
they may import one another.
"""

__version__ = "0.1.0"
