"""What people are shown of a daemon: metrics, status page, history and traces."""
