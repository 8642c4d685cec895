"""Lies to a daemon process, and to the simulated daemons: see CONTRIBUTING.md."""
