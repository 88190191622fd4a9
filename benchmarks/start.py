"""Startup time of commands, each in its own process, compared with `import torch` alone.

The commands and the import run in turn; values are medians over rounds, without the first round, which reads from disk.

Run: python benchmarks/start.py
"""

import statistics
import subprocess
import sys
import time

from report import write_report

ROUNDS = 7
TORCH = "import torch"
COMMANDS = {
    "--help": ["--help"],
    "list": ["list"],
    "list losses": ["list", "losses"],
    "schema": ["schema"],
    "train --help": ["train", "--help"],
    "check glyphs/proxy_anchor": ["check", "glyphs/proxy_anchor"],
}


def seconds(words: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, *words], capture_output=True, check=True)
    return time.perf_counter() - started


def main() -> None:
    calls = {"python -c pass": ["-c", "pass"], f"python -c '{TORCH}'": ["-c", TORCH]}
    calls |= {f"dmlkit {name}": ["-m", "dmlkit", *words] for name, words in COMMANDS.items()}
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS + 1):
        for name, words in calls.items():
            found[name].append(seconds(words))
    rows = [[name, f"{statistics.median(times[1:]):.2f}", f"{min(times[1:]):.2f}"] for name, times in found.items()]
    write_report("start", __doc__, ["process", "seconds, median", "seconds, minimum"], rows)


if __name__ == "__main__":
    main()
