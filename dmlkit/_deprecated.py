"""Old names, each of which works for two more minor releases with a warning; none so far, see docs/stable.md.

A rename adds a line to one of the tables, and `dmlkit.errors.warn` says it to whoever uses the old name.
"""

from typing import NamedTuple

from dmlkit.errors import warn


class New(NamedTuple):
    """Name that replaces an old one, and the version that refuses the old one."""

    name: str
    refused_in: str


KEYS: dict[str, New] = {}
"""By the old key of a recipe, e.g. ``"training.lr": New("optimizer.lr", "0.4.0")``; a renamed member is
``"loss.name=triple": New("triplet", "0.4.0")``."""

WORDS: dict[str, New] = {}
"""By the old command, or the old option after the first word of its commands, e.g.
``"embed --ckpt": New("--checkpoint", "0.4.0")``; ``"gallery --file"`` is one of every command of galleries."""


def warn_of(old: str, new: New) -> str:
    """Warn of an old name, which may start with its place; return the new one."""
    warn(f"{old}: is called {new.name} now; dmlkit {new.refused_in} will refuse the old name")
    return new.name
