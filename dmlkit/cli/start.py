"""``dmlkit start``: a first recipe for your photos."""

import os
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from dmlkit.cli.console import bars, counted, print_table, say, say_prose
from dmlkit.cli.option_groups import TableOptions
from dmlkit.cli.options import Device, Writes, command, stem_of
from dmlkit.errors import UserError, some_of
from dmlkit.files.escape import command_word
from dmlkit.files.outputs import check_file, write_output
from dmlkit.files.source import require_dataset

if TYPE_CHECKING:
    from dmlkit.datasets.base import DatasetConfig
    from dmlkit.loading.check import Survey
    from dmlkit.metrics.statistics import Interval
    from dmlkit.training.estimate import TrainingPlan
    from dmlkit.training.start import Start

BUSY = 0.5  # share of the cores that other programs use, from which on a measured time is clearly too long


@command("dmlkit start photos/")
def start(
    photos: Annotated[
        Path, "ROOT|TABLE", "Folder with one subfolder per class, or table of images and labels.", require_dataset
    ],
    /,
    table: TableOptions,
    output: Annotated[
        Path | None,
        "FILE",
        "Recipe to write. Default: the name of ROOT with .yaml, in the current folder.",
        Writes(check_file),
    ] = None,
    budget: Annotated[
        str | None, "TIME", "Time that training may take, e.g. 10m or 2h. Default: 10m, with a GPU 30m."
    ] = None,
    download: Annotated[bool, "Also measure models whose weights must be downloaded first."] = False,
    quick: Annotated[bool, "Measure and time nothing; the recipe trains a small network."] = False,
    license_only: Annotated[
        Literal["free"] | None, "free", "Leave out models whose license does not allow every use."
    ] = None,
    device: Device = "auto",
) -> None:
    """Measure pretrained models on your photos, and write a first recipe with a comment on each choice."""
    if quick and (budget is not None or download):
        raise UserError("--quick measures and times nothing; remove --budget and --download, or --quick")
    if output is None:
        place = photos.resolve()
        output = Path(f"{place.name if place.is_dir() else place.stem}.yaml")
        if output.exists():
            way = f"choose another name with -o, or replace it with -o {command_word(output)}"
            raise UserError(f"{output}: exists already; {way}")
        check_file(output, sources=[photos])

    from dmlkit.backbones.weights import UNKNOWN, license_words
    from dmlkit.loading.check import dataset_at
    from dmlkit.recipe.start import TUNING_WORDS
    from dmlkit.study.status import parse_duration
    from dmlkit.training.start import start as first_recipe

    seconds = 0 if quick else None if budget is None else parse_duration(budget, "--budget")
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0  # of the minute before this command computes
    config = dataset_at(photos, columns=table.columns(), root=table.root)
    print_nesting(config)
    options: dict[str, Any] = {"download": download, "license_only": license_only}
    choice = first_recipe(config, budget=seconds, device=device, bar=bars(), **options)
    write_output(output, choice.text)  # before it is printed: its reader may end, e.g. head
    print_survey(choice.survey, str(photos))
    print_several_labels(config, choice.survey)
    print_measured(choice)
    say(f"wrote {output}: {counted(choice.recipe.training.epochs, 'epoch')}")
    backbone = choice.setting.backbone
    weights = license_words(choice.recipe.backbone.license() or UNKNOWN)
    say_prose(f"{backbone.title}, {weights}: trains {TUNING_WORDS[choice.setting.tuning]}")
    for line in (*choice.notes, *([] if choice.plan is None else shown(choice.plan, choice.budget, load))):
        say_prose(line)
    run = command_word(f"runs/{stem_of(output)}")
    say(f"next: dmlkit train {command_word(output)} -o {run}")
    say(f"then: dmlkit final {run}, to train on every {'image' if choice.survey.dataset.tests_known else 'class'}")


def print_measured(start: "Start") -> None:
    """Print a table of the pretrained models, and which one is better but not free."""
    rows: list[list[str | list[str]]] = [["pretrained model", "images/s", "recall@1", "map@r"]]
    for measured in start.measured:
        values = [with_ends(measured.intervals[name]) for name in ("recall@1", "map@r")]
        model = [measured.backbone.title, f"{measured.license}, {measured.size} pixels"]
        rows.append([model, f"{measured.images_per_second:.3g}", *values])
    if start.measured:
        evaluation = start.measured[0].evaluation
        classes = counted(len(evaluation.labels.unique()), "training class", "training classes")
        print_table(rows, f"before training, on {counted(len(evaluation.labels), 'photo')} of {classes}")
    if start.better is not None:
        say_prose(
            f"{start.better.backbone.title} is better, but has the license {start.better.license}, which does not "
            f"allow every use; to take it, set backbone.model to {start.better.backbone.model}"
        )


def print_several_labels(config: "DatasetConfig", survey: "Survey") -> None:
    """Print that labels of a table with a | are taken as one class each; half of the classes are looked at."""
    from dmlkit.datasets.table import TableConfig

    joined = next((name for names in survey.held_out.values() for name in names if "|" in name), None)
    if isinstance(config, TableConfig) and joined is not None:
        say_prose(
            f'{joined} is taken as the name of one class; if it is several labels of an image, write separator: "|" '
            "below dataset in the recipe, and choose a loss that compares pairs, see docs/data.md"
        )


def print_survey(survey: "Survey", title: str) -> None:
    """Print one row per split, the sizes of classes and images, what is not trained on, and what is not used."""
    images, classes, is_known = {**survey.images}, {**survey.classes}, survey.dataset.tests_known
    if "validation" in survey.held_out and not survey.names_validation:  # cut from the training split
        images |= {"train": survey.trained, "validation": survey.images["train"] - survey.trained}
        held_out = len(survey.held_out["validation"])
        classes |= {"train": survey.classes["train"] - held_out * (not is_known), "validation": held_out}
    rows = [["split", "images", "classes"]]
    rows += [[split, f"{count:,}", f"{classes[split]:,}"] for split, count in images.items() if count]
    print_table(rows, title)
    smallest, median, largest = survey.per_class
    say(f"images per training class: {smallest} to {largest}, median {median:g}")
    smallest, median, largest = survey.sides
    say(f"shorter side: {smallest} to {largest} pixels, median {median:g}")
    for split, names in survey.held_out.items() if not is_known else ():
        say_prose(f"not trained on: {len(names)} {split} classes: {some_of(names)}")
    if "validation" not in survey.held_out:
        say(f"no validation: too few {'images of each class' if is_known else 'training classes'} to hold some out")
    for note in survey.notes:
        say_prose(note)
    if survey.unreadable:
        number = f"{len(survey.unreadable)} of {counted(survey.measured, 'image')}"
        say(f"cannot be opened: {number}: {some_of(survey.unreadable)}", style="yellow")
        say("train stops at such images: remove them, or set on_bad_image: skip", style="yellow")


def print_nesting(config: "DatasetConfig") -> None:
    """Print that the outermost of nested folders are the classes, and how to choose the innermost."""
    from dmlkit.datasets.folder import FolderConfig, folder_levels, is_split

    if not isinstance(config, FolderConfig) or config.levels:
        return
    root = Path(config.root)
    top = root / "train" if is_split(root) else root
    folders_by_level = folder_levels(top) if top.is_dir() else []  # listing the images reports a missing one
    if len(folders_by_level) < 2:
        return
    depth, path = len(folders_by_level), folders_by_level[-1][0]
    levels = ", ".join(f"level{number}" for number in range(1, depth)) + ", class"
    say_prose(
        f"the folders are nested, e.g. {path}, and the outermost are the classes; for the innermost, write levels: "
        f"[{levels}] (names of your choice) below dataset in the recipe, see docs/guides/hierarchy.md"
    )


def shown(plan: "TrainingPlan", budget: float, load: float = 0.0) -> list[str]:
    """Return how long a recipe trains on this machine, and what a larger budget would change.

    Args:
        load: how many of the cores other programs used before it was measured.
    """
    from dmlkit.recipe.start import TUNING_WORDS

    seconds, speed, larger = plan.estimate.seconds, plan.estimate.images_per_second, plan.larger
    lines = [f"training takes about {duration(seconds)} on this machine ({speed:.3g} images/s)"]
    if load > BUSY * (cores := os.cpu_count() or 1):
        lines[0] += f", less while no other program uses it (load {load:.1f} on {counted(cores, 'core')})"
    if plan.setting.chunk:
        lines.append(
            f"a batch takes {plan.memory / 1e9:.1f} GB, more than 60 % of the free memory, so it is embedded in chunks "
            f"of {plan.setting.chunk} images (training.gradient_cache), which takes a third longer"
        )
    if seconds > budget:
        untrained = f"timm:{plan.setting.backbone.model} in place of a run needs no training"
        lines.append(f"this is more than the budget of {duration(budget)}, and nothing here takes less; {untrained}")
    if plan.disk:
        lines.append(
            f"{TUNING_WORDS['stored_maps']} would take {plan.disk / 1e9:.3g} GB of this disk, which has less; free "
            "some space, or run start on another disk"
        )
    if larger is not None:
        lines.append(f"{TUNING_WORDS[larger[0]]} would take {duration(larger[1])} and give more: see --budget")
    return lines


def with_ends(interval: "Interval") -> str:
    """Return a mean with the ends of its interval, unless there are too few classes for one.

    Example:
        >>> from dmlkit.metrics.statistics import Interval
        >>> with_ends(Interval(0.803, 0.741, 0.858)), with_ends(Interval(0.9, -inf, inf))
        ('0.80 (.74-.86)', '0.90')
    """
    low, high = (f"{end:.2f}".removeprefix("0") for end in (interval.low, interval.high))
    return f"{interval.mean:.2f} ({low}-{high})" if interval.high < inf else f"{interval.mean:.2f}"


def duration(seconds: float) -> str:
    """Return a time in words.

    Example:
        >>> duration(20), duration(400), duration(90_000)
        ('20 s', '7 min', '25 h')
    """
    minutes = round(seconds / 60)
    if seconds < 60:
        return f"{max(1, round(seconds))} s"
    return f"{minutes} min" if minutes < 120 else f"{round(minutes / 60)} h"
