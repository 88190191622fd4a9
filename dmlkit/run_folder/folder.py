"""The folder of a run: its files, the checks before a run is continued, and its replacement by a new run.

Only what reads recipes or checkpoints imports torch, which takes seconds: the progress of runs is read without it.
"""

import json
import os
import shutil
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import quote

from dmlkit.errors import UserError, some_of, warn
from dmlkit.files.atomic import is_partial, write_text
from dmlkit.files.document import differences
from dmlkit.files.escape import command_word
from dmlkit.files.lock import LOCK, sole_writer
from dmlkit.files.outputs import check_place
from dmlkit.files.regular import cache_folder
from dmlkit.files.source import model_name, require_run
from dmlkit.recipe.plugin import changed_plugins, open_plugins
from dmlkit.run_folder.documents import Basis, Environment, EpochRow, RunClasses, Summary

if TYPE_CHECKING:
    from dmlkit.datasets.files.class_names import SplitClasses
    from dmlkit.recipe.schema import Recipe

CheckpointName = Literal["last", "best", "pretrained"]
FREE = ("loggers", "workers")  # keys of training that change no weight and no metric
LENGTH = ("epochs", "stop_after")  # keys of training that say when it ends
OF_PHOTOS = ("root", "on_bad_image")  # keys of a dataset that may change: photos may have moved, or be damaged
WEIGHT_KEYS = ("seed", "backbone", "head", "embedding_dim", "manifold", "loss", "regularizers", "sampler", "optimizer")
"""Recipe keys that a run and its checkpoint must share; the dataset may have moved."""
NEW = ".new"  # subfolder of an old run with the new run that replaces it, until that has a checkpoint
MOVING = ".moving"  # subfolder with the new run after the old run was removed, until all of it is moved
OF_RUN = (
    *("recipe.yaml", "environment.json", "classes.json", "basis.json", "metrics.jsonl", "summary.json", "curves.png"),
    *("alignment.json", "test_classes.json", "loggers.json", "threshold.json", "threshold-local.json"),
    *("checkpoints", "features", "tensorboard"),
    *("embeddings", "vectors", "evaluations", "exports", "plots"),  # computed with its weights
)
"""Files and folders of a run; others in its folder are not."""


class RunFolder:
    """Run on disk::

        recipe.yaml           environment.json      classes.json      metrics.jsonl      summary.json
        curves.png            checkpoints/{last,best}.pt
        test_classes.json
        basis.json            features/KEY/    vectors/KEY/    loggers.json    tensorboard/    threshold.json
        alignment.json        threshold-local.json
        evaluations/ embeddings/ exports/ plots/    outputs of other commands that use the weights

    It may not exist yet. A pretrained model, see `model_name`, is a run without training: its recipe comes from its
    name, its files are in the user's cache, and its embeddings and plots are in the current folder.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.model = path, model_name(path)
        folder = outputs = path
        if self.model is not None:
            folder, outputs = cache_folder() / "models" / quote(self.model, safe=""), Path()
        # these stay while a new run is prepared in the folder of an old one; the others move, see `_set_paths`
        self.embeddings = outputs / "embeddings"
        self.vectors = folder / "vectors"
        self.exports = outputs / "exports"
        self.plots = outputs / "plots"
        self.threshold_path = folder / "threshold.json"
        self.loggers_path = folder / "loggers.json"
        self._set_paths(folder)

    def _set_paths(self, folder: Path) -> None:
        self.checkpoints = folder / "checkpoints"
        self.evaluations = folder / "evaluations"
        self.features = folder / "features"
        self.recipe_path = folder / "recipe.yaml"
        self.environment_path = folder / "environment.json"
        self.classes_path = folder / "classes.json"
        self.basis_path = folder / "basis.json"
        self.alignment_path = folder / "alignment.json"
        self.metrics_path = folder / "metrics.jsonl"
        self.summary_path = folder / "summary.json"
        self.test_classes_path = folder / "test_classes.json"
        self.curves_path = folder / "curves.png"

    def checkpoint_path(self, name: CheckpointName) -> Path:
        """Return the path of a checkpoint."""
        return self.checkpoints / f"{name}.pt"

    def best_or_last(self) -> CheckpointName:
        """Return the checkpoint to use: the best one, or the last if there is none; warn if the best one is lost."""
        if self.model is not None:
            return "pretrained"
        if (path := self.checkpoint_path("best")).exists():
            return "best"
        if Summary.is_at(self.summary_path) and (best := Summary.read(self.summary_path).best):
            warn(f"{path}: missing, although epoch {best.epoch} was the best; the last checkpoint is used instead")
        return "last"

    def warn_of_loss(self) -> None:
        """Warn if validation prefers the network before training to the checkpoint that is used by default."""
        if self.summary_path.exists() and (message := Summary.read(self.summary_path).loss_message):
            warn(f"{self.path}: {message}")

    def embeddings_of(self, images: str | Path, checkpoint: CheckpointName) -> Path:
        """Return the folder of the embeddings of a split, given by its name, or of other images, by their path.

        Checkpoints other than the default have one of their own, and so have images with the name of a split.
        """
        name = images if isinstance(images, str) else images.resolve().name
        if isinstance(images, Path) and name in ("train", "validation", "test", "all"):
            name += "-images"
        return self.embeddings / self._named_by(name, checkpoint)

    def export_of(self, file_name: str, checkpoint: CheckpointName, dims: int | None = None) -> Path:
        """Return where a model is exported; checkpoints other than the default and shorter embeddings have their own.

        The end of the name begins at its first point, as in ``model.int8.onnx``.
        """
        stem, point, end = file_name.partition(".")
        stem = self._named_by(stem, checkpoint) + ("" if dims is None else f"-{dims}")
        return self.exports / f"{stem}{point}{end}"

    def picture_of(self, split: str, checkpoint: CheckpointName, kind: str) -> Path:
        """Return the picture of a kind of a split; checkpoints other than the default have one of their own."""
        return self.plots / f"{self._named_by(split, checkpoint)}-{kind}.png"

    def _named_by(self, name: str, checkpoint: CheckpointName) -> str:
        is_default = checkpoint == "best" or (checkpoint == "last" and not self.checkpoint_path("best").exists())
        return name if is_default or self.model is not None else f"{name}-{checkpoint}"

    def holds_run(self) -> bool:
        """Return whether a run was started in this folder, known by the environment.json that only `create` writes."""
        return self.model is not None or (self.recipe_path.exists() and Environment.is_at(self.environment_path))

    def is_being_replaced(self) -> bool:
        """Return whether the folder has an old run that a new one will replace at its first checkpoint."""
        return any((self.path / name).exists() for name in (NEW, MOVING))

    @contextmanager
    def lock_for_training(self) -> Generator[None]:
        """Lock the folder for a training, after finishing a replacement that a killed training left incomplete."""
        self._check_ours()
        with sole_writer(self.path, what="a training"):
            take_over(self.path)
            try:
                shutil.rmtree(self.path / NEW, ignore_errors=True)
                yield
            finally:  # a new run without a checkpoint
                shutil.rmtree(self.path / NEW, ignore_errors=True)

    def check_startable(self, *, resume: bool, overwrite: bool) -> None:
        """Check that a training may start or continue in the folder, as far as that is known without the recipe."""
        check_place(self.path, [], is_run=True)
        self._check_ours()
        if not (resume or overwrite):
            self.check_free()

    def _check_ours(self) -> None:
        if self.path.exists() and not (self.holds_run() or self.is_being_replaced() or self._was_half_created()):
            raise UserError(
                f"{self.path}: exists and is not a dmlkit run{self._environment_error()}; choose another --output"
            )

    def _environment_error(self) -> str:
        """Return the error in an environment.json next to a recipe: the folder may be a damaged run."""
        try:
            if self.recipe_path.exists() and self.environment_path.exists():
                Environment.read(self.environment_path)
        except UserError as error:
            return f" ({error})"
        return ""

    def create(self, recipe: "Recipe", basis: Basis | None = None, *, overwrite: bool, device: str = "cpu") -> None:
        """Start a new run in a locked folder; at its first checkpoint it replaces an old run and that run's outputs."""
        if not overwrite:
            self.check_free()
        elif self.holds_run():
            self._set_paths(self.path / NEW)
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        self.basis_path.unlink(missing_ok=True)  # of a killed `create`
        Environment.here(recipe, device).write(self.environment_path)
        self.write_recipe(recipe, basis)

    def check_free(self) -> None:
        """Check that a new run may start in the folder."""
        if self.holds_run():
            is_aligned = self.alignment_path.exists()
            kind = " that dmlkit align wrote, which cannot be trained further" if is_aligned else ""
            way = "" if is_aligned else "continue it with --resume, "
            raise UserError(
                f"{self.path}: this folder already holds a run{kind}; {way}replace it with --overwrite, or choose "
                "another --output"
            )

    def write_recipe(self, recipe: "Recipe", basis: Basis | None) -> None:
        """Write the recipe with which the run starts or continues, and its reference run, which may have gone on."""
        from dmlkit.recipe.file import dump_recipe

        if basis is not None:
            basis.write(self.basis_path)
        write_text(self.recipe_path, dump_recipe(recipe))

    def _was_half_created(self) -> bool:
        """Return whether the folder has only files that a killed `create` may leave."""
        ours = ("checkpoints", "basis.json", "environment.json", LOCK)
        return (
            self.path.is_dir()
            and all(entry.name in ours or is_partial(entry) for entry in self.path.iterdir())
            and (Environment.is_at(self.environment_path) or not self.environment_path.exists())
            and not (self.checkpoints.exists() and any(self.checkpoints.iterdir()))
        )

    def recipe(self, overrides: Sequence[str] = ()) -> "Recipe":
        """Read the resolved recipe of the run; its dataset keeps to the run's classes, see `DatasetConfig.of_run`."""
        from dmlkit.recipe.file import read_recipe

        require_run(self.path)
        if self.model is not None:
            from dmlkit.run_folder.pretrained import pretrained_recipe

            return pretrained_recipe(self.model, overrides)
        open_plugins(Environment.read(self.environment_path).plugins, str(self.path))
        recipe = read_recipe(self.recipe_path, overrides, is_trained=True)
        return recipe.model_copy(update={"dataset": recipe.dataset.of_run(self.classes())})

    def classes(self) -> "SplitClasses | None":
        """Read the classes of each split; None for a run that was killed before it wrote them."""
        from dmlkit.datasets.files.class_names import SplitClasses

        if not self.classes_path.exists() and not any(self.checkpoints.glob("*.pt")):
            return None
        stored, basis = RunClasses.read(self.classes_path), self.basis()
        names = {"train": stored.training_classes, "validation": stored.validation_classes, "test": stored.test_classes}
        reference = f"; {basis.line()}; use {basis.run} instead" if basis else ""
        return SplitClasses(str(self.path), names, reference, stored.known_images)

    def training_classes(self) -> tuple[str, ...]:
        """Return the names of the labels 0..C-1 of the loss's proxies."""
        classes = self.classes()
        return tuple(classes.names["train"]) if classes else ()

    def basis(self) -> Basis | None:
        """Read the reference run of a model that ``dmlkit final`` trained; None for other runs."""
        return Basis.read(self.basis_path) if self.basis_path.exists() else None

    def check_same_recipe(self, recipe: "Recipe") -> None:
        """Check that a run is continued with its own recipe, except `OF_PHOTOS` and `FREE`, and with its plug-ins.

        It may have more epochs if the weights are then those of a run that had as many from the start: the schedule of
        the learning rate does not depend on their number, or only ``training.stop_after`` ended it earlier.
        """
        from dmlkit.recipe.file import plain

        if self.alignment_path.exists():
            raise UserError(
                f"{self.path}: was written by dmlkit align and cannot be trained further; choose another --output"
            )
        plugins = changed_plugins(Environment.read(self.environment_path).plugins)
        if plugins:
            raise UserError(
                f"{self.path}: {'; '.join(plugins)}; restore that plug-in, or start a new run in another --output"
            )
        own_recipe = self.recipe()
        before, now = own_recipe.training, recipe.training
        spans = recipe.schedule.spans_training and now.epochs != before.epochs
        free = FREE if spans or now.trained_epochs < before.trained_epochs else (*FREE, *LENGTH)
        changes = list(differences("", *(_without_free_keys(plain(recipe_), free) for recipe_ in (own_recipe, recipe))))
        if changes:
            way = "undo the change, or start a new run in another --output"
            if spans and now.trained_epochs > before.trained_epochs:
                advised = f"backbone.weights={self.checkpoint_path('last')}"
                if recipe.backbone.tuning.name == "full" and _takes(recipe, advised):
                    way += f", e.g. from these weights: --set {command_word(advised)}"
                way += f"; with the schedule {recipe.schedule.name} more epochs change those before them"
            raise UserError(f"{self.path}: the recipe has changed since this run started ({'; '.join(changes)}); {way}")

    def check_same_classes(self, classes: RunClasses) -> None:
        """Check that a run is continued with its own classes, of those that its data have now.

        Another number of images is reported.
        """
        started = RunClasses.read(self.classes_path)
        for kind in ("training_classes", "validation_classes"):
            before, now = set(getattr(started, kind)), set(getattr(classes, kind))
            if lost := sorted(before - now):
                raise UserError(
                    f"{self.path}: cannot continue without {len(lost)} of its {len(before)} {kind.replace('_', ' ')} "
                    f"({some_of(lost)}); restore the photos, or start a new run in another --output"
                )
        if started.images != classes.images:
            warn(
                f"{self.path}: its training classes had {started.images:,} images when this run started, and have "
                f"{classes.images:,} now; the result will differ from that of an uninterrupted run"
            )

    def save_checkpoint(self, name: CheckpointName, state: dict[str, Any]) -> None:
        """Write a checkpoint, see `write_checkpoint`; with the first ``last.pt`` a new run replaces an old one."""
        from dmlkit.run_folder.checkpoint_file import write_checkpoint

        write_checkpoint(self.checkpoint_path(name), state)
        if name == "last":
            take_over(self.path)
            self._set_paths(self.path)

    def load_checkpoint(self, name: CheckpointName) -> dict[str, Any]:
        """Read a checkpoint onto the CPU."""
        from dmlkit.recipe.file import parse_recipe, plain
        from dmlkit.run_folder.checkpoint_file import CHECKPOINTS, read_checkpoint

        path = self.checkpoint_path(name)
        if self.model is not None:
            raise UserError(f"--checkpoint {name}: {self.model} is not trained; remove this option")
        if name not in CHECKPOINTS:
            raise UserError(f"{path}: there is no such checkpoint of trained weights; expected best or last")
        state = read_checkpoint(path, CHECKPOINTS[name])
        # an equal text needs no check, which would import the backbone's library
        if state["recipe"] != self.recipe_path.read_text(encoding="utf-8"):
            recipes = (plain(parse_recipe(state["recipe"], f"{path}: recipe", is_trained=True)), plain(self.recipe()))
            theirs, ours = ({key: recipe[key] for key in WEIGHT_KEYS} for recipe in recipes)
            changes = list(differences("", theirs, ours))
            if changes:
                raise UserError(
                    f"{path}: this is a checkpoint of another run ({'; '.join(changes)}); restore this run's "
                    "checkpoint, or train again"
                )
        return state

    def read_metrics(self) -> list[EpochRow]:
        """Read the rows of metrics.jsonl, one per finished epoch; a last line cut off by a crash is left out."""
        if not self.metrics_path.exists():
            return []
        lines = self.metrics_path.read_text(encoding="utf-8", errors="replace").splitlines()
        rows: list[EpochRow] = []
        for number, line in enumerate(lines, start=1):
            try:
                rows.append(EpochRow.from_json(line, f"{self.metrics_path}:{number}"))
            except UserError:
                if number < len(lines):
                    raise
        return rows

    def append_metrics(self, row: EpochRow) -> None:
        """Add a row to metrics.jsonl."""
        with self.metrics_path.open("a", encoding="utf-8") as file:
            file.write(row.json_line())
            file.flush()
            os.fsync(file.fileno())  # the checkpoint that follows is flushed to disk too, and relies on this row

    def keep_metrics(self, epochs: int) -> None:
        """Remove the rows of epochs after the first ``epochs``, which will be trained again."""
        rows = [row for row in self.read_metrics() if row.epoch <= epochs]
        write_text(self.metrics_path, "".join(row.json_line() for row in rows))


def take_over(folder: Path) -> None:
    """Replace the old run by a new one that has a checkpoint; continue a replacement that was interrupted.

    Each step can be interrupted and resumed.
    """
    new, moving = folder / NEW, folder / MOVING
    if not moving.exists():
        if not (new / "checkpoints" / "last.pt").exists():
            return
        for path in map(folder.joinpath, OF_RUN):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        new.rename(moving)
    # the checkpoints are moved last: until then the run cannot be mistaken for a complete one
    for path in sorted(moving.iterdir(), key=lambda path: path.name == "checkpoints"):
        path.replace(folder / path.name)
    moving.rmdir()


def check_one_way(*, resume: bool, overwrite: bool) -> None:
    """Raise a `UserError` if a run is to be both continued and replaced."""
    if resume and overwrite:
        raise UserError("--resume continues a run and --overwrite deletes it; use only one of them")


def find_run(recorded: Path, near: Path) -> Path | None:
    """Return where a run is that was recorded with its absolute path: there, or moved together with another folder.

    A folder above ``near`` may hold the run by the same end of its path, e.g. runs/two; the longest end is taken. The
    fingerprint of its weights says whether this is the recorded run.
    """
    if RunFolder(recorded).holds_run():
        return recorded
    ends = [Path(*recorded.parts[start:]) for start in range(1, len(recorded.parts))]
    places = (above / end for end in ends for above in near.resolve().parents)
    return next((place for place in places if RunFolder(place).holds_run()), None)


def _takes(recipe: "Recipe", change: str) -> bool:
    """Return whether a recipe stays valid with a change of its weights, from which ``pretrained`` takes its values."""
    from dmlkit.recipe.file import parse_recipe, plain

    data = plain(recipe)
    if data["transform"] and data["transform"]["name"] == "pretrained":
        del data["transform"]["resize"]  # which has come from the weights
    try:
        parse_recipe(json.dumps(data), "recipe", [change])
    except UserError:
        return False
    return True


def _without_free_keys(recipe: dict[str, Any], free: Sequence[str]) -> dict[str, Any]:
    training = {key: value for key, value in recipe["training"].items() if key not in free}
    dataset = {key: value for key, value in recipe["dataset"].items() if key not in OF_PHOTOS}
    return {**recipe, "training": training, "dataset": dataset}


def aligned_place(path: Path, output: Path | None) -> Path:
    """Return the folder of an aligned copy of a run: by default its own with ``-aligned`` at the end."""
    run = named(path)
    place = output or run.with_name(f"{run.name}-aligned")
    if place.exists():
        raise UserError(f"{place}: exists already; choose another --output")
    return place


def final_place(path: Path, output: Path | None) -> Path:
    """Return the folder of the final run of a run: by default its own with ``-final`` at the end."""
    if model_name(path) is not None:
        raise UserError(f"{path}: is a pretrained model, which has no recipe to train; expected a run of dmlkit train")
    run = named(path)
    place = output or run.with_name(f"{run.name}-final")
    if place.resolve() == path.resolve():
        raise UserError(f"--output {place}: is the run to train again on every class; expected another folder")
    return place


def named(path: Path) -> Path:
    """Return a path that ends with the name of the folder: an absolute one in place of ``.`` and ``..``."""
    return path.resolve() if path.name in ("", "..") else path
