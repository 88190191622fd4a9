"""Computing in full precision inside mixed-precision training."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def without_autocast(like: Tensor) -> AbstractContextManager[object]:
    """A context without autocast for what is on the device of a tensor.

    Where autocast is off it is nothing, which takes 1.5 us in place of the 4.8 of torch's own, and in a step of a loss
    20, when little of it is in the cache.

    Example:
        >>> with torch.autocast("cpu", dtype=torch.bfloat16), without_autocast(torch.empty(0)):
        ...     (torch.ones(1, 1) @ torch.ones(1, 1)).dtype
        torch.float32
    """
    device = like.device.type
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()
