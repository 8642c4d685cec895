"""The daemon, its clients, their machine and its faults in one process. A seed repeats exactly."""
