"""The first minutes on a machine with a CUDA device (stage 0); each check prints JSON last."""
