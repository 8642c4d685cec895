"""The engine's side of the socket: a connection that never blocks, and a way to start a daemon."""
