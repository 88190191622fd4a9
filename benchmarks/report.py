"""The table that every benchmark prints and keeps in benchmarks/results."""

import os
import platform
import sys
from collections.abc import Sequence
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
