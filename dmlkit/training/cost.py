"""What a training costs: memory."""

import sys

import torch

try:
    import resource
except ImportError:  # Windows has none
    resource = None


def forget_peak_memory(device: torch.device) -> None:
    """Count a CUDA device's peak from now on; that of a process cannot be forgotten."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> int | None:
    """Bytes, see `dmlkit.run_folder.documents.Summary.peak_memory_bytes`.

    Example:
        >>> peak_memory(torch.device("cpu")) > 10_000_000  # torch alone takes more
        True
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if resource is None:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
