"""Copies between the engine's blocks and slots of the arena, on the CPU and through CUDA."""
