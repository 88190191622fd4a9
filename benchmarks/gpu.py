"""GPU benchmarks, in parts; each part prints a table and writes it to benchmarks/results/gpu_PART.md.

losses: forward and backward pass of proxy losses, in float32 and under bf16 autocast, compared with three products.
training: images/s of `dmlkit train` compared with a bare loop of the same model, loss and optimizer, which has all
    images on the device before it starts: what the card can do. Glyphs of 128 pixels, channels last, with and without
    `training.compile`; the seconds of the first epoch contain its compilation. Where training waits, readers limit it.
share: forward and backward pass of Proxy-Anchor and of a ResNet-50 in bf16, and the loss's share of both.
loader: JPEGs of 500 x 375 pixels to crops of 224 pixels on the device, compared with torchvision's ImageFolder and
    DataLoader.
evaluation: recall and MAP@R of 512-dimensional unit vectors, compared with the product of all queries and the gallery.
embed: images/s of `dmlkit.load(RUN).embed`, compared with a bare loop of the same model.

All parts: benchmarks/gpu.sh [--tiny], with QUICK=1 the first. One part: python benchmarks/gpu.py losses [--tiny]. With
--tiny, a part runs with small sizes on any device and writes nothing.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import losses
import numpy as np
import report
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder

import dmlkit
from dmlkit.distributed.launch import start_ranks
from dmlkit.loading.batches import TrainingBatches, make_loader
from dmlkit.loading.inputs import inputs_of
from dmlkit.metrics import retrieval_metrics
from dmlkit.model import build_model
from dmlkit.recipe.file import parse_recipe
from dmlkit.recipe.schema import Recipe
from dmlkit.run_folder.documents import EpochRow
from dmlkit.run_folder.folder import RunFolder
from dmlkit.training.train import train

OVER_PROXIES = ("proxy_anchor", "proxy_nca", "norm_softmax", "cosface", "arcface", "proxy_isa", "proxy_gml", "mpa")
FEW_PROXIES = ("proxy_anchor", "norm_softmax", "cosface")  # those whose proxies of a million classes fit any GPU
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIDE = 128 if DEVICE == "cuda" else 32  # pixels; at 128, ResNet-50 in bf16 takes a CPU over 3 minutes
BACKBONES = {
    "resnet50": "{name: resnet50}",
    "vit_base": f"{{name: timm, model: vit_base_patch16_224, image_size: {SIDE}}}",
    "convnext_tiny": "{name: timm, model: convnext_tiny}",
}
MODES = (("fp32", False), ("bf16", False), ("bf16", True))  # precision, and whether it is compiled
Row = list[str]


def wait() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def seconds(run: Callable[[], object]) -> float:
    wait()
    started = time.perf_counter()
    run()
    wait()
    return time.perf_counter() - started


def loss_rows(tiny: bool) -> list[Row]:
    rows: list[Row] = []
    sizes = ((20, 20), (30, 20), (40, 20)) if tiny else ((100, 180), (11_318, 180), (1_000_000, 512))
    for classes, batch in sizes:
        for name in OVER_PROXIES if classes < 10**6 else FEW_PROXIES:
            loss = losses.ours(name, classes, DEVICE)
            columns = loss.get_parameter("proxies").numel() // losses.DIM
            for dtype in (torch.float32, torch.bfloat16):
                points, labels = losses.draw(classes, DEVICE, min(batch, 4 * classes))
                half = points.detach().to(dtype).requires_grad_()

                def run(
                    loss: nn.Module = loss, half: Tensor = half, labels: Tensor = labels, dtype: torch.dtype = dtype
                ) -> None:
                    half.grad = None
                    loss.zero_grad(set_to_none=True)
                    with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
                        value = loss(half, labels)
                    value.backward()

                floor = losses.products(len(labels), columns, DEVICE)
                mine, floor_ms = losses.take_turns([run, floor], DEVICE, repeats=2 if tiny else 20)
                kind = str(dtype).removeprefix("torch.")
                rows.append([name, str(classes), kind, f"{mine:.2f}", f"{floor_ms:.2f}", f"{mine / floor_ms:.2f}"])
    return rows


def recipe(backbone: str, precision: str, tiny: bool, *, compiled: bool = False) -> Recipe:
    classes, images, batch, epochs = (8, 4, 8, 2) if tiny else (60, 30, 64, 6)
    text = (
        f"dataset: {{name: glyphs, classes: {classes}, images_per_class: {images}, size: {SIDE}}}\n"
        f"transform: {{name: plain, size: {SIDE}}}\nbackbone: {BACKBONES[backbone]}\nloss: {{name: proxy_anchor}}\n"
        f"sampler: {{name: random, batch_size: {batch}}}\ntraining: {{epochs: {epochs}, precision: {precision}, "
        f"compile: {str(compiled).lower()}}}\n"
    )
    return parse_recipe(text, "gpu.py")


@cache
def glyphs(tiny: bool) -> tuple[Tensor, Tensor]:
    """All training images and labels, on the device; they are the same for every backbone and precision."""
    data = recipe("resnet50", "fp32", tiny).dataset.build("train")
    with ThreadPoolExecutor() as threads:
        images = list(threads.map(data.sample, range(len(data))))
    return torch.stack(images).to(DEVICE), data.labels.to(DEVICE)


def bare_images_per_second(settings: Recipe, tiny: bool) -> float:
    """The median over epochs after the first."""
    images, labels = glyphs(tiny)
    model = build_model(settings).to(DEVICE).train()
    if settings.training.compile:
        model.backbone.compile()
    loss = settings.loss.build(model.manifold, len(labels.unique())).to(DEVICE)
    parameters = [*model.parameters(), *loss.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=True)
    sampler = settings.sampler.build(labels.cpu(), 0)

    def epoch(number: int) -> None:
        for batch in sampler.batches(number):
            chosen = torch.as_tensor(batch, device=DEVICE)
            optimizer.zero_grad()
            with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=settings.training.precision == "bf16"):
                value = loss(model(images[chosen]), labels[chosen])
            value.backward()
            optimizer.step()

    speeds = [
        len(sampler) * sampler.batch_size / seconds(lambda n=n: epoch(n)) for n in range(settings.training.epochs)
    ]
    return statistics.median(speeds[1:])


def training_rows(tiny: bool) -> list[Row]:
    rows: list[Row] = []
    for backbone in BACKBONES:
        for precision, compiled in MODES:
            settings = recipe(backbone, precision, tiny, compiled=compiled)
            epochs = trained(settings)
            mine = statistics.median([row.images_per_second for row in epochs][1:])
            waiting = statistics.median([row.waiting for row in epochs][1:])
            bare = bare_images_per_second(settings, tiny)
            row = [backbone, precision, str(compiled).lower(), f"{epochs[0].seconds:.1f}"]
            rows.append([*row, f"{mine:.0f}", f"{waiting:.1%}", f"{bare:.0f}", f"{mine / bare:.3f}"])
    return rows


def share_rows(tiny: bool) -> list[Row]:
    model = build_model(recipe("resnet50", "bf16", tiny)).to(DEVICE).train()
    rows: list[Row] = []
    for classes, batch in ((20, 8), (40, 8)) if tiny else ((11_318, 180), (1_000_000, 180)):
        loss = losses.ours("proxy_anchor", classes, DEVICE)
        points, labels = losses.draw(classes, DEVICE, batch)
        images = torch.randn(batch, 3, SIDE, SIDE, device=DEVICE).contiguous(memory_format=torch.channels_last)

        def network(images: Tensor = images) -> None:
            model.zero_grad(set_to_none=True)
            with torch.autocast(DEVICE, dtype=torch.bfloat16):
                embeddings = model(images)
            embeddings.float().sum().backward()

        ms = losses.take_turns([losses.step(loss, points, labels), network], DEVICE, repeats=2 if tiny else 20)
        rows.append([f"{classes:,}", str(batch), *(f"{each:.2f}" for each in ms), f"{ms[0] / sum(ms):.1%}"])
    return rows


def trained(settings: Recipe) -> list[EpochRow]:
    with tempfile.TemporaryDirectory() as folder:
        train(settings, folder + "/run", device=start_ranks(DEVICE, settings.training.precision))
        return RunFolder(Path(folder) / "run").read_metrics()


def loader_rows(tiny: bool) -> list[Row]:
    classes, images, batch, workers = (4, 4, 4, 0) if tiny else (50, 80, 64, os.cpu_count() or 1)
    normalization = transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    steps = [transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip(), transforms.ToTensor(), normalization]
    with tempfile.TemporaryDirectory() as folder:
        noise = np.random.default_rng(0)
        for number in range(classes * images):
            path = Path(folder, f"class_{number % classes:03}", f"{number}.jpg")
            path.parent.mkdir(exist_ok=True)
            pixels = Image.fromarray(noise.integers(0, 256, (24, 32, 3), dtype=np.uint8))
            pixels.resize((500, 375), Image.Resampling.BICUBIC).save(path)
        text = (
            f"dataset: {{name: folder, root: {folder}, validation_fraction: 0}}\ntransform: {{name: imagenet}}\n"
            f"loss: {{name: proxy_anchor}}\nsampler: {{name: random, batch_size: {batch}}}\n"
        )
        settings = parse_recipe(text, "gpu.py")
        data = settings.dataset.build("train")
        sampler = settings.sampler.build(data.labels, 0)
        inputs = inputs_of(data, settings.transform, training=True)
        batches = TrainingBatches(sampler, 0)
        ours = make_loader(inputs, batches, workers=workers, pin_memory=DEVICE == "cuda")
        peer_data = ImageFolder(folder, transforms.Compose(steps))
        peer = DataLoader(peer_data, batch, True, num_workers=workers, drop_last=True, pin_memory=DEVICE == "cuda")

        def our_pass() -> None:
            for our_batch in ours:
                our_batch.inputs.to(DEVICE, non_blocking=True)

        def peer_pass() -> None:
            for pixels, _ in peer:
                pixels.to(DEVICE, non_blocking=True)

        passes = {"dmlkit": our_pass, "torchvision": peer_pass}
        taken: dict[str, list[float]] = {name: [] for name in passes}
        for _ in range(3):
            for name, one_pass in passes.items():
                taken[name].append(seconds(one_pass))
        speeds = {name: len(sampler) * batch / statistics.median(times) for name, times in taken.items()}
    ratio = speeds["dmlkit"] / speeds["torchvision"]
    return [[str(workers), f"{speeds['dmlkit']:.0f}", f"{speeds['torchvision']:.0f}", f"{ratio:.2f}"]]


def evaluation_rows(tiny: bool) -> list[Row]:
    rows: list[Row] = []
    for count, classes in ((200, 20), (400, 40)) if tiny else ((60_502, 11_316), (500_000, 50_000)):
        points = normalize(torch.randn(count, 512, device=DEVICE), dim=1)
        labels = torch.arange(count, device=DEVICE) % classes

        def product(points: Tensor = points) -> None:
            for block in points.split(8192):
                for columns in points.split(65_536):
                    torch.mm(block, columns.T)

        def score(points: Tensor = points, labels: Tensor = labels) -> object:
            return retrieval_metrics(points, labels, metrics=["recall@1", "map@r"])

        product()
        mine, floor = seconds(score), seconds(product)
        rows.append([str(count), f"{mine:.2f}", f"{floor:.2f}", f"{mine / floor:.2f}"])
    return rows


def embed_rows(tiny: bool) -> list[Row]:
    rows: list[Row] = []
    for backbone in BACKBONES:
        settings = recipe(backbone, "fp32", tiny)
        settings = settings.model_copy(update={"training": settings.training.model_copy(update={"epochs": 1})})
        with tempfile.TemporaryDirectory() as folder:
            train(settings, folder + "/run", device=start_ranks(DEVICE))
            embedder = dmlkit.load(folder + "/run", device=DEVICE)
            pixels = np.random.default_rng(0).integers(0, 256, (32 if tiny else 8192, SIDE, SIDE, 3), dtype=np.uint8)
            model, batch = embedder.trained.model, 64

            @torch.inference_mode()
            def bare(model: nn.Module = model, pixels: np.ndarray = pixels, batch: int = batch) -> None:
                for images in torch.from_numpy(pixels).permute(0, 3, 1, 2).split(batch):
                    model(images.to(DEVICE)).cpu()

            embedder.embed(pixels[:batch])
            speed, bare_speed = (len(pixels) / seconds(run) for run in (lambda: embedder.embed(pixels), bare))  # noqa: B023
        rows.append([backbone, f"{speed:.0f}", f"{bare_speed:.0f}", f"{speed / bare_speed:.3f}"])
    return rows


PARTS: dict[str, tuple[Callable[[bool], list[Row]], Row]] = {
    "losses": (loss_rows, ["loss", "C", "embeddings", "ms", "three float32 products ms", "ratio"]),
    "training": (
        training_rows,
        [
            *("backbone", "precision", "training.compile", "first epoch s", "dmlkit images/s", "of it waiting"),
            *("bare images/s", "ratio"),
        ],
    ),
    "share": (share_rows, ["C", "images", "Proxy-Anchor ms", "ResNet-50 ms", "share of Proxy-Anchor"]),
    "loader": (loader_rows, ["workers", "dmlkit images/s", "torchvision images/s", "ratio"]),
    "evaluation": (evaluation_rows, ["images", "dmlkit s", "products s", "ratio"]),
    "embed": (embed_rows, ["backbone", "dmlkit images/s", "bare images/s", "ratio"]),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--tiny", action="store_true", help="small sizes, and write nothing")
    options = parser.parse_args()
    if DEVICE == "cpu" and not options.tiny:
        parser.error("no GPU here; --tiny rehearses it on the CPU")
    measure, header = PARTS[options.part]
    rows = measure(options.tiny)
    if options.tiny:
        for row in (header, *rows):
            print(" | ".join(row))
    else:
        report.write_report(f"gpu_{options.part}", __doc__, header, rows)


if __name__ == "__main__":
    main()
