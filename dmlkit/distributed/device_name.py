"""Names of devices and the number of CPU cores, before torch is imported."""

import os
import re

from dmlkit.errors import UserError

DEVICE = re.compile(r"(auto|cpu|mps|cuda)(?::(\d+))?")


def parse_device(device: str) -> tuple[str, int | None]:
    """Return the kind of a device, and its number if one is requested."""
    match = DEVICE.fullmatch(device)
    if match is None or (match[2] and match[1] != "cuda"):
        raise UserError(f"--device {device}: expected auto, cpu, cuda, cuda:N or mps")
    return match[1], int(match[2]) if match[2] else None


def count_cores() -> int:
    """Return how many CPU cores this process may use, which Slurm, ``taskset`` and containers may limit."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS and Windows
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
