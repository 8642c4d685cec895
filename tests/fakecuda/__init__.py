"""CUDA without hardware: its runtime library, and what torch.cuda does with it."""
