"""The daemon's side of the bytes: free space, slots, index, eviction."""
