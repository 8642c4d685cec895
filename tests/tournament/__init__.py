"""Policies of eviction next to each other, over traces of several kinds."""
