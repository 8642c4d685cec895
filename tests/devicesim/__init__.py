"""The copier on a simulated device: every byte is known, and nothing may wait for ever."""
