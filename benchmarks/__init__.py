"""What only developers measure. It is not part of the wheel."""
