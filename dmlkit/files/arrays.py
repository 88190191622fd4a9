"""NumPy files from anybody, read without pickle and without trusting what they say of their size."""

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy

from dmlkit.errors import UserError
from dmlkit.files.regular import refuse_what_is_no_file

Values = np.ndarray[Any, Any]
HEADER_BYTES = 10_000  # what numpy reads of a header at most
NUMBER_BYTES = 8


def read_array(path: Path) -> Values:
    """The array of an .npy file, mapped into memory: nothing is loaded before it is known to be there.

    Raises:
        UserError: there is no such file, it is no .npy file, holds objects, or less than its header says.
    """
    refuse_what_is_no_file(path)
    try:
        with np.errstate(over="ignore"):  # of the sizes that a header may promise
            return npy.open_memmap(path, mode="r")  # unlike np.load takes no other format, and no pickle
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; expected a NumPy array (.npy)") from None
    except PermissionError:
        raise
    except Exception as error:  # a damaged header is parsed as Python: SyntaxError, TokenError and more
        told = (str(error).splitlines() or [type(error).__name__])[0]
        if "mmap length" in told:
            told = "the file is shorter than its header says"
        raise UserError(f"{path}: cannot read this NumPy array: {told}; expected what numpy.save writes") from error


def read_arrays(path: Path, types: Mapping[str, type[np.float64 | np.int64]], length: int) -> dict[str, Values]:
    """The arrays of an .npz file by name: ``length`` numbers each, of the type that each name is given.

    Members are measured before they are inflated: 4 MB of zip may hold 4 GB.

    Raises:
        UserError: the file is missing or damaged, or holds something else.
    """
    refuse_what_is_no_file(path)
    try:
        with zipfile.ZipFile(path) as archive:
            sizes = {member.filename: member.file_size for member in archive.infolist()}
            if set(sizes) != {f"{name}.npy" for name in types}:
                raise ValueError(f"holds {', '.join(sizes) or 'nothing'}"[:200])
            if max(sizes.values(), default=0) > HEADER_BYTES + NUMBER_BYTES * length:
                raise ValueError(f"holds {max(sizes.values()):,} bytes for {length} numbers")
        with np.load(path, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in types}
        for name, values in arrays.items():
            if values.dtype != types[name] or values.shape != (length,):
                expected = f"{np.dtype(types[name])} ({length},)"
                raise ValueError(f"{name} is {values.dtype} {values.shape}, expected {expected}")
    except FileNotFoundError:
        raise UserError(f"{path}: missing") from None
    except PermissionError:
        raise
    except Exception as error:  # numpy, zipfile and zlib raise many kinds for damaged files
        raise UserError(f"{path}: cannot read these arrays: {error}") from error
    return arrays
