"""Shared memory: the layout of a slot and the mapping of the arena."""
