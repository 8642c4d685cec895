"""The daemon, its clients, their machine and its faults in one process, repeated exactly by a seed."""
