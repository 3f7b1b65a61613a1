"""Small programs that show how to use the library: ``demo``, ``int4_dot``; ``ggml`` is what demo compares with."""
