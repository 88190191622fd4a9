"""What a training costs: memory."""

import re
import sys
from pathlib import Path

import torch

try:
    import resource
except ImportError:  # Windows has none
    resource = None

LINUX = Path("/proc/self")


def forget_peak_memory(device: torch.device) -> None:
    """Count the peak from now on: of a CUDA device, or of this process on Linux; elsewhere it cannot be forgotten."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        (LINUX / "clear_refs").write_text("5")
    except OSError:  # another system, or one that forbids it
        return


def peak_memory(device: torch.device) -> int | None:
    """Bytes, see `dmlkit.run_folder.documents.Summary.peak_memory_bytes`.

    Example:
        >>> peak_memory(torch.device("cpu")) > 10_000_000  # torch alone takes more
        True
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if (LINUX / "status").exists():
        told = re.search(r"VmHWM:\s+(\d+) kB", (LINUX / "status").read_text())
        return 1024 * int(told[1]) if told else None
    if resource is None:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
