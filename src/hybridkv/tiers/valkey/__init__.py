"""A tier in a Valkey or Redis server."""
