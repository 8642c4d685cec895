"""The daemon, its clients, their machine and its faults in one process; a seed repeats exactly."""
