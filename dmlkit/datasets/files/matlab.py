"""Reading MATLAB files in a process of their own: one damaged byte is enough to end SciPy's reader, and it with it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from dmlkit.files.regular import check_regular

CHILD = Path(__file__).with_name("matlab_child.py")
SECONDS = 120  # the published files take one


def read_mat(path: Path, needed: tuple[str, ...], faults: list[str]) -> dict[str, Any]:
    """Some variables of a MATLAB file as plain data; empty, with a fault, if it cannot be read or lacks one.

    Returns:
        A list for an array; for a structure array a dictionary of lists, one a field.
    """
    try:
        check_regular(path)
        # isolated from the folder of the script, whose modules have names of the standard library's
        command = [sys.executable, "-P", str(CHILD), str(path.absolute()), *needed]
        child = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except FileNotFoundError:
        faults.append(f"{path}: missing; get it where the archive came from")
        return {}
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = f"not read after {SECONDS} seconds" if isinstance(error, subprocess.TimeoutExpired) else str(error)
        faults.append(f"{path}: cannot read this MATLAB file: {reason}; download it again")
        return {}
    if child.returncode != 0:
        faults.append(f"{path}: cannot read this MATLAB file: {_reason(child)}; download it again")
        return {}
    contents: dict[str, Any] = json.loads(child.stdout)
    absent = [name for name in needed if name not in contents]
    if absent:
        faults.append(f"{path}: holds no {' and '.join(absent)}; expected the annotations of Cars196")
        return {}
    return contents


def _reason(child: subprocess.CompletedProcess[str]) -> str:
    if child.returncode < 0:
        return f"it is damaged and ends its reader (signal {-child.returncode})"
    return (child.stderr.strip().splitlines() or ["no reason was given"])[-1]
