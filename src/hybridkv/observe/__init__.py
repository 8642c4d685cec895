"""The view of a daemon for people: metrics, status page, history and traces."""
