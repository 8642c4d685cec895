"""A tier in Mooncake Store, whose client runs in a process of its own."""
