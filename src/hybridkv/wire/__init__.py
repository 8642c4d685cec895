"""The messages between engine and daemon, and their codec."""
