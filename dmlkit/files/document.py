"""Documents: JSON files of plain data. Each kind has one reader, one writer and a format version."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ValidationError

from dmlkit import __version__
from dmlkit.errors import UserError
from dmlkit.files.atomic import json_text, write_text
from dmlkit.files.regular import reading

MAX_BYTES = 100_000_000  # per document: the size of the largest, a manifest with a million skipped images


class Document(BaseModel, frozen=True, extra="forbid"):
    """Base class of documents. They are frozen, and unknown keys are rejected.

    Every file also records ``format``, its format version, and ``dmlkit``, the version that wrote it.

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
    """Name of the kind of document, for errors."""
    version: ClassVar[int] = 1
    """Format version; increase it if older versions of dmlkit cannot read the new format."""

    def plain(self) -> dict[str, Any]:
        """Return the fields as plain data."""
        return self.model_dump(mode="json", by_alias=True)

    def write(self, path: Path) -> None:
        """Write the document atomically."""
        write_text(path, self.text())

    def text(self) -> str:
        """Return the text that `write` writes, for a file that is renamed together with others."""
        return json_text(self.stamped())

    def stamped(self) -> dict[str, Any]:
        """Return the contents of the file: the fields, the format version and the version of dmlkit."""
        return {"format": self.version, "dmlkit": __version__, **self.plain()}

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the document of a file."""
        missing = f"missing; expected a {cls.kind} that dmlkit wrote"
        with reading(path, f"this {cls.kind}", UnicodeDecodeError, missing=missing):
            if path.stat().st_size > MAX_BYTES:
                raise UserError(f"{path}: expected a {cls.kind}, got a file of more than {MAX_BYTES:,} bytes")
            text = path.read_text(encoding="utf-8")
        return cls.from_json(text, str(path))

    @classmethod
    def is_at(cls, path: Path) -> bool:
        """Return whether a file is such a document in a format that can be read."""
        try:
            cls.read(path)
        except UserError:
            return False
        return True

    def json_line(self) -> str:
        """Return the document as a line of a .jsonl file, with its format version but without dmlkit's version."""
        return json.dumps({**self.plain(), "format": self.version}) + "\n"

    @classmethod
    def from_json(cls, text: str, source: str) -> Self:
        """Parse the document from JSON; ``source`` names it in errors."""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{source}: cannot read this {cls.kind}: {error}") from error
        return cls.parse(data, source)

    @classmethod
    def parse(cls, data: Any, source: str) -> Self:
        """Convert plain data to a document; ``source`` names it in errors."""
        if not isinstance(data, dict) or "format" not in data:
            kind = "one without a format" if isinstance(data, dict) else type(data).__name__
            raise UserError(f"{source}: expected a {cls.kind} that dmlkit wrote, got {kind}")
        fields: dict[str, Any] = dict(data)
        version, writer = fields.pop("format"), fields.pop("dmlkit", "of an unknown version")
        description = f"{source}: a {cls.kind} of format {version}, written by dmlkit {writer}"
        if type(version) is not int or version != cls.version:  # JSON's true equals 1
            raise UserError(
                f"{description}; this is dmlkit {__version__}, which reads format {cls.version}: use the version that "
                "wrote the file, or write it again with this version"
            )
        try:
            # strict in JSON mode: lists become tuples, and no text becomes a number
            return cls.model_validate_json(json.dumps(fields, allow_nan=False), strict=True)
        except ValidationError as error:
            first: Any = error.errors()[0]
            key = "".join(f"{step}." for step in first["loc"])
            if first["type"] == "unknown_member":
                name = first["input"]["name"]
                raise UserError(
                    f"{description}: {key}name: {name!r} is unknown; install the plug-in that defines it, or give its "
                    "file with --plugin"
                ) from error
            reason = f"{key[:-1]}: {first['msg'].lower()}" if key else first["msg"].lower()
        except ValueError:  # raised by json.dumps
            reason = "a number is NaN or infinite, which JSON does not allow"
        raise UserError(
            f"{description}: {reason}; the file is damaged or was written by another version: write it again with "
            f"dmlkit {__version__}"
        )


def differences(key: str, old: Any, new: Any) -> Iterator[str]:
    """Yield a message for each key at which two pieces of plain data differ; ``key`` is their own key.

    Of a component that replaces one of another name, keys that it lacks are left out: they went with the old one.

    Example:
        >>> list(differences("loss", {"margin": 0.1}, {"margin": 0.2}))
        ['loss.margin: was 0.1, now 0.2']
        >>> list(differences("loss", {"name": "mpa", "gamma": 0.1}, {"name": "triplet", "margin": 0.2}))
        ['loss.name: was mpa, now triplet', 'loss.margin: now 0.2']
    """
    if isinstance(old, dict) and isinstance(new, dict):
        replaced = "name" in old and "name" in new and old["name"] != new["name"]
        for name in [*old, *(name for name in new if name not in old)]:
            below = f"{key}.{name}" if key else name
            if replaced and name not in old:
                yield f"{below}: now {new[name]}"
            elif name in new or not replaced:
                yield from differences(below, old.get(name, "nothing"), new.get(name, "nothing"))
    elif old != new:
        yield f"{key}: was {old}, now {new}"
