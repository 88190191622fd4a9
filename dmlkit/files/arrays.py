"""Reading of untrusted NumPy files, without pickle and without trusting the sizes in their headers."""

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy

from dmlkit.errors import UserError, first_line
from dmlkit.files.regular import reading, require_regular_file, what_instead

Values = np.ndarray[Any, Any]
HEADER_BYTES = 10_000  # the longest header that NumPy reads
NUMBER_BYTES = 8


def read_array(path: Path) -> Values:
    """Map the array of an .npy file into memory, after checking that the file is as long as its header says."""
    require_regular_file(path)
    try:
        with np.errstate(over="ignore"):  # the sizes in a damaged header may overflow
            return npy.open_memmap(path, mode="r")  # unlike np.load it reads no other format and no pickle
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; expected a NumPy array (.npy)") from None
    except PermissionError:
        raise
    except Exception as error:  # a damaged header is parsed as Python: SyntaxError, TokenError and more
        reason = what_instead(path, first_line(error))
        if "mmap length" in reason:
            reason = "the file is shorter than its header says"
        if "Python objects" in reason:
            raise UserError(
                f"{path}: holds Python objects, which are never read; save text with "
                "numpy.save(FILE, labels.astype(str))"
            ) from error
        raise UserError(
            f"{path}: cannot read this NumPy array: {reason}; expected a file that numpy.save wrote"
        ) from error


def read_arrays(path: Path, types: Mapping[str, type[np.float64 | np.int64]], length: int) -> dict[str, Values]:
    """Read the arrays of an .npz file.

    Sizes are checked before decompression: 4 MB of zip may hold 4 GB.
    """
    with reading(path, "these arrays", Exception, missing="missing"):  # NumPy, zipfile and zlib raise many kinds
        with zipfile.ZipFile(path) as archive:
            sizes = {member.filename: member.file_size for member in archive.infolist()}
            if set(sizes) != {f"{name}.npy" for name in types}:
                raise ValueError(f"it has {', '.join(sizes) or 'no arrays'}"[:200])
            if max(sizes.values(), default=0) > HEADER_BYTES + NUMBER_BYTES * length:
                raise ValueError(f"an array has {max(sizes.values()):,} bytes for {length} numbers")
        with np.load(path, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in types}
        for name, values in arrays.items():
            if values.dtype != types[name] or values.shape != (length,):
                expected = f"{np.dtype(types[name])} ({length},)"
                raise ValueError(f"{name} is {values.dtype} {values.shape}, expected {expected}")
        return arrays
