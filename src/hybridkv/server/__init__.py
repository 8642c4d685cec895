"""The daemon: a core that decides, and a loop that does."""
