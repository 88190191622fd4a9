"""Documents: JSON files of plain data, each kind with one reader, one writer and a version."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ValidationError

from dmlkit import __version__
from dmlkit.errors import UserError
from dmlkit.files.atomic import json_text, write_json
from dmlkit.files.regular import refuse_what_is_no_file

MAX_BYTES = 100_000_000  # of a document; the largest, a manifest with a million skipped images, has as many


class Document(BaseModel, frozen=True, extra="forbid"):
    """Base of the documents that cross rooms: frozen, and unknown keys are refused.

    The file also holds ``format``, its version, and ``dmlkit``, which wrote it. A file without a ``format`` is of
    dmlkit 0.1.0 before documents had one, and counts as format 1.

    Example:
        >>> import tempfile
        >>> class Count(Document, frozen=True):
        ...     kind: ClassVar[str] = "count"
        ...     images: int
        >>> path = Path(tempfile.mkdtemp()) / "count.json"
        >>> Count(images=3).write(path)
        >>> Count.read(path).images
        3
    """

    kind: ClassVar[str]
    """What the document is, for errors."""
    version: ClassVar[int] = 1
    """Raised when an older dmlkit could not read it."""
    older: ClassVar[dict[int, tuple[str, ...]]] = {}
    """Older versions that are read as well, each with the keys to leave out, since others say the same."""

    def plain(self) -> dict[str, Any]:
        """The fields as plain data."""
        return self.model_dump(mode="json", by_alias=True)

    def write(self, path: Path, *, scratch: Path | None = None) -> None:
        """Write the document, all or nothing; ``scratch`` as in `atomic_write`."""
        write_json(path, self.stamped(), scratch=scratch)

    def text(self) -> str:
        """What `write` writes, for a file that is renamed together with others."""
        return json_text(self.stamped())

    def stamped(self) -> dict[str, Any]:
        """What the file holds: the fields, with the format and who wrote it."""
        return {"format": self.version, "dmlkit": __version__, **self.plain()}

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the document of a file.

        Raises:
            UserError: the file is missing, damaged, or of another version of dmlkit.
        """
        refuse_what_is_no_file(path)
        try:
            if path.stat().st_size > MAX_BYTES:
                raise UserError(f"{path}: larger than {MAX_BYTES:,} bytes; this is no {cls.kind}")
            return cls.from_json(path.read_text(encoding="utf-8"), str(path))
        except FileNotFoundError:
            raise UserError(f"{path}: missing; expected a {cls.kind} that dmlkit wrote") from None
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{path}: cannot read this {cls.kind}: {error}") from error

    @classmethod
    def is_at(cls, path: Path) -> bool:
        """Whether there is such a document, written by this version of dmlkit or one like it."""
        try:
            cls.read(path)
        except UserError:
            return False
        return True

    def json_line(self) -> str:
        """The document as one line of a .jsonl file, which holds many: with its format, without who wrote it."""
        return json.dumps({**self.plain(), "format": self.version}) + "\n"

    @classmethod
    def from_json(cls, text: str, source: str) -> Self:
        """The document that a JSON text holds; ``source`` names it in errors.

        Raises:
            UserError: it is no JSON; or see `parse`.
        """
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{source}: cannot read this {cls.kind}: {error}") from error
        return cls.parse(data, source)

    @classmethod
    def parse(cls, data: Any, source: str) -> Self:
        """Plain data as a document.

        Raises:
            UserError: it is of another version, or lacks or exceeds the keys of this one.
        """
        if not isinstance(data, dict):
            raise UserError(f"{source}: expected a {cls.kind} that dmlkit wrote, got {type(data).__name__}")
        fields: dict[str, Any] = dict(data)
        found, writer = fields.pop("format", 1), fields.pop("dmlkit", "0.1.0 or older")
        told = f"{source}: a {cls.kind} of format {found}, written by dmlkit {writer}"
        if found not in (cls.version, *cls.older):
            raise UserError(
                f"{told}; this is dmlkit {__version__}, which reads format {cls.version}: use the version that wrote "
                "it, or let this one write it again"
            )
        for name in cls.older.get(found, ()):
            fields.pop(name, None)
        try:
            # strict in JSON mode: lists become tuples, and no text becomes a number
            return cls.model_validate_json(json.dumps(fields, allow_nan=False), strict=True)
        except ValidationError as error:
            first: Any = error.errors()[0]
            key = "".join(f"{step}." for step in first["loc"] if not str(step).startswith("<"))  # a union's tag
            if first["type"] == "union_tag_invalid":
                name = first["ctx"]["tag"].strip("<>")
                raise UserError(
                    f"{told}: {key}name: nothing here is called {name!r}; install the plug-in that has it, or name its "
                    "file by --plugin"
                ) from error
            fault = f"{key[:-1]}: {first['msg'].lower()}" if key else first["msg"].lower()
        except ValueError:  # of json.dumps
            fault = "a number in it is NaN or infinite, which JSON has not"
        raise UserError(
            f"{told}: {fault}; it is damaged or of another version: let this one (dmlkit {__version__}) write it again"
        )


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
