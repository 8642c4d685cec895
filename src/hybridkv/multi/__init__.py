"""MultiConnector: several connectors at once. It knows nothing of this cache."""
