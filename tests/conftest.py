import os

# One thread: the tests are small, and two processes that share cores slow each other ten-fold otherwise.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Ray would end workers where others have filled the machine's memory, whatever these take themselves.
os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")

import atexit
import csv
import ctypes
import gc
import importlib.metadata
import inspect
import json
import logging
import shutil
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache, wraps
from importlib import import_module
from pathlib import Path
from typing import Any, Self

import pytest
import typer.main
from _pytest.doctest import DoctestModule
from hypothesis import HealthCheck, settings

from dmlkit.errors import UserError

# A slow machine is no fault of a test, and only `make fuzz` draws new examples each time.
settings.register_profile(
    "any machine",
    deadline=None,
    derandomize="DMLKIT_FUZZ" not in os.environ,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("any machine")

# Typer builds all commands again at each call of the command line, 25 ms; they keep nothing from one call to the next.
typer.main.get_command = cache(typer.main.get_command)
# Each training looks through all installed packages, 30 ms, and waits 15 times for the disk, lest power fails.
importlib.metadata.entry_points = cache(importlib.metadata.entry_points)
importlib.metadata.version = cache(importlib.metadata.version)
os.fsync = lambda file: None

ROOT = Path(__file__).parent.parent
END = 300.0  # seconds after which a test gives up waiting; on a quiet machine it takes a few
collect_ignore = ["toy_plugin"]  # its members are for the tests that install it
TINY_RECIPE = """\
seed: 3
dataset: {name: glyphs, classes: 12, images_per_class: 6, size: 16, validation_fraction: 0.34}
transform: {name: plain, size: 16}
backbone: {name: small_cnn, width: 4}
embedding_dim: 8
loss: {name: proxy_anchor}
sampler: {name: random, batch_size: 8}
optimizer: {name: adamw, lr: 0.003, lr_multipliers: {loss: 10}}
training: {epochs: 3}
metrics: [{name: recall, k: [1, 2]}, {name: map_at_r}]
"""
ONE_EPOCH = TINY_RECIPE.replace("epochs: 3", "epochs: 1, workers: 0")
ON_THE_BALL = ONE_EPOCH.replace("embedding_dim: 8", "embedding_dim: 4") + "manifold: {name: poincare}\n"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage until everything is imported, and leave that out later: it took 8 % of a run of four files."""
    gc.disable()
    try:
        return (yield)
    finally:
        lighten()
        gc.freeze()
        gc.set_threshold(10_000)  # looking after each 700 new objects was 6 % of the time of two files
        gc.enable()
        KEPT["bytes"] = memory()


LONGEST = (
    *("training/test_train.py", "docs/test_commands.py", "distributed/test_ranks.py", "study/test_study.py"),
    *("serve/test_workers.py", "fuzz/test_galleries.py", "packaging/test_installed.py", "vectors/test_run.py"),
    *("docs/test_photos.py", "docs/test_site.py", "fuzz/test_study_storm.py"),
)  # of `make test-heavy`, the longest first: 30 s to 3 minutes each


def has_heavy_tests(path: Path) -> bool:
    return "pytest.mark.heavy" in path.read_text(encoding="utf-8")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import for `make test-heavy` only the files that have heavy tests: the others take each process 8 s."""
    is_unwanted = config.option.markexpr == "heavy" and collection_path.suffix == ".py"
    return True if is_unwanted and not has_heavy_tests(collection_path) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest files: those that are kept whole leave one process without work if they come last."""
    heavy = {item.path for item in items if item.get_closest_marker("heavy")}
    if stray := sorted(str(path) for path in heavy if not has_heavy_tests(path)):
        raise pytest.UsageError(f"{stray}: expected pytest.mark.heavy in the file of a heavy test; write it there")
    place = {f"tests/{name}": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.nodeid.partition("::")[0], len(place)))


def no_curves(_: Any, path: Path, **__: Any) -> None:
    path.touch()


def no_plot(_: Any, path: Path, **__: Any) -> None:
    """An empty picture."""
    from matplotlib.figure import Figure

    path.parent.mkdir(parents=True, exist_ok=True)
    Figure(figsize=(1, 1)).savefig(path, format=path.suffix[1:].lower())


LOADERS = ("dmlkit.loading.batches", "dmlkit.loading.check")
PICTURES = {"dmlkit.training.summary": ("plot_curves", no_curves), "dmlkit.study.report": ("plot_study", no_plot)}


def draw_pictures(patch: pytest.MonkeyPatch, *functions: str) -> None:
    """Draw the curves of runs or the plots of studies, which `lighten` leaves empty."""
    for name, (function, _) in PICTURES.items():
        if function in functions:
            module = import_module(name)
            patch.setattr(module, function, inspect.unwrap(getattr(module, function)))


def no_readers() -> int:
    """As many processes that read images as a test has limited them to; without a limit none."""
    batches = sys.modules["dmlkit.loading.batches"]
    return 0 if batches._most_workers == [8] else inspect.unwrap(batches.default_workers)()


def lighten() -> None:
    """Spare tests what takes long and says nothing about them, in the modules imported so far.

    - For each kind of device that is not there, ``torch.manual_seed`` keeps the seed and the text of its stack, which
      is long below pytest: 0.7 ms. Each training searches the library of NVIDIA's driver three times; that it is not
      there is found once.
    - Pytest adds its handlers to each of torch's 60 loggers before each of the three parts of a test, 1.3 ms, unless
      these loggers pass their messages on.
    - The curves of a run take 0.2 s, and the plot of a study 0.3 s; they are empty, unless a test asks for
      `pictures_are_drawn`.
    - Each export to ONNX reads the source of all operators, 0.7 s of its 2 s; they are read once.
    - A glyph takes 0.3 ms, a third of a study's dry run; it is drawn once for all runs that show it.
    - To fork a process of 1 GB for the images of a test takes 70 ms, and to read them 1 ms; the test reads them itself,
      unless it gives a number of workers or asks for `images_have_readers`.
    """
    if torch := sys.modules.get("torch"):
        for device in (torch.cuda, torch.mtia, torch.xpu):
            if not device.is_available():
                device.manual_seed_all = lambda seed: None
        if not hasattr(torch.cuda._raw_device_count_nvml, "__wrapped__"):
            torch.cuda._raw_device_count_nvml = cache(torch.cuda._raw_device_count_nvml)
        for name, logger in logging.root.manager.loggerDict.items():
            if name.startswith("torch") and isinstance(logger, logging.Logger):
                logger.propagate = True
    if onnx := sys.modules.get("torch.onnx._internal.exporter._registration"):
        registry = onnx.ONNXRegistry
        if not hasattr(registry.from_torchlib, "__wrapped__"):
            registry.from_torchlib = staticmethod(cache(registry.from_torchlib))
    for name, (function, instead) in PICTURES.items():
        if (module := sys.modules.get(name)) and not hasattr(drawn := getattr(module, function), "__wrapped__"):
            setattr(module, function, wraps(drawn)(instead))
    if (glyphs := sys.modules.get("dmlkit.datasets.glyphs")) and not hasattr(glyphs.render, "__wrapped__"):
        glyphs.render = lru_cache(maxsize=20_000)(glyphs.render)
    if (batches := sys.modules.get(LOADERS[0])) and not hasattr(batches.default_workers, "__wrapped__"):
        import_module("dmlkit.training.estimate")  # which counts those of a real run
        for module in map(import_module, LOADERS[1:]):
            module.default_workers = wraps(batches.default_workers)(no_readers)
            module.WORKER_START = None  # torch refuses one where it starts no process
        batches.default_workers = wraps(batches.default_workers)(no_readers)


# Let Python free what was left out, as extensions written in C++ expect when it ends; not before, since pytest collects
# garbage twice at its own end, 1 s each.
atexit.register(gc.unfreeze)


@pytest.hookimpl(wrapper=True)
def pytest_collect_file() -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Search dmlkit alone for doctests: tests have none, and their helpers need no import of their own."""
    found = yield
    return [collector for collector in found if not isinstance(collector, DoctestModule)]


MUCH_MEMORY = 5e8  # bytes; to give them back takes 0.4 s, and after each module it was a sixth of the time of all tests
KEPT = {"bytes": 0}  # by this process when it last gave memory back, or had imported all tests


def memory() -> int:
    """The bytes that this process holds; 0 where that is not known."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0


@pytest.fixture(scope="module", autouse=True)
def freed_memory() -> Iterator[None]:
    """What modules' tests took goes back to the system, which dmlkit's own processes keep for the next batch.

    A process that has tested all the backbones holds 4 GB otherwise; two of them and Ray's workers fill 8 GB.
    """
    yield
    if memory() > KEPT["bytes"] + MUCH_MEMORY and hasattr(library := ctypes.CDLL(None), "malloc_trim"):
        gc.collect()
        library.malloc_trim(0)
        KEPT["bytes"] = memory()


class Killed(BaseException):
    """Stands for a kill: what nothing catches, between two changes of the disk."""


@dataclass
class Result:
    """What a command of the command line ended with and printed."""

    code: int
    out: str
    err: str

    def ok(self) -> Self:
        """Check that the command succeeded."""
        assert self.code == 0, self.err
        return self

    def json(self) -> Any:
        """What a command that succeeded printed with ``--json``."""
        return json.loads(self.ok().out)

    def refused(self, *parts: str) -> Self:
        """Check that the command ended with one line of a mistake of its user, which has these parts."""
        assert self.code == 2 and self.err.startswith("error: ") and self.err.count("\n") == 1, self
        assert all(part in self.err for part in parts), self
        return self


Cli = Callable[..., Result]
"""The command line: the fixture `dmlkit`."""


def every_command(command: Any = None, words: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dmlkit, each command and each group, with its words."""
    if command is None:
        command = typer.main.get_command(import_module("dmlkit.cli.app").app)
    yield words, command
    for name, below in getattr(command, "commands", {}).items():
        yield from every_command(below, f"{words} {name}".strip())


def csv_rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@contextmanager
def one_line(pattern: str = "") -> Iterator[None]:
    """Expect a `UserError` of one line that matches a pattern."""
    with pytest.raises(UserError, match=pattern) as raised:
        yield
    assert "\n" not in str(raised.value), raised.value


def refuses(pattern: str, function: Callable[..., object], *arguments: Any, **options: Any) -> None:
    """Expect of a call a `UserError` of one line that matches a pattern."""
    with one_line(pattern):
        function(*arguments, **options)


@pytest.fixture(scope="session")
def catalogue(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A cache folder with the names of all components, as ``dmlkit list`` leaves it."""
    from tests.processes import start

    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        assert start("list").wait(END) == 0
    return str(folder)


@pytest.fixture(scope="session")
def trained_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Write ``recipe.yaml`` and ``run`` into a folder; a recipe is trained once for all tests, which get copies."""
    from dmlkit.training.train import train

    lighten()

    @cache
    def trained(text: str) -> Path:
        folder = tmp_path_factory.mktemp("trained")
        (folder / "recipe.yaml").write_text(text)
        train(folder / "recipe.yaml", folder / "run", device="cpu")
        return folder

    def into(folder: Path, text: str = ONE_EPOCH) -> Path:
        return Path(shutil.copytree(trained(text), folder, dirs_exist_ok=True)) / "run"

    return into


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A copy of what dmlkit 0.1.0 wrote, among it ``run``, its ``photos`` and a ``gallery`` of them."""
    return Path(shutil.copytree(ROOT / "tests/fixtures/0.1.0", tmp_path / "files"))


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of images of each part of a store that this process has computed."""
    from dmlkit.vectors.fill import PartEmbedder

    sizes, embed = list[int](), PartEmbedder.__call__

    def counted(self: PartEmbedder, numbers: list[int], advance: Callable[[int], None]) -> None:
        sizes.extend(len(self.job.rows(number)) for number in numbers)
        embed(self, numbers, advance)

    monkeypatch.setattr(PartEmbedder, "__call__", counted)
    return sizes


@pytest.fixture
def dmlkit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """Run the command line in this process, as the console script would."""
    for name in ("dmlkit.datasets.glyphs", "dmlkit.training.summary", LOADERS[0]):
        import_module(name)
    lighten()

    def run(*arguments: object) -> Result:
        from dmlkit.cli.app import main

        monkeypatch.setattr(sys, "argv", ["dmlkit", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit_info:
            main()
        captured = capsys.readouterr()
        code = exit_info.value.code
        return Result(0 if code is None else int(code), captured.out, captured.err)

    return run


@pytest.fixture
def pictures_are_drawn(dmlkit: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw the curves of runs and the plots of studies, for tests that look at them."""
    draw_pictures(monkeypatch, "plot_curves", "plot_study")


@pytest.fixture
def images_have_readers(dmlkit: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    """Start as many processes that read images as dmlkit does, for tests of them."""
    for name in LOADERS:
        module: Any = import_module(name)
        monkeypatch.setattr(module, "default_workers", inspect.unwrap(module.default_workers))
        monkeypatch.setattr(module, "WORKER_START", sys.modules[LOADERS[0]].__dict__["WORKER_START"])


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait 0.1 s, not 8, for another process that holds a folder."""
    from dmlkit.files.lock import sole_writer

    defaults = inspect.unwrap(sole_writer).__kwdefaults__  # its module's constant is read once, at its definition
    assert defaults is not None
    monkeypatch.setitem(defaults, "patience", 0.1)


@pytest.fixture
def plugin(tmp_path: Path) -> Iterator[Callable[[str], None]]:
    """Load the text of a plug-in file, which is removed after the test with its members."""
    plugins = import_module("dmlkit.recipe.plugin")
    families = import_module("dmlkit.recipe.schema").FAMILIES
    before, loaded = {root: dict(root.variants) for root in families.values()}, list(plugins._loaded)

    def load(text: str) -> None:
        path = tmp_path / f"plugin_{len(list(tmp_path.iterdir()))}.py"
        path.write_text(text)
        plugins.load_file(path)

    yield load
    plugins._loaded[:] = loaded
    for root, variants in before.items():
        root.variants.clear()
        root.variants.update(variants)


@pytest.fixture(scope="session")
def tracked() -> list[str]:
    """The files of this tree that git tracks, as paths from its root."""
    try:
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this tree is no git checkout")
    return [name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()]


@pytest.fixture
def tiny_recipe(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY_RECIPE)
    return path
