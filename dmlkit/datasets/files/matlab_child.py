"""Script that reads a MATLAB file and prints its variables as JSON; `dmlkit.datasets.files.matlab` starts it.

It is started by its path, so that it imports SciPy but not dmlkit, which takes half a second instead of three.
"""

import json
import sys
from typing import Any

import numpy as np
from scipy.io import loadmat


def plain(value: Any) -> Any:
    """Convert a variable to plain data: a structure array to a dictionary of lists, any other array to a list."""
    array = np.atleast_1d(value)
    if array.dtype.names is None:
        return [plain_cell(cell) for cell in array.ravel().tolist()]
    return {name: plain(array[name]) for name in array.dtype.names}


def plain_cell(cell: Any) -> Any:
    """Convert a cell of an array: text and numbers are kept, anything else becomes its type's name in <>."""
    cell = cell.item() if isinstance(cell, np.generic) else cell
    return cell if isinstance(cell, str | int | float) else f"<{type(cell).__name__}>"


if __name__ == "__main__":
    try:
        found = loadmat(sys.argv[1], squeeze_me=True, variable_names=sys.argv[2:])
        json.dump({name: plain(found[name]) for name in sys.argv[2:] if name in found}, sys.stdout)
    except Exception as error:  # SciPy raises many kinds for damaged files
        sys.exit(f"{type(error).__name__}: {error}")
