"""A trainer's code in a worker: it writes the weights, and a sleep unmaps them, as on a GPU."""

import ctypes
import mmap
from typing import Any

import torch
from vllm.v1.worker.cpu_worker import CPUWorker


class Trainer:
    """A worker extension that changes the weights by code of its own."""

    def multiply(self: Any, factor: float) -> None:
        """Multiply the weights of norms, as an update would write others."""
        with torch.no_grad():
            for name, parameter in self.model_runner.model.named_parameters():
                if "norm" in name:
                    parameter.mul_(factor)


def sleep(self: Any, level: int = 1) -> None:
    """Unmap the weights: a reader of them ends the process. vLLM's CPU workers do nothing."""
    parameters = self.model_runner.model.parameters()
    dense = [
        parameter for parameter in parameters if parameter.numel() and parameter.is_contiguous()
    ]
    self.mapped = [_moved(parameter) for parameter in dense]
    _protect(self.mapped, 0)


def wake_up(self: Any, tags: list[str] | None = None) -> None:
    """Map the weights again."""
    _protect(self.mapped, mmap.PROT_READ | mmap.PROT_WRITE)


CPUWorker.sleep, CPUWorker.wake_up = sleep, wake_up


def _moved(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Move a parameter to pages of its own. Returns the bytes of these pages."""
    memory = mmap.mmap(-1, -(-parameter.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    content = whole[: parameter.nbytes].view(parameter.dtype).view(parameter.shape)
    parameter.data = content.copy_(parameter.data)
    return whole


def _protect(mapped: list[torch.Tensor], flags: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    for whole in mapped:
        address = ctypes.c_void_p(whole.data_ptr())
        assert libc.mprotect(address, ctypes.c_size_t(whole.nbytes), flags) == 0
