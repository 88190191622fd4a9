"""The training scripts of papers' authors compared with dmlkit: the same network, photos and kind of batches.

Run: python benchmarks/authors.py PHOTOS CHECKOUTS [CASE ...]. PHOTOS are those of `recipes/cars`; CHECKOUTS is a folder
with the authors' repositories (`git clone https://github.com/OWNER/NAME`, see `CASES`). A case is one loss and takes
two or three trainings per seed, of 2 minutes on one thread. Figures are kept in runs/authors; the same command resumes.

The network is the last two stages of EfficientNet-Lite0 on stored maps of four views, see `recipes/study/cars.yaml`,
with the weights that dmlkit starts from. Five epochs on 78 classes; both sides are scored by R@1 on 20 validation
classes after each epoch, and on the 98 test classes after the last one. Proxies have the norm that the script gives
them before training, and in the last column that of dmlkit, which is 1. A script runs as it is, with its own loss,
optimizer, loop and evaluation, but for what `borrowed` puts in place of what it imports: the network, the photos, CUDA,
a logging service, and a sampler that needs 96 classes.
"""

import contextlib
import json
import random
import runpy
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import MagicMock, patch

import matplotlib.pyplot as plt
import numpy as np
import torch
from report import write_report
from torch import Tensor, nn

from dmlkit.distributed.launch import keep_freed_memory, start_ranks
from dmlkit.evaluation.evaluate import evaluate
from dmlkit.metrics.statistics import t_interval
from dmlkit.recipe.file import read_recipe
from dmlkit.recipe.schema import Recipe
from dmlkit.run_folder.folder import RunFolder
from dmlkit.training.data import TrainingData, feature_jobs, training_data
from dmlkit.training.experiment import assemble
from dmlkit.training.progress import Silent
from dmlkit.training.train import train
from dmlkit.vectors.features import CachedFeatures, DrawnViews

RECIPES = Path(__file__).parent.parent / "recipes/cars"
RUNS = Path("runs/authors")
SEEDS = (0, 1, 2)
EPOCHS = 5
COMMON = (
    f"backbone.tuning={{name: last_blocks, blocks: 2, feature_views: 4, cache: {RUNS / 'maps'}}}",
    f"training={{epochs: {EPOCHS}, validate_every: 1, workers: 0}}",
    "schedule={name: constant}",
    "optimizer.lr=1e-4",
    "optimizer.weight_decay=1e-4",
    "optimizer.lr_multipliers={loss: 100}",
)


@dataclass(frozen=True)
class Case:
    """A loss by the script of its authors, and what the recipe of `recipes/cars` changes to follow the script."""

    repository: str
    script: str
    arguments: str
    changes: tuple[str, ...] = ()
    proxy_norm: float | None = None
    """Norm that the script gives proxies before training; None for a loss without proxies."""


CONTEXTUAL = "Chris210634/metric-learning-using-contextual-similarity"
CONTEXTUAL_ARGUMENTS = (
    f"--dataset cars --batch-size 112 --epochs {EPOCHS} --workers 0 --lr-decay-step 100 --testfreq 1 "
    "--bottleneck identity --train_embedding 512 --gamma 0"
)
CASES = {
    "proxy_anchor": Case(
        "tjddus9597/Proxy-Anchor-CVPR2020",
        "code/train.py",
        f"--dataset cars --model googlenet --batch-size 112 --epochs {EPOCHS} --workers 0 --warm 1 --bn-freeze 1",
        ("backbone.freeze_epochs=1", "training.clip_grad_value=10"),
        proxy_norm=3.62,  # sqrt(2D / C)
    ),
    "proxy_gml": Case(
        "YuehuaZhu/ProxyGML",
        "train.py",
        f"--dataset cars196 --batch-size 112 --epochs {EPOCHS} --workers 0 --warm 0 --freeze_BN -C 78 --N 12 --r 0.05 "
        f"--weight_lambda 0.3 --epoch_to_test {' '.join(map(str, range(1, EPOCHS + 1)))}",
        ("optimizer.name=adam", "optimizer.eps=0.01", "optimizer.lr_multipliers={loss: 300}"),
        proxy_norm=0.427,  # sqrt(D / 3CN)
    ),
    "multi_similarity": Case(CONTEXTUAL, "224x224/train.py", f"{CONTEXTUAL_ARGUMENTS} --loss MS+miner --IPC 4"),
    "norm_softmax": Case(
        CONTEXTUAL,
        "224x224/train.py",
        f"{CONTEXTUAL_ARGUMENTS} --loss NormalizedSoftmax --IPC 0",
        proxy_norm=22.6,  # sqrt(D)
    ),
}


@dataclass(frozen=True)
class Curve:
    """R@1 on validation classes after each epoch, and on test classes at the end."""

    validation: list[float]
    test: float


class Network(nn.Module):
    """Our network under the names that the authors' scripts ask for."""

    def __init__(self, part: Any) -> None:
        super().__init__()
        self.model = part
        part.embedding = self.embedding = part.head.linear

    def forward(self, maps: Tensor) -> Tensor:
        return self.model(maps)


class Maps(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """Stored maps as a data set of the authors' scripts; those of training are of a random view."""

    def __init__(self, features: CachedFeatures) -> None:
        self.features, self.ys = features, features.labels.tolist()
        self.class_to_idx = {name: number for number, name in enumerate(features.class_names)}

    def nb_classes(self) -> int:
        return len(self.class_to_idx)

    def __len__(self) -> int:
        return len(self.ys)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.features.view(index, random.randrange(self.features.views)).float(), self.ys[index]


class BalancedBatches(torch.utils.data.Sampler[int]):
    """As the contextual repository's `BalancedSampler`, which draws 96 classes at once, and so needs as many."""

    def __init__(self, data_source: Maps, batch_size: int, images_per_class: int) -> None:
        self.labels, self.batch_size, self.images = np.array(data_source.ys), batch_size, images_per_class

    def __len__(self) -> int:
        return len(self.labels) // self.batch_size * self.batch_size

    def __iter__(self) -> Iterator[int]:
        for _ in range(len(self) // self.batch_size):
            for label in np.random.choice(self.labels.max() + 1, self.batch_size // self.images, replace=False):
                yield from np.random.choice(np.flatnonzero(self.labels == label), self.images, replace=False)


def recipe_of(loss: str, photos: str, seed: int, proxy_norm: float | None) -> Recipe:
    norm = [] if proxy_norm is None else [f"loss.proxy_norm={proxy_norm}"]
    changes = (*COMMON, *CASES[loss].changes, *norm, f"dataset.root={photos}", f"seed={seed}")
    return read_recipe(RECIPES / f"{loss}.yaml", list(changes))


def ours(loss: str, photos: str, seed: int, proxy_norm: float | None) -> Curve:
    run = RunFolder(RUNS / f"{loss}-{seed}-{proxy_norm}")
    summary = train(recipe_of(loss, photos, seed, proxy_norm), run.path, device="cpu", resume=True)
    assert summary.last.test is not None
    curve = [row.validation["recall@1"] for row in run.read_metrics() if row.validation]
    return Curve(curve, summary.last.test["recall@1"])


def theirs(loss: str, photos: str, seed: int, checkouts: Path) -> Curve:
    case, recipe, ranks = CASES[loss], recipe_of(loss, photos, seed, None), start_ranks("cpu")
    experiment = assemble(recipe)
    with TemporaryDirectory() as name:
        data = training_data(experiment, feature_jobs(experiment, ranks), RunFolder(Path(name)), ranks, Silent())
        assert data.test is not None
        script = checkouts / case.repository.partition("/")[2] / case.script
        curve: list[float] = []
        with borrowed(script, case.arguments, data, seed, curve), contextlib.chdir(name):
            Path("data").mkdir()
            Path("code").mkdir()
            with contextlib.chdir("code"):
                runpy.run_path(str(script), run_name="__main__")
        data.model.eval()
        test = evaluate(ranks, data.model, data.test, recipe, split="test")
    return Curve(curve, test.scores.values["recall@1"])


@contextmanager
def borrowed(script: Path, arguments: str, data: TrainingData, seed: int, curve: list[float]) -> Generator[None]:
    """Let a script find our network and photos where it looks for its own, and a CPU instead of CUDA.

    Args:
        curve: receives R@1 on the validation classes by the script's own evaluation.
    """
    assert isinstance(data.training, DrawnViews) and isinstance(data.validation, CachedFeatures)
    network, parts = Network(data.model), (Maps(data.training.features), Maps(data.validation))

    def dataset(*_: object, mode: str = "", **__: object) -> Maps:
        seed_all(seed)
        return parts[mode == "eval"]

    def folder(root: str, *_: object) -> Maps:
        return parts[Path(root).name == "test"]

    def recorded(evaluation: Callable[..., Any], part: int) -> Callable[..., Any]:
        def wrapped(*args: Any) -> Any:
            if isinstance(loader := args[1], torch.utils.data.DataLoader) and loader.dataset is not parts[1]:
                return [0.0] * 8  # the contextual repository also evaluates the training photos
            result = evaluation(*args)
            curve.append(float(result[part][0] if part else result[0]))
            return result

        return wrapped

    def on_cpu(move: Callable[..., Any]) -> Callable[..., Any]:
        def moved(target: Any, *args: Any, **options: Any) -> Any:
            return move(target, *("cpu" if arg == "cuda" else arg for arg in args), **options)

        return moved

    def itself(target: Any, *_: object, **__: object) -> Any:
        return target

    def given(*_: object, **__: object) -> Network:
        return network

    before = set(sys.modules)
    absent: Any = {"wandb": MagicMock(), "graphviz": MagicMock()}  # packages that the scripts import for their logs
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(sys, "argv", [script.name, *arguments.split()]))
        stack.enter_context(patch.object(sys, "path", [str(script.parent), *sys.path]))
        stack.enter_context(patch.dict(sys.modules, absent))
        for owner, name, value in (
            (Tensor, "cuda", itself),
            (nn.Module, "cuda", itself),
            (Tensor, "to", on_cpu(Tensor.to)),
            (nn.Module, "to", on_cpu(nn.Module.to)),
            (torch.cuda, "set_device", MagicMock()),
            (torch.cuda, "current_device", lambda: 0),
        ):
            stack.enter_context(patch.object(owner, name, value))
        if (script.parent / "dataset").is_dir():
            names, utils = import_module("dataset"), import_module("utils")
            stack.enter_context(patch.object(names, "load", dataset))
            stack.enter_context(patch.object(utils, "evaluate_cos", recorded(utils.evaluate_cos, 0)))
            for module, name in (("net.googlenet", "googlenet"), ("net.resnet", "Resnet50")):
                with contextlib.suppress(ModuleNotFoundError):
                    stack.enter_context(patch.object(import_module(module), name, given))
            if "contextual" in str(script):
                stack.enter_context(patch.object(import_module("dataset.sampler"), "BalancedSampler", BalancedBatches))
        else:
            evaluation = import_module("evaluation")
            stack.enter_context(patch.object(evaluation, "evaluation", recorded(evaluation.evaluation, 1)))
            stack.enter_context(patch.object(import_module("net"), "bninception", given))
            stack.enter_context(patch("torchvision.datasets.ImageFolder", folder))
            seed_all(seed)
        yield
    for name in set(sys.modules) - before:
        if str(script.parent) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]  # the next script has modules of the same names


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def kept(path: Path, compute: Callable[[], Curve]) -> Curve:
    if path.exists():
        return Curve(**json.loads(path.read_text()))
    curve = compute()
    path.write_text(json.dumps({"validation": curve.validation, "test": curve.test}))
    return curve


def main(photos: str, checkouts: Path, cases: list[str]) -> None:
    """Train what is not trained yet; write the table and the picture if all cases are there."""
    keep_freed_memory()
    RUNS.mkdir(parents=True, exist_ok=True)
    curves: dict[str, list[tuple[Curve, ...]]] = {}
    for loss in cases or list(CASES):
        norm = CASES[loss].proxy_norm
        for seed in SEEDS:
            sides = {
                "theirs": partial(theirs, loss, photos, seed, checkouts),
                "ours": partial(ours, loss, photos, seed, norm),
            }
            if norm is not None:
                sides["norm_1"] = partial(ours, loss, photos, seed, 1.0)
            finished = {side: kept(RUNS / f"{loss}-{seed}-{side}.json", compute) for side, compute in sides.items()}
            curves.setdefault(loss, []).append(tuple(finished.values()))
            print(
                f"{loss}, seed {seed}: {', '.join(f'{side} {curve.test:.3f}' for side, curve in finished.items())}",
                flush=True,
            )
    if len(curves) == len(CASES):
        write_table(curves)
        draw(curves)


def write_table(curves: dict[str, list[tuple[Curve, ...]]]) -> None:
    rows: list[list[str]] = []
    for loss, seeds in curves.items():
        tests = [[curve.test for curve in side] for side in zip(*seeds, strict=True)]
        interval = t_interval([here - there for there, here in zip(tests[0], tests[1], strict=True)])
        cells = [f"{fmean(side):.3f} ({'  '.join(f'{test:.3f}' for test in side)})" for side in tests]
        repository = CASES[loss].repository
        rows.append(
            [
                f"`{loss}`",
                f"[{repository}](https://github.com/{repository})",
                *cells[:2],
                f"{interval.mean:+.3f} ± {interval.high - interval.mean:.3f}",
                *(cells[2:] or [""]),
            ]
        )
    header = ["loss", "script", "R@1 by the script, mean (seeds)", "R@1 by dmlkit", "difference, 95 % by Student's t"]
    header.append("R@1 by dmlkit, proxies of norm 1")
    write_report("authors", __doc__, header, rows)


def draw(curves: dict[str, list[tuple[Curve, ...]]]) -> None:
    figure, axes = plt.subplots(1, len(curves), figsize=(3 * len(curves), 3), sharey=True, layout="constrained")
    for axis, (loss, seeds) in zip(axes, curves.items(), strict=True):
        for label, color, side in zip(
            ("the authors' script", "dmlkit"), ("C1", "C0"), list(zip(*seeds, strict=True))[:2], strict=True
        ):
            for number, curve in enumerate(side):
                axis.plot(range(1, EPOCHS + 1), curve.validation, color=color, label=None if number else label)
        axis.set(title=loss, xlabel="epoch", xticks=range(1, EPOCHS + 1))
    axes[0].set_ylabel("R@1 on validation classes")
    axes[0].legend()
    figure.savefig(Path(__file__).parent.parent / "docs/papers/authors.png", dpi=120)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]).resolve(), sys.argv[3:])
