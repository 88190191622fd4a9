"""Stopping a run at a step where nothing is half done."""

import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from lightning_fabric import Fabric


class TrainingStoppedError(Exception):
    """The user stopped the run; a checkpoint was written."""


@contextmanager
def stop_signals() -> Generator[Callable[[Fabric], bool]]:
    """Turn Ctrl-C and SIGTERM into a request that the loop looks at between steps; a second one stops at once."""
    requested = False

    def request(*_: Any) -> None:
        nonlocal requested
        if requested:
            raise KeyboardInterrupt
        requested = True

    def is_requested(fabric: Fabric) -> bool:
        if fabric.world_size == 1:
            return requested
        # all ranks must stop at the same step
        anyone: Any = fabric.all_reduce(torch.tensor(float(requested), device=fabric.device), reduce_op="sum")
        return bool(anyone.item() > 0)

    previous = {number: signal.signal(number, request) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield is_requested
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
