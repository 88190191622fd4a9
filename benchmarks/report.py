"""The table that every benchmark prints and keeps in benchmarks/results, and the memory that a call takes."""

import os
import platform
import sys
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path

import torch


def write_report(name: str, about: str | None, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a Markdown table with where it was measured, and write it to ``benchmarks/results/NAME.md``."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    command = " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])
    where = (
        f"{device}, {os.cpu_count()} CPU cores, {torch.get_num_threads()} threads, torch {torch.__version__}, "
        f"Python {platform.python_version()}, {date.today()}; `python benchmarks/{command}`"
    )
    lines = [f"| {' | '.join(row)} |" for row in [header, ["---"] * len(header), *rows]]
    text = f"{(about or '').strip()}\n\nMeasured on {where}\n\n" + "\n".join(lines) + "\n"
    print(text)
    (Path(__file__).parent / "results" / f"{name}.md").write_text(text, encoding="utf-8")


def memory_rise(run: Callable[[], object], device: str = "cpu") -> float:
    """Return how many megabytes the memory of the process (Linux), or of the GPU, rises at most while a call runs."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # resets the peak
    before = resident_megabytes("VmRSS")
    run()
    return resident_megabytes("VmHWM") - before


def resident_megabytes(key: str) -> float:
    """Return the resident memory of the process (Linux): ``VmRSS`` is that of now, ``VmHWM`` the peak."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) / 1024
