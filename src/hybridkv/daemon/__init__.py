"""The daemon: handlers that decide, and a loop that acts."""
