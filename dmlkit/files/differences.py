"""Where two pieces of plain data differ."""

from collections.abc import Iterator
from typing import Any


def differences(key: str, old: Any, new: Any) -> Iterator[str]:
    """Where two pieces of plain data differ, one key at a time; ``key`` is where they lie.

    Example:
        >>> list(differences("loss", {"margin": 0.1}, {"margin": 0.2}))
        ['loss.margin: was 0.1, now 0.2']
    """
    if isinstance(old, dict) and isinstance(new, dict):
        for name in [*old, *(name for name in new if name not in old)]:
            below = f"{key}.{name}" if key else name
            yield from differences(below, old.get(name, "nothing"), new.get(name, "nothing"))
    elif old != new:
        yield f"{key}: was {old}, now {new}"
