"""Large scale: the training loop and the loss with a large model, a step with a million classes, and evaluation.

Model: ResNet-50 with AdamW and Proxy-Anchor on glyphs of 128 x 128 pixels, which the loader enlarges to 224 x 224. The
bare loop has the images ready in one tensor and no loss; it sums the embeddings. Epochs alternate between the two, and
values are medians. Batches have 120 images in bfloat16 on a GPU, and 24 in float32 on a CPU, where 120 would take half
a minute per step. The loss is also timed alone at C=11 318, and compared with the step.

Classes: forward and backward pass of a loss at C=1 000 000, d=512, B=512, compared with the three matrix products that
any method with all classes needs, computed in blocks in memory that is already allocated. The two alternate; the value
is the median of 20 rounds on a GPU, and the third of three on a CPU, where the first two allocate memory. Memory is the
peak over two steps with AdamW, without what was used before the proxies were created; proxies, gradients and the two
moments take 7 813 MB. On a CPU only the peak of the first row is meaningful: the process keeps freed memory, so the
peaks of the following rows are too low.

Evaluation: R@1000 and 12 other metrics of 60 502 embeddings, compared with the product in blocks with torch's top-k;
the two alternate.
"""

import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from evaluation import EVERYTHING, SOP, embeddings
from losses import draw, step, take_turns
from report import memory_rise, write_report
from torch.nn.functional import normalize

from dmlkit.distributed.launch import start_ranks
from dmlkit.losses import NormSoftmax, ProxyAnchor
from dmlkit.losses.base import Loss
from dmlkit.manifolds import Sphere
from dmlkit.metrics import retrieval_metrics
from dmlkit.model import build_model
from dmlkit.recipe.file import parse_recipe
from dmlkit.recipe.schema import Recipe
from dmlkit.training.train import train

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BATCH, PRECISION = (120, "bf16") if DEVICE == "cuda" else (24, "fp32")
EPOCHS, ROUNDS, WORKERS = (2, 5, 8) if DEVICE == "cuda" else (2, 1, 0)
TURNS = 20 if DEVICE == "cuda" else 1
CLASSES, DIM, ROWS = 1_000_000, 512, 512
BLOCK = 2**18 if DEVICE == "cuda" else 2**12  # the fastest of the powers of two here
RECIPE = f"""\
dataset: {{name: glyphs, classes: 60, images_per_class: {2 * BATCH // 10}, size: 128, validation_fraction: 0}}
transform: {{name: plain, size: 224}}
backbone: {{name: resnet50, weights: null}}
embedding_dim: 512
loss: {{name: proxy_anchor}}
sampler: {{name: random, batch_size: {BATCH}}}
optimizer: {{name: adamw, lr: 0.0001}}
training: {{epochs: {EPOCHS}, precision: {PRECISION}, workers: {WORKERS}}}
"""
Rows = list[list[str]]


def recipe() -> Recipe:
    return parse_recipe(RECIPE, "benchmarks/scale.py")


def bare_epochs(images: torch.Tensor) -> list[float]:
    """Images/s of epochs without loss, loader or checks."""
    ranks = start_ranks(DEVICE, PRECISION)
    model = ranks.distribute(build_model(recipe()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    speeds: list[float] = []
    for _ in range(EPOCHS):
        started = time.perf_counter()
        for batch in images.split(BATCH):
            optimizer.zero_grad()
            ranks.backward(ranks.compute(model, batch.to(ranks.device, non_blocking=True)).sum())
            optimizer.step()
        synchronize()
        speeds.append(len(images) / (time.perf_counter() - started))
    return speeds


def dmlkit_epochs() -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        train(recipe(), run, device=start_ranks(DEVICE, PRECISION))
        return [json.loads(line)["images_per_second"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def model_rows() -> Rows:
    data, transform = recipe().dataset.build("train"), recipe().transform
    assert transform is not None  # a recipe of images has one
    prepare = transform.training()
    images = torch.stack([prepare(data.sample(index)) for index in range(len(data) // BATCH * BATCH)])
    bare, ours = [], []
    for _ in range(ROUNDS):
        bare += bare_epochs(images)
        ours += dmlkit_epochs()
    bare_speed, our_speed = statistics.median(bare), statistics.median(ours)
    loss = ProxyAnchor(Sphere(DIM), 11_318).to(DEVICE)
    (milliseconds,) = take_turns([step(loss, *draw(11_318, DEVICE, BATCH))], DEVICE, repeats=20)
    whole = 1e3 * BATCH / our_speed
    title, share = f"ResNet-50, {BATCH} images, {PRECISION}", 100 * milliseconds / whole
    return [
        [title, "bare loop, no loss", f"{bare_speed:.1f} images/s", "1.00"],
        [title, "dmlkit train, Proxy-Anchor", f"{our_speed:.1f} images/s", f"{our_speed / bare_speed:.3f}"],
        [title, "Proxy-Anchor alone, C=11 318", f"{milliseconds:.0f} ms", f"{share:.1f} % of a step"],
    ]


def class_rows() -> Rows:
    points = normalize(torch.randn(ROWS, DIM, device=DEVICE), dim=1).requires_grad_()
    labels = torch.randperm(CLASSES, device=DEVICE)[: ROWS // 4].repeat_interleave(4)
    rows: Rows = []
    builds: dict[str, Callable[[], Loss]] = {
        "Proxy-Anchor": lambda: ProxyAnchor(Sphere(DIM), CLASSES),
        "normalized softmax": lambda: NormSoftmax(Sphere(DIM), CLASSES),
        "normalized softmax, negative_fraction 0.1": lambda: NormSoftmax(Sphere(DIM), CLASSES, negative_fraction=0.1),
    }
    for name, build in builds.items():
        gc.collect()
        memory = peak(build, points, labels)
        loss = build().to(DEVICE)
        mine, floor = take_turns([step(loss, points, labels), products(points.detach())], DEVICE, repeats=TURNS)
        seconds = f"{mine / 1e3:.2f} s; the products {floor / 1e3:.2f} s"
        rows.append([f"C={CLASSES:,}", name, seconds, f"{mine / floor:.2f}; peak {memory:,.0f} MB"])
        print(rows[-1], flush=True)
    return rows


def evaluation_rows() -> Rows:
    points, labels = embeddings(*SOP, noise=3.0)
    points = points.to(DEVICE)
    nearest = 1000  # and the query itself

    def search() -> None:
        for block in points.split(1024):
            (block @ points.T).topk(nearest + 1)

    metrics = [f"recall@{nearest}", *EVERYTHING]
    steps = [lambda: retrieval_metrics(points, labels, metrics=metrics), search]
    mine, floor = take_turns(steps, DEVICE, repeats=TURNS, warm_up=1)
    title = f"{SOP[0]:,} x 512, the {nearest:,} nearest"
    return [
        [title, "blocked product and top-k", f"{floor / 1e3:.2f} s", "1.00"],
        [title, f"dmlkit, {len(metrics)} metrics", f"{mine / 1e3:.2f} s", f"{mine / floor:.2f}"],
    ]


def products(points: torch.Tensor) -> Callable[[], None]:
    """Similarities, and what they give to the gradients of points and proxies."""
    proxies = torch.randn(CLASSES, DIM, device=DEVICE)
    to_points, to_proxies = torch.zeros_like(points), torch.zeros_like(proxies)
    similarity = torch.zeros(ROWS, BLOCK, device=DEVICE)

    def run() -> None:
        for block, gradient in zip(proxies.split(BLOCK), to_proxies.split(BLOCK), strict=True):
            part = similarity[:, : len(block)]
            torch.mm(points, block.T, out=part)
            to_points.addmm_(part, block)
            torch.mm(part.T, points, out=gradient)

    return run


def peak(build: Callable[[], Loss], points: torch.Tensor, labels: torch.Tensor) -> float:
    """Megabytes above what there was before."""

    def two_steps() -> None:
        loss = build().to(DEVICE)
        optimizer = torch.optim.AdamW(loss.parameters(), lr=1e-3, fused=True)
        for _ in range(2):
            optimizer.zero_grad()
            loss(points, labels).backward()
            optimizer.step()

    return memory_rise(two_steps, DEVICE)


if __name__ == "__main__":
    start_ranks(DEVICE)  # as every command does, which on a CPU keeps freed memory
    write_report(
        "scale", __doc__, ["what", "who", "median", "ratio"], [*class_rows(), *model_rows(), *evaluation_rows()]
    )
