"""Time and memory of every loss, compared with pytorch-metric-learning (PML) and with the necessary matrix products.

python benchmarks/losses.py times [--device cuda] [--losses proxy_anchor soft_triple]
python benchmarks/losses.py memory [--device cuda]
python benchmarks/losses.py million

A step is loss(embeddings, labels).backward() at B=180, d=512; the two libraries run in turn in one process. `times`
also takes B=1 024, with the losses over pairs that PML has too.
"""

import argparse
import platform
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from statistics import median

import torch
from report import memory_rise
from torch import Tensor, nn
from torch.nn.functional import normalize

from dmlkit.distributed.launch import keep_freed_memory
from dmlkit.losses.base import Loss, LossConfig
from dmlkit.losses.proxies.proxy_loss import ProxyLoss
from dmlkit.manifolds import Sphere

BATCH, LARGE, DIM = 180, 1024, 512
FEW = {"lifted_structure", "smooth_ap"}  # the peer's take seconds, or 4 GB for each array, of a large batch
REPEATS = {100: 100, 11_318: 20}  # by classes: 20 steps of a millisecond say little
RESULTS = Path(__file__).parent / "results"
MEGABYTE = 2**20
# Our options and the peer's name and options, for the same function; a loss without a peer has None. What follows a
# comma tells apart two cases of a loss.
CASES: dict[str, tuple[dict[str, object], str | None, dict[str, object]]] = {
    "proxy_anchor": ({}, "ProxyAnchorLoss", {}),
    "proxy_nca": ({}, "ProxyNCALoss", {"softmax_scale": 9}),
    "norm_softmax": ({}, "NormalizedSoftmaxLoss", {}),
    "cosface": ({}, "CosFaceLoss", {}),
    "arcface": ({}, "ArcFaceLoss", {}),
    "soft_triple": ({"centers_per_class": 2, "regularizer_weight": 0.0}, "SoftTripleLoss", {"centers_per_class": 2}),
    "mpa": ({"proxies_per_class": 2}, None, {}),
    "mpa, K=10": ({"proxies_per_class": 10}, None, {}),
    "proxy_isa": ({}, None, {}),
    "proxy_gml": ({"proxies_per_class": 1, "scale": 20.0, "regularizer_weight": 0.0}, None, {}),
    "contrastive": ({}, "ContrastiveLoss", {}),
    "triplet": ({}, "TripletMarginLoss", {"margin": 0.1}),
    "n_pair": ({}, "NPairsLoss", {}),
    "binomial_deviance": ({}, None, {}),
    "lifted_structure": ({}, "LiftedStructureLoss", {}),
    "margin": ({}, "MarginLoss", {}),
    "multi_similarity": ({}, "MultiSimilarityLoss", {}),
    "circle": ({}, "CircleLoss", {}),
    "sup_con": ({}, "SupConLoss", {}),
    "smooth_ap": ({}, "SmoothAPLoss", {}),
    "recall_surrogate": ({}, None, {}),
    "roadmap": ({}, None, {}),
    "sigmoid_pairs": ({}, None, {}),
}


def ours(name: str, classes: int, device: str, **options: object) -> Loss:
    warnings.simplefilter("ignore")
    config = LossConfig.variants[name.split(",")[0]](**{**CASES[name][0], **options})
    loss = config.build(Sphere(DIM), classes).to(device)
    loss.set_epoch(3)  # a loss that starts in stages is past them
    return loss


def peer(name: str, classes: int, device: str) -> nn.Module | None:
    import pytorch_metric_learning.losses as peers

    _, peer_name, options = CASES[name]
    if peer_name is None:
        return None
    owns_proxies = hasattr(ours(name, 100, "cpu"), "proxies")
    sizes = {"num_classes": classes, "embedding_size": DIM} if owns_proxies else {}
    return getattr(peers, peer_name)(**sizes, **options).to(device)


def draw(classes: int, device: str, batch: int = BATCH) -> tuple[Tensor, Tensor]:
    """Unit embeddings (B, d), and labels with four images of a class."""
    torch.manual_seed(0)
    points = normalize(torch.randn(batch, DIM, device=device), dim=1).requires_grad_()
    return points, (torch.randperm(classes)[: batch // 4].repeat_interleave(4)).to(device)


def step(loss: nn.Module, points: Tensor, labels: Tensor) -> Callable[[], None]:
    def run() -> None:
        points.grad = None
        loss.zero_grad(set_to_none=True)
        loss(points, labels).backward()

    return run


def products(rows: int, columns: int, device: str, dtype: torch.dtype = torch.float32) -> Callable[[], None]:
    """Similarities of rows and columns, and the two products of their gradient."""
    x, y = (torch.randn(n, DIM, device=device, dtype=dtype) for n in (rows, columns))

    def run() -> None:
        similarity = torch.mm(x, y.T)
        torch.mm(similarity, y)
        torch.mm(similarity.T, x)

    return run


def take_turns(steps: Sequence[Callable[[], object]], device: str, repeats: int, warm_up: int = 2) -> list[float]:
    """The median milliseconds of each, one after the other, ``repeats`` times after some rounds that do not count."""
    times: list[list[float]] = [[] for _ in steps]
    for _ in range(warm_up + repeats):
        for run, seconds in zip(steps, times, strict=True):
            started = time.perf_counter()
            run()
            if device == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
    return [median(seconds[warm_up:]) * 1e3 for seconds in times]


def time_row(name: str, classes: int, device: str, batch: int = BATCH) -> str:
    loss, other = ours(name, classes, device), peer(name, classes, device)
    points, labels = draw(classes, device, batch)
    proxies = [parameter for parameter in loss.parameters() if parameter.ndim > 1]
    columns = max([parameter.numel() // DIM for parameter in proxies], default=batch)
    steps = [step(loss, points, labels), products(batch, columns, device)]
    if other is not None:
        steps.append(step(other, points, labels))
    mine, floor, *theirs = take_turns(steps, device, REPEATS[classes])
    beside = f"{theirs[0]:.2f} | {mine / theirs[0]:.2f}" if theirs else "- | -"
    return f"| {name} | {classes} | {mine:.2f} | {beside} | {floor:.2f} | {mine / floor:.2f} |"


def peak_megabytes(whose: str, name: str, classes: int, batch: int, device: str, **options: object) -> float:
    """Memory of one step beyond its inputs, the proxies and their gradient."""
    loss = ours(name, classes, device, **options) if whose == "ours" else peer(name, classes, device)
    assert loss is not None
    small = ours(name, 100, device) if whose == "ours" else peer(name, 100, device)
    assert small is not None
    step(small, *draw(100, device))()  # what the libraries allocate once
    points, labels = draw(classes, device, batch)
    run = step(loss, points, labels)
    gradient_bytes = sum(parameter.numel() * 4 for parameter in loss.parameters())
    return memory_rise(run, device) - gradient_bytes / MEGABYTE


def peak_in_new_process(whose: str, name: str, classes: int, batch: int, device: str) -> float:
    command = [sys.executable, __file__, "memory", "--peak", whose, name, str(classes), str(batch), "--device", device]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def memory_table(device: str) -> list[str]:
    mine, theirs = (peak_in_new_process(whose, "proxy_anchor", 100_000, BATCH, device) for whose in ("ours", "peer"))
    return [
        "Memory of a step, without embeddings, proxies and the gradient of the proxies, C=100 000, B=180:",
        "",
        "| loss | ours MiB | PML MiB | ratio |",
        "|---|---|---|---|",
        f"| proxy_anchor | {mine:.0f} | {theirs:.0f} | {mine / theirs:.3f} |",
        "",
        "Memory of a step beyond embeddings, B=4 096 with four images of a class; B x B x B numbers need 262 144 MiB:",
        "",
        "| loss | ours MiB |",
        "|---|---|",
        *(
            f"| {name} | {peak_in_new_process('ours', name, 1024, 4096, device):.0f} |"
            for name in ("smooth_ap", "recall_surrogate", "roadmap")
        ),
    ]


def many_proxies(device: str) -> list[str]:
    """ProxyGML with the paper's N=12 at the size of Stanford Online Products: a dense regularizer needs 74 GB."""
    loss = ours("proxy_gml", 11_318, device, proxies_per_class=12, scale=1.0, regularizer_weight=0.3)
    run = step(loss, *draw(11_318, device, 32))
    started = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    return ["", f"ProxyGML, C=11 318, N=12, B=32, regularizer on: one step in {seconds:.1f} s."]


def million_classes() -> list[str]:
    """C=1 000 000 and B=512 under bf16 autocast, on a GPU."""
    loss = ours("proxy_anchor", 10**6, "cuda")
    points, labels = draw(10**6, "cuda", 512)
    half = points.detach().bfloat16().requires_grad_()

    def run() -> None:
        half.grad = None
        loss.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            value = loss(half, labels)
        value.backward()

    floors = [products(512, 10**6, "cuda", dtype) for dtype in (torch.float32, torch.bfloat16)]
    mine, full, bf16 = take_turns([run, *floors], "cuda", repeats=10)
    loss.zero_grad(set_to_none=True)
    peak = memory_rise(run, "cuda") - 4 * DIM * 10**6 / MEGABYTE
    return [
        "",
        f"Proxy-Anchor, C=1 000 000, B=512, bf16 autocast: {mine:.1f} ms per step, {peak:.0f} MiB without proxies and "
        f"their gradient; {mine / full:.1f} x three fp32 products ({full:.1f} ms), {mine / bf16:.1f} x bf16 ones "
        f"({bf16:.1f} ms).",
    ]


def million_on_cpu() -> list[str]:
    """Normalized softmax, C=1 000 000 and B=512; the floor takes as many classes at a time as ours."""
    loss = ours("norm_softmax", 10**6, "cpu")
    assert isinstance(loss, ProxyLoss)
    points, labels = draw(10**6, "cpu", 512)
    size = loss.classes(points, labels).block_size
    block = products(512, size, "cpu")
    count = 10**6 / size
    mine, floor = take_turns([step(loss, points, labels), lambda: [block() for _ in range(5)]], "cpu", repeats=3)
    floor *= count / 5
    return [
        f"Normalized softmax, C=1 000 000, B=512, float32: {mine / 1e3:.1f} s per step, {mine / floor:.2f} times "
        f"its three products ({floor / 1e3:.1f} s, in blocks of {size:,} classes)."
    ]


def times(names: list[str], device: str) -> list[str]:
    lines = [
        f"Forward and backward pass at B={BATCH}, d={DIM}, dmlkit (ours) and PML; floor: the three matrix products.",
        f"Medians of {REPEATS[100]} steps at C=100, of {REPEATS[11_318]} at C=11318.",
        f"n_pair: PML compares one pair per class, {BATCH // 4} x {BATCH // 4} images; dmlkit all {BATCH} x {BATCH}.",
        "",
        "| loss | C | ours ms | PML ms | ours / PML | floor ms | ours / floor |",
        "|---|---|---|---|---|---|---|",
    ]
    for classes in REPEATS:
        for name in names:
            if classes == 100 or hasattr(ours(name, 100, "cpu"), "proxies"):
                lines.append(time_row(name, classes, device))
                print(lines[-1], flush=True)
    lines += ["", f"The same at B={LARGE}, for losses over pairs:", "", *lines[4:6]]
    for name in names:
        if CASES[name][1] and name not in FEW and not hasattr(ours(name, 100, "cpu"), "proxies"):
            lines.append(time_row(name, 11_318, device, LARGE))
            print(lines[-1], flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("times", "memory", "million"))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--losses", nargs="*", help="only these, and write nothing")
    parser.add_argument("--peak", nargs=4, metavar=("WHOSE", "LOSS", "CLASSES", "BATCH"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak:
        whose, name, classes, batch = options.peak
        print(peak_megabytes(whose, name, int(classes), int(batch), options.device))
        return
    if options.part != "memory":
        keep_freed_memory()  # as every command does on a CPU; the peer has it too
    if options.part == "times":
        lines = times(options.losses or list(CASES), options.device)
    elif options.part == "million":
        lines = million_on_cpu()
    else:
        lines = memory_table(options.device) + many_proxies(options.device)
        lines += million_classes() if options.device == "cuda" else []
    chip = torch.cuda.get_device_name() if options.device == "cuda" else platform.machine()
    head = [
        f"# Losses compared with pytorch-metric-learning: {options.part}",
        "",
        f"`python benchmarks/losses.py {' '.join(sys.argv[1:])}`, {date.today()}, {options.device} ({chip}), "
        f"{torch.get_num_threads()} threads, torch {torch.__version__}.",
        "",
    ]
    text = "\n".join([*head, *lines]) + "\n"
    print(text)
    if not options.losses:
        device = "" if options.device == "cpu" else f"_{options.device}"
        (RESULTS / f"losses_{options.part}{device}.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
