"""hybridkv: a KV cache outside the LLM engine that is right for hybrid models.

A cache may lose anything; it may never lie, and it may never stall.
"""

__version__ = "0.1.0"
