"""Errors for mistakes that a user can fix: printed as one line, without a traceback, with exit code 2; and warnings."""

import logging
import re
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path


class UserError(Exception):
    """Error in the user's recipe, files or arguments.

    The message says what is wrong (file, line, key, the value found), what was expected and what to do.

    Example:
        >>> raise UserError("data/birds: no images found; expected one folder per class")
        Traceback (most recent call last):
        ...
        dmlkit.errors.UserError: data/birds: no images found; expected one folder per class
    """


class OptionError(UserError):
    """Error in the value of a recipe's key, raised by components, which do not know the recipe's file.

    `dmlkit.recipe.schema.Recipe.errors_at` adds file and line.

    Args:
        key: full key of the recipe, such as ``sampler.batch_size``.
        message: the value found, what was expected and what to do.

    Example:
        >>> raise OptionError("sampler.batch_size", "got 64, expected at most the 40 training images; reduce it")
        Traceback (most recent call last):
        ...
        dmlkit.errors.OptionError: sampler.batch_size: got 64, expected at most the 40 training images; reduce it
    """

    def __init__(self, key: str, message: str) -> None:
        super().__init__(key, message)  # both, so that it can be pickled
        self.key, self.message = key, message

    def __str__(self) -> str:
        """Return the key and the message."""
        return f"{self.key}: {self.message}"


FULL = "/dev/shm is full, through which readers send images; enlarge it, e.g. by docker run --shm-size 2g"
LIMITS = {
    "can't start new thread": "no thread can be started; raise the limits that ulimit -v and ulimit -u print",
    "allocate shared memory": FULL,
    "workers are out of shared memory": FULL,
    "unable to resize file </torch": "ulimit -f limits the shared memory too, through which readers send images; "
    "raise it",
    "Storage size calculation overflowed": "a tensor has more bytes than 64 bits count",
}
"""Meaning of texts of a RuntimeError."""


def out_of_memory(error: BaseException) -> str:
    """Return how the memory of the machine or of a GPU ran out; an empty text for other errors.

    PyTorch raises a RuntimeError, whose text is long.

    Example:
        >>> out_of_memory(RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB. Including non-PyTorch memory"))
        'CUDA out of memory. Tried to allocate 2.00 GiB'
        >>> out_of_memory(ImportError("libtorch.so: failed to map segment from shared object"))
        'a library does not fit into it; use a machine with more, or raise the limit that ulimit -v prints'
        >>> out_of_memory(RuntimeError("expected a tensor"))
        ''
    """
    text = " ".join(str(error).split())
    if (isinstance(error, ImportError) and "failed to map segment" in text) or _is_lost(error):
        return "a library does not fit into it; use a machine with more, or raise the limit that ulimit -v prints"
    known = next((meaning for words, meaning in LIMITS.items() if words in text), None)
    if isinstance(error, RuntimeError) and known is not None:
        return known
    if isinstance(error, RuntimeError) and ("out of memory" in text or "can't allocate memory" in text):
        text = text.partition("DefaultCPUAllocator: ")[2] or text
        return text.partition(" Including ")[0].partition(" Error code ")[0].rstrip(".")
    return (text or "the machine's memory ran out") if isinstance(error, MemoryError) else ""


def killed_reader(error: BaseException) -> str:
    """Return that a process of torch's loader was killed; an empty text for other errors.

    Example:
        >>> killed_reader(RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. "))
        'a process that reads images was killed, as the system does when memory runs out'
        >>> killed_reader(RuntimeError("expected a tensor"))
        ''
    """
    text = str(error)
    was_killed = "DataLoader worker" in text and ("killed by signal" in text or "exited unexpectedly" in text)
    message = "a process that reads images was killed, as the system does when memory runs out"
    return message if was_killed and isinstance(error, RuntimeError) else ""


def _is_lost(error: BaseException) -> bool:
    """Return whether an import lost a MemoryError: Python and torchvision do where the process's memory is limited."""
    text = str(error)
    is_python = isinstance(error, SystemError) and "exception" in text
    is_torchvision = isinstance(error, RuntimeError) and "operator torchvision::" in text
    if sys.platform == "win32" or not (is_python or is_torchvision):
        return False
    try:
        from resource import RLIM_INFINITY, RLIMIT_AS, getrlimit
    except ImportError:  # this library does not fit either
        return True
    return getrlimit(RLIMIT_AS)[0] != RLIM_INFINITY


@contextmanager
def option_errors(key: str) -> Generator[None]:
    """Convert user errors of the block, such as those of reading a file, into errors of the key that names the file."""
    try:
        yield
    except OptionError:
        raise
    except UserError as error:
        raise OptionError(key, str(error)) from error


def reason_of(error: UserError | OSError) -> str:
    """Return the message of an error that the input or the machine caused; that of the system names its files.

    Example:
        >>> reason_of(FileNotFoundError(2, "No such file or directory", "a.csv"))
        'a.csv: No such file or directory'
    """
    names = (error.filename, error.filename2) if isinstance(error, OSError) else ()
    places = " -> ".join(str(name) for name in names if name is not None)
    return f"{places}: {error.strerror}" if places and isinstance(error, OSError) and error.strerror else str(error)


def warn(text: str) -> None:
    """Warn of something that the user should know and that ends nothing, e.g. of what costs time."""
    logging.getLogger("dmlkit").warning(text)


@cache
def warn_once(text: str) -> None:
    """Warn of something that several steps of a command notice, the first time alone."""
    warn(text)


def require_list(name: str, values: object) -> None:
    """Raise a `UserError` for one text or path where several are expected: its letters would be taken for them.

    A mapping is refused too, since its values would be ignored.

    Example:
        >>> require_list("labels", "10")
        Traceback (most recent call last):
        ...
        dmlkit.errors.UserError: labels: got '10', expected a list: labels=['10']
    """
    if isinstance(values, str | Path):
        raise UserError(f"{name}: got {str(values)!r}, expected a list: {name}=[{str(values)!r}]")
    if isinstance(values, Mapping):
        raise UserError(f"{name}: got a mapping, expected a list of texts")


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, for a message of our own; of an empty one the name of its type.

    Example:
        >>> first_line(ValueError("bad header\\n  at byte 4")), first_line(KeyboardInterrupt())
        ('bad header', 'KeyboardInterrupt')
    """
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def counted(number: int, singular: str, plural: str = "") -> str:
    """Return a number with the singular or the plural of its noun, by default with an s.

    Example:
        >>> counted(1, "class", "classes"), counted(2000, "class", "classes"), counted(2, "image")
        ('1 class', '2,000 classes', '2 images')
    """
    return f"{number:,} {singular if number == 1 else plural or f'{singular}s'}"


MOST_NAMED = 5


def some_of(names: Sequence[str], most: int = MOST_NAMED) -> str:
    """Return the first ones of some names, and how many others there are.

    Example:
        >>> some_of(["a", "b"]), some_of("abcdefg")
        ('a, b', 'a, b, c, d, e and 2 more')
    """
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more:,} more" if more > 0 else "")


VARYING = re.compile(r"""'[^']*'|"[^"]*"|(?<![^\s;,()'"])[^\s;,()/\\.0-9]*[/\\.0-9][^\s;,()]*""")
"""What differs between two problems of one kind: quoted values, paths and numbers, each from the start of its word."""

LETTER = re.compile(r"[^\W\d_]")


def merged(lines: Sequence[str]) -> list[str]:
    """Return one line per kind of problem: the first one, and how many others there are, with names of four of them.

    Example:
        >>> merged([f"photos/{n}.jpg: cannot read this image" for n in range(8)] + ["t.csv: no header"])[0]
        'photos/0.jpg: cannot read this image; 7 more of this kind: photos/1.jpg, photos/2.jpg, photos/3.jpg, \
photos/4.jpg and 3 more'
    """
    kinds: dict[str, list[str]] = {}
    for line in lines:
        kinds.setdefault(VARYING.sub("*", line), []).append(line)
    texts = list[str]()
    for alike in kinds.values():
        first, *others = (VARYING.findall(line) for line in alike)
        differing = ([part for part, same in zip(other, first, strict=False) if part != same] for other in others)
        # a path or a word names a problem better than a number, e.g. of a box, before it
        names = [next(filter(LETTER.search, parts), parts[0]).rstrip(":") for parts in differing if parts]
        more = f"; {len(others):,} more of this kind" if others else ""
        texts.append(f"{alike[0]}{more}{': ' if names else ''}{some_of(names, MOST_NAMED - 1)}")
    return texts
