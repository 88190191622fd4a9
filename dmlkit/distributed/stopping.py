"""Stopping of a run between two steps."""

import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager
from math import inf
from threading import current_thread, main_thread
from time import monotonic
from typing import Any

import torch

from dmlkit.distributed.launch import Ranks

STOPPED = 130  # the shell's exit code for Ctrl-C


class TrainingStoppedError(Exception):
    """Interruption of a run by the user, after a checkpoint was written."""


class StopRequest:
    """Signal handler that records the first signal, or `time.monotonic` past a deadline; a second one interrupts."""

    def __init__(self, deadline: float = inf) -> None:
        self.came, self.deadline = False, deadline

    def __call__(self, *_: Any) -> None:
        if self.came:
            raise KeyboardInterrupt
        self.came = True

    def is_known(self, ranks: Ranks) -> bool:
        """Return whether to stop, with the same answer on all ranks."""
        is_due = self.came or monotonic() >= self.deadline
        if ranks.world_size == 1:
            return is_due
        # all ranks must stop at the same step
        return ranks.sum(torch.tensor(float(is_due), device=ranks.device)).item() > 0


@contextmanager
def stop_signals(deadline: float = inf) -> Generator[Callable[[Ranks], bool]]:
    """Turn Ctrl-C and SIGTERM into a request that the loop checks between steps; a second signal interrupts at once.

    Nested blocks share one request, so that a signal that stops a run also stops its study.
    """
    outer = signal.getsignal(signal.SIGTERM)
    if isinstance(outer, StopRequest):
        yield outer.is_known
        return
    request = StopRequest(deadline)
    with handled_by(request, signal.SIGINT, signal.SIGTERM):
        yield request.is_known


@contextmanager
def handled_by(handler: Callable[..., Any] | signal.Handlers, *numbers: signal.Signals) -> Generator[None]:
    """Handle signals by another handler during the block; outside of the main thread Python allows none."""
    is_main = current_thread() is main_thread()
    previous = {number: signal.signal(number, handler) for number in numbers if is_main}
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)
