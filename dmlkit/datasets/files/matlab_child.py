"""The process that `dmlkit.datasets.files.matlab` starts: it reads a MATLAB file and prints its variables as JSON.

Started by its path, so that it imports SciPy and nothing of dmlkit: half a second instead of three.
"""

import json
import sys
from typing import Any

import numpy as np
from scipy.io import loadmat


def plain(value: Any) -> Any:
    """A variable as plain data: a structure array as a dictionary of lists, any other array as a list."""
    array = np.atleast_1d(value)
    if array.dtype.names is None:
        return [plain_cell(cell) for cell in array.ravel().tolist()]
    return {name: plain(array[name]) for name in array.dtype.names}


def plain_cell(cell: Any) -> Any:
    """A cell of an array: a text or a number as it is, anything else in words, which are not what is expected."""
    cell = cell.item() if isinstance(cell, np.generic) else cell
    return cell if isinstance(cell, str | int | float) else f"<{type(cell).__name__}>"


if __name__ == "__main__":
    try:
        found = loadmat(sys.argv[1], squeeze_me=True, variable_names=sys.argv[2:])
        json.dump({name: plain(found[name]) for name in sys.argv[2:] if name in found}, sys.stdout)
    except Exception as error:  # SciPy raises many kinds for damaged files
        sys.exit(f"{type(error).__name__}: {error}")
