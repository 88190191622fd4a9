"""Reader of MATLAB files, in a separate process because a single damaged byte can crash SciPy's reader.

Of 3 000 copies of the annotations in `tests/datasets/trees.py`, each with one changed byte, 100 ended the process of
SciPy 1.17.1 with a segmentation fault, which no ``try`` catches. That process runs this file as a script, so that it
imports SciPy but not dmlkit, which takes half a second instead of three.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

SCRIPT = Path(__file__)
SECONDS = 120  # the published files take one


def read_mat(path: Path, needed: tuple[str, ...], faults: list[str]) -> dict[str, Any]:
    """Read variables of a MATLAB file as plain data.

    Returns:
        By name, a list for an array and a dictionary of one list per field for a structure array. It is empty, and a
        line is added to ``faults``, if the file cannot be read or lacks a variable.
    """
    from dmlkit.files.regular import check_regular  # not in the script

    try:
        check_regular(path)
        # -P excludes the script's folder, whose modules have names of the standard library
        command = [sys.executable, "-P", str(SCRIPT), str(path.absolute()), *needed]
        child = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except FileNotFoundError:
        faults.append(f"{path}: no such file; download it from the site of the archive")
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
        faults.append(f"{path} has no {' and '.join(absent)}; expected the annotations of Cars196")
        return {}
    return contents


def _reason(child: subprocess.CompletedProcess[str]) -> str:
    if child.returncode < 0:
        return f"the file is damaged and crashed the reader (signal {-child.returncode})"
    return (child.stderr.strip().splitlines() or ["no reason was given"])[-1]


def _plain(value: Any) -> Any:
    """Convert a variable to plain data: a structure array to a dictionary of lists, any other array to a list."""
    array = np.atleast_1d(value)
    if array.dtype.names is None:
        return [_plain_cell(cell) for cell in array.ravel().tolist()]
    return {name: _plain(array[name]) for name in array.dtype.names}


def _plain_cell(cell: Any) -> Any:
    """Convert a cell of an array: text and numbers are kept, anything else becomes its type's name in <>."""
    cell = cell.item() if isinstance(cell, np.generic) else cell
    return cell if isinstance(cell, str | int | float) else f"<{type(cell).__name__}>"


if __name__ == "__main__":
    from scipy.io import loadmat

    try:
        found = loadmat(sys.argv[1], squeeze_me=True, variable_names=sys.argv[2:])
        json.dump({name: _plain(found[name]) for name in sys.argv[2:] if name in found}, sys.stdout)
    except Exception as error:  # SciPy raises many kinds for damaged files
        sys.exit(f"{type(error).__name__}: {error}")
