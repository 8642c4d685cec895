"""A tier in a directory that daemons of several nodes may share."""
