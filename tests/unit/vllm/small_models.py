"""A small model whose weights a seed makes, and what tests of its digest do with it."""

import torch

from hybridkv.vllm.weights_digest import DIGEST_BYTES, digest_weights


class Model(torch.nn.Module):
    """Two layers, one of them with a buffer, as a seed makes them."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = torch.nn.Linear(24, 16, dtype=dtype)
        self.second = torch.nn.Linear(16, 16, dtype=dtype)
        self.second.register_buffer("scale", torch.rand(3), persistent=False)


def digest(model: torch.nn.Module) -> str:
    found = digest_weights({"model": model})
    assert not found.unread
    assert len(found.digest) == 2 * DIGEST_BYTES
    return found.digest


def flip(tensor: torch.Tensor, at: int = 5, bit: int = 0) -> None:
    tensor.data.view(-1).view(torch.uint8)[at] ^= 1 << bit
