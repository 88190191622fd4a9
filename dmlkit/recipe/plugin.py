"""Plug-ins: members of families that others wrote, in installed packages or in a file that the user names.

A package lists its modules under the entry-point group ``dmlkit``::

    [project.entry-points.dmlkit]
    losses = "toy_dml.losses"

No recipe, run or model ever names code to load: only what is installed, and what `load_file` is given, runs.
"""

import hashlib
import sys
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint, entry_points
from itertools import groupby
from multiprocessing import parent_process
from pathlib import Path
from traceback import extract_tb
from types import ModuleType

from dmlkit.component import ComponentConfig, MemberError, NameTakenError, rebuild_unions
from dmlkit.errors import UserError
from dmlkit.files.escape import excerpt
from dmlkit.files.regular import check_regular

GROUP = "dmlkit"  # of entry points


@dataclass(frozen=True)
class Plugin:
    """Where members come from.

    Args:
        name: of the distribution, or of the file.
        version: of the distribution; None for a file.
        places: the folders of packages, or the files, that hold the code.
        source: of a file that `load_file` was given: the bytes that ran.
    """

    name: str
    version: str | None
    places: tuple[Path, ...]
    source: bytes | None = None

    @property
    def title(self) -> str:
        """Name and version."""
        return f"{self.name} {self.version}" if self.version else self.name

    @property
    def sha256(self) -> str:
        """Of a file's bytes; of a package's Python files and their names."""
        if self.source is not None:
            return hashlib.sha256(self.source).hexdigest()
        digest = hashlib.sha256()
        for place in self.places:
            for file in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
                digest.update(f"{file.relative_to(place.parent).as_posix()}\0".encode() + file.read_bytes() + b"\0")
        return digest.hexdigest()

    def holds(self, member: type[ComponentConfig]) -> bool:
        """Whether a member's code lies here."""
        file = getattr(sys.modules.get(member.__module__), "__file__", None)
        return file is not None and any(Path(file).is_relative_to(place) for place in self.places)


_loaded: list[Plugin] = []


def plugin_of(member: type[ComponentConfig]) -> Plugin | None:
    """The plug-in that a member comes from; None for dmlkit's own, and for what a program defines itself."""
    return next((plugin for plugin in _loaded if plugin.holds(member)), None)


def loaded_plugins() -> tuple[Plugin, ...]:
    """Those that are loaded, in that order."""
    return tuple(_loaded)


def plugin_files() -> tuple[Path, ...]:
    """The files among them, which another process must load for itself."""
    return tuple(plugin.places[0] for plugin in _loaded if plugin.source is not None)


def refuse_plugin_files() -> None:
    """Make sure that other machines can have all plug-ins.

    Raises:
        UserError: one is a file, which only this process has loaded.
    """
    for path in plugin_files():
        raise UserError(
            f"--plugin {path}: workers of Ray load installed plug-ins alone; make it a package, see docs/plugins.md"
        )


def load_installed() -> None:
    """Load what installed packages list. A package that fails is left out with a warning, and stops nothing else."""
    entries = sorted(entry_points(group=GROUP), key=lambda entry: (_distribution(entry), entry.name))
    for (name, version), listed in groupby(entries, key=_distribution):
        plugin = Plugin(name, version, ())
        try:
            with _all_or_nothing():
                plugin = replace(plugin, places=tuple({_place(_load(entry)): None for entry in listed}))
        except UserError as error:
            if parent_process() is None:  # which has told it
                warnings.warn(f"plug-in {plugin.title} is left out: {error}; mend or uninstall it", stacklevel=2)
        else:
            _loaded.append(plugin)
    if _loaded:
        rebuild_unions()


def load_file(path: Path) -> Plugin:
    """Load one Python file, which need not be in a package; a file that is loaded already stays as it is.

    Raises:
        UserError: it cannot be read or imported, has a name that is taken, or defines no member.
    """
    try:
        check_regular(path)
        source = path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"{path}: no such plug-in; expected a Python file") from None
    except OSError as error:
        raise UserError(f"{path}: cannot read this plug-in: {error.strerror or error}") from error
    plugin = Plugin(path.name, None, (path.resolve(),), source)
    if plugin in _loaded:
        return plugin
    with _all_or_nothing():
        _run(path, plugin)
        if not any(plugin.holds(member) for root in _roots() for member in root.variants.values()):
            raise UserError(
                f"{path}: this plug-in defines no member of a family; expected a class that derives from LossConfig, "
                "DatasetConfig or another root"
            )
    _loaded.append(plugin)
    rebuild_unions()
    return plugin


def _distribution(entry: EntryPoint) -> tuple[str, str]:
    assert entry.dist is not None  # of every entry point that was found on the disk
    return entry.dist.name, entry.dist.version


def _load(entry: EntryPoint) -> ModuleType:
    try:
        entry.load()
        return sys.modules[entry.module]
    except (Exception, SystemExit) as error:
        raise UserError(f"{entry.value} cannot be imported: {_reason(error)}") from error


def _place(module: ModuleType) -> Path:
    """The folder of the package that a module is or lies in, or the file of one that lies in none."""
    path = getattr(module, "__file__", None)
    if path is None:
        raise UserError(f"{module.__name__} has no file; expected a module, or a package with an __init__.py")
    file = Path(path)
    return file.parent if "." in module.__name__ or hasattr(module, "__path__") else file


def _run(path: Path, plugin: Plugin) -> None:
    """Import a file under a name of its own, and what is hashed: its bytes are read once, and none are written."""
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
    first = (str(error).splitlines() or [""])[0]
    if isinstance(error, MemberError):
        return first
    return f"{type(error).__name__}: {excerpt(first)}" if first else type(error).__name__


def _roots() -> list[type[ComponentConfig]]:
    return ComponentConfig.__subclasses__()


@contextmanager
def _all_or_nothing() -> Generator[None]:
    """Members of a plug-in that fails are taken out again; dmlkit's own, which it was the first to import, stay."""
    before = {root: set(root.variants) for root in _roots()}
    try:
        yield
    except UserError:
        for root in _roots():
            for name in set(root.variants) - before.get(root, set()):
                if root.variants[name].__module__.partition(".")[0] != "dmlkit":
                    del root.variants[name]
        raise
