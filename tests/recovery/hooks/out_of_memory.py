"""Run in each rank before it trains: a GPU that holds four rows at once, on a machine without one."""

import torch

from soup_flows.training.trainer import SoupTrainer

real = SoupTrainer.token_loss
MESSAGE = (
    "CUDA out of memory. Tried to allocate 96.00 MiB. GPU 0 has a total capacity of 512.00 MiB of which 64.00 MiB "
    "is free. Including non-PyTorch memory, this process has 448.00 MiB memory in use. Of the allocated memory "
    "160.00 MiB is allocated by PyTorch, and 32.00 MiB is reserved by PyTorch but unallocated."
)


def token_loss(self, model, inputs):
    if len(inputs["row_borders"]) - 1 > 4:
        raise torch.OutOfMemoryError(MESSAGE)
    return real(self, model, inputs)


SoupTrainer.token_loss = token_loss
