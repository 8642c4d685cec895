"""What a machine with a CUDA device proves: bytes, bandwidth and the real engine."""
