"""Plug-ins: further members of families, from installed packages or from a file given by the user.

A package lists its modules under the entry-point group ``dmlkit``::

    [project.entry-points.dmlkit]
    losses = "toy_dml.losses"

Recipes, runs and models never name code to load: only installed packages and files given to `load_file` are run.
"""

import hashlib
import re
import sys
import warnings
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint, entry_points
from itertools import groupby
from multiprocessing import parent_process
from pathlib import Path
from traceback import extract_tb
from types import ModuleType

from pydantic import BaseModel

from dmlkit.component import ComponentConfig, MemberError, NameTakenError, components_below
from dmlkit.errors import UserError, first_line, killed_reader, out_of_memory, warn_once
from dmlkit.files.escape import command_word, excerpt
from dmlkit.files.readers.base import Reader
from dmlkit.files.regular import reading
from dmlkit.recipe.catalogue import GROUP


@dataclass(frozen=True)
class Plugin:
    """Source of members: an installed distribution or a file."""

    name: str  # of the distribution, or of the file
    version: str | None  # of the distribution; None for a file
    places: tuple[Path, ...]  # folders of packages, or files, with the code
    source: bytes | None = None  # for a file given to `load_file`, the bytes that were run

    @property
    def title(self) -> str:
        """Name and version."""
        return f"{self.name} {self.version}" if self.version else self.name

    @property
    def sha256(self) -> str:
        """SHA-256 of a file's bytes, or of a package's Python files and their names."""
        if self.source is not None:
            return hashlib.sha256(self.source).hexdigest()
        digest = hashlib.sha256()
        for place in self.places:
            for file in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
                digest.update(f"{file.relative_to(place.parent).as_posix()}\0".encode() + file.read_bytes() + b"\0")
        return digest.hexdigest()

    def holds(self, member: type) -> bool:
        """Return whether the code of a member, or of a reader, is in this plug-in."""
        file = getattr(sys.modules.get(member.__module__), "__file__", None)
        return file is not None and any(Path(file).is_relative_to(place) for place in self.places)


_loaded: list[Plugin] = []


def plugin_of(member: type[ComponentConfig]) -> Plugin | None:
    """Return the plug-in that a member comes from; None for members of dmlkit or of the running program."""
    return next((plugin for plugin in _loaded if plugin.holds(member)), None)


def plugin_files() -> tuple[Path, ...]:
    """Return the loaded files, which every process must load itself."""
    return tuple(plugin.places[0] for plugin in _loaded if plugin.source is not None)


def load_installed() -> None:
    """Load the plug-ins of installed packages; a package that fails is skipped with a warning."""
    entries = sorted(entry_points(group=GROUP), key=lambda entry: (_distribution(entry), entry.name))
    for (name, version), listed in groupby(entries, key=_distribution):
        plugin = Plugin(name, version, ())
        try:
            with _all_or_nothing():
                plugin = replace(plugin, places=tuple({_place(entry): None for entry in listed}))
        except UserError as error:
            if parent_process() is None:  # a parent process has already warned
                warnings.warn(f"plug-in {plugin.title} is skipped: {error}; fix or uninstall it", stacklevel=2)
        else:
            _loaded.append(plugin)


def load_file(path: Path) -> Plugin:
    """Load a Python file, which need not be in a package; a file that is already loaded is not loaded again."""
    with reading(path, "this plug-in", missing="no such plug-in; expected a Python file"):
        source = path.read_bytes()
    plugin = Plugin(path.name, None, (path.resolve(),), source)
    if plugin in _loaded:
        return plugin
    with _all_or_nothing():
        _run(path, plugin)
        members = [member for root in ComponentConfig.__subclasses__() for member in root.variants.imported.values()]
        if not any(map(plugin.holds, [*members, *map(type, Reader.known)])):
            raise UserError(
                f"{path}: this plug-in defines no member of a family; expected a class such as "
                'Mine(Loss, name="mine"), or one that derives from DatasetConfig, Reader or another root'
            )
    _loaded.append(plugin)
    return plugin


def plugin_error(error: Exception) -> UserError | None:
    """Return an error that names the place in a plug-in at which another was raised; None if none was involved.

    Errors of the system, a lack of memory and user errors are said as everywhere. Of an error of a process that reads
    images, only the text has the places.
    """
    if isinstance(error, UserError | OSError) or out_of_memory(error) or killed_reader(error):
        return None
    text, reason = str(error), _reason(error)
    places = [(frame.filename, frame.lineno) for frame in extract_tb(error.__traceback__)]
    if "Original Traceback" in text:  # of torch's loader
        places = re.findall(r'^ *File "(.+)", line ([0-9]+)', text, re.MULTILINE)
        reason = excerpt(text.rstrip().splitlines()[-1])
    for name, line in reversed(places):
        if plugin := next((loaded for loaded in _loaded if any(map(Path(name).is_relative_to, loaded.places))), None):
            return UserError(f"{name}:{line}: {reason}; raised by the plug-in {plugin.title}: fix it there")
    return None


def _distribution(entry: EntryPoint) -> tuple[str, str]:
    assert entry.dist is not None  # entry points found on disk have a distribution
    return entry.dist.name, entry.dist.version


def _place(entry: EntryPoint) -> Path:
    """Import a module; return the folder of its package, or the file of a module without a package."""
    try:
        entry.load()
        module = sys.modules[entry.module]
    except (Exception, SystemExit) as error:
        raise UserError(f"{entry.value} cannot be imported: {_reason(error)}") from error
    path = getattr(module, "__file__", None)
    if path is None:
        raise UserError(f"{module.__name__} has no file; expected a module, or a package with an __init__.py")
    file = Path(path)
    return file.parent if "." in module.__name__ or hasattr(module, "__path__") else file


def _run(path: Path, plugin: Plugin) -> None:
    """Import a file under a unique name from the bytes that are hashed, which are read only once."""
    (file,), source = plugin.places, plugin.source or b""
    module = ModuleType(f"{file.stem}_{plugin.sha256[:8]}")
    module.__file__ = str(file)
    sys.modules[module.__name__] = module  # where pydantic looks for the names in annotations
    try:
        exec(compile(source, file, "exec"), vars(module))
    except (Exception, SystemExit) as error:
        del sys.modules[module.__name__]
        lines = [frame.lineno for frame in extract_tb(error.__traceback__) if frame.filename == str(file)]
        line = f" (line {lines[-1]})" if lines else ""
        raise UserError(f"{path}: cannot load this plug-in: {_reason(error)}{line}") from error


def _reason(error: BaseException) -> str:
    if isinstance(error, NameTakenError):
        plugin = plugin_of(error.taken_by)
        owner = plugin.title if plugin else error.taken_by.__module__.partition(".")[0]
        return f"the name {error.name!r} is taken by {owner}; choose another"
    line = first_line(error)
    if isinstance(error, MemberError):
        return line
    return f"{type(error).__name__}: {excerpt(line)}" if str(error) else line


@contextmanager
def _all_or_nothing() -> Generator[None]:
    """Remove the members of a plug-in if it fails, except members of dmlkit that it was the first to import."""
    before = {root: set(root.variants.imported) for root in ComponentConfig.__subclasses__()}
    readers = list(Reader.known)
    try:
        yield
    except UserError:
        Reader.known[:] = [
            reader for reader in Reader.known if reader in readers or type(reader).__module__.startswith("dmlkit.")
        ]
        for root in ComponentConfig.__subclasses__():
            for name in set(root.variants.imported) - before.get(root, set()):
                if root.variants[name].__module__.partition(".")[0] != "dmlkit":
                    del root.variants[name]
        raise


class PluginRecord(BaseModel, frozen=True, extra="forbid", strict=True):
    """Plug-in that a recipe has members of."""

    name: str
    """Name of the distribution, or of the file."""
    version: str | None
    """Version of the distribution; null for a file."""
    sha256: str
    """SHA-256 of the code."""


def plugins_of(recipe: BaseModel) -> tuple[PluginRecord, ...]:
    """Return the plug-ins that a recipe has members of, sorted by name."""
    plugins = {plugin_of(type(component)) for _, component in components_below((), recipe)} - {None}
    records = (PluginRecord(name=item.name, version=item.version, sha256=item.sha256) for item in plugins if item)
    return tuple(sorted(records, key=lambda record: record.name))


def open_plugins(records: Sequence[PluginRecord], source: str) -> None:
    """Check that the plug-ins of a run are loaded, and warn about those that have changed."""
    names = {(plugin.name, plugin.version is None) for plugin in _loaded}
    missing = [record for record in records if (record.name, record.version is None) not in names]
    if missing:
        raise UserError("\n".join(f"{source}: needs the plug-in {_installation(record)}" for record in missing))
    for change in changed_plugins(records):
        warn_once(f"{source}: {change}; its results may differ")


def changed_plugins(records: Sequence[PluginRecord]) -> list[str]:
    """Return how the plug-ins of a run differ from the loaded ones, one line each."""
    changes: list[str] = []
    for record in records:
        same_name = [plugin for plugin in _loaded if plugin.name == record.name]
        if same_name and all(plugin.sha256 != record.sha256 for plugin in same_name):
            recorded = f"{record.name} {record.version}" if record.version else record.name
            hashes = f"sha256 {record.sha256[:12]} then, {same_name[0].sha256[:12]} now"
            changes.append(f"trained with the plug-in {recorded}, now {same_name[0].title} ({hashes})")
    return changes


def _installation(record: PluginRecord) -> str:
    if record.version is None:
        file = command_word(f"PATH/{record.name}")
        return f"{record.name} (sha256 {record.sha256[:12]}...); load it with --plugin {file}"
    return f"{record.name} {record.version}; install it with: pip install {record.name}=={record.version}"
