"""Start of a command: one process on the best device, or the ranks that torchrun started."""

import atexit
import ctypes
import os
import re
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from threading import Timer
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from dmlkit.distributed.device_name import count_cores, parse_device
from dmlkit.errors import OptionError, UserError, warn
from dmlkit.files.escape import excerpt

Sent = TypeVar("Sent")
OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
START_RANKS = "start ranks with torchrun, or unset the variable"
WARN_AFTER = 10  # seconds without the other ranks
PATIENCE = 300  # seconds for all ranks to join; they start together, but may read Python from a slow disk
ENGINES = ("bf16", "onnxruntime", "fastest")
"""What may follow a device, see `dmlkit.vectors.computation`."""
SILENCE = timedelta(minutes=30)  # after which a rank that waits for another one gives up
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Ranks:
    """Device of this process, the precision in which it trains, and its connection to the other ranks."""

    device: torch.device
    engine: str = ""  # what computes embeddings, one of `ENGINES`; empty for torch in float32
    world_size: int = 1
    global_rank: int = 0
    precision: torch.dtype = torch.float32  # of the forward pass of a training; below float32 mixed by torch.autocast
    scaler: torch.amp.GradScaler | None = None  # keeps the gradients of float16 in its range

    @property
    def is_global_zero(self) -> bool:
        """Whether this is the first rank."""
        return self.global_rank == 0

    def broadcast(self, obj: Sent) -> Sent:
        """Return the object of the first rank on all ranks."""
        sent: list[Any] = [obj]
        if self.world_size > 1:
            torch.distributed.broadcast_object_list(sent)
        return sent[0]

    def barrier(self) -> None:
        """Wait until all ranks have come this far."""
        if self.world_size > 1:
            torch.distributed.barrier(device_ids=None if self.device.type == "cpu" else [self.device.index])

    def sum(self, values: Tensor) -> Tensor:
        """Sum a tensor over the ranks, in place, and return it."""
        if self.world_size > 1:
            torch.distributed.all_reduce(values)
        return values

    def distribute(self, model: nn.Module) -> nn.Module:
        """Move a model to the device; with several ranks, its backward pass averages the gradients over them."""
        model.to(self.device)
        if self.world_size == 1:
            return model
        if self.device.type == "cpu":
            return DistributedDataParallel(model)
        with torch.cuda.stream(torch.cuda.Stream()):  # as PyTorch's notes on CUDA advise
            return DistributedDataParallel(model, device_ids=[self.device.index])

    def without_sync(self, model: nn.Module, *, enabled: bool) -> AbstractContextManager[Any]:
        """Return a context in which a distributed model sums gradients on its own rank, if enabled."""
        return model.no_sync() if enabled and isinstance(model, DistributedDataParallel) else nullcontext()

    def autocast(self) -> AbstractContextManager[Any]:
        """Return a context that computes in the precision of the training."""
        if self.precision == torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.precision)

    def compute(self, model: nn.Module, inputs: Tensor) -> Tensor:
        """Compute a model in the precision of the training; what is lower than float32 is returned in float32."""
        if self.precision == torch.float32:
            return model(inputs)
        with self.autocast():
            output: Tensor = model(inputs.to(self.precision) if inputs.is_floating_point() else inputs)
        return output.float()

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of a loss."""
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def unscale(self, optimizer: Optimizer) -> None:
        """Undo the scaling of gradients before they are clipped, once per step."""
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)

    def step(self, optimizer: Optimizer) -> None:
        """Update the weights; a step whose float16 gradients overflowed is left out."""
        if self.scaler is None:
            optimizer.step()
        else:
            self.scaler.step(optimizer)
            self.scaler.update()


def start_ranks(device: str, precision: str = "") -> Ranks:
    """Claim a device and, under torchrun, join the other ranks.

    Args:
        device: ``auto`` (CUDA, else Apple's GPU, else CPU), ``cpu``, ``cuda``, ``cuda:N`` or ``mps``. A single process
            that does not train may add ``+bf16``, ``+onnxruntime`` or ``+fastest``, which choose what computes
            embeddings, see `dmlkit.vectors.computation`. Default: torch in float32.
        precision: for a training, one of `PRECISIONS`.
    """
    requested, engine = device, ""
    if not precision:
        device, _, engine = device.partition("+")
        if engine not in ENGINES and device != requested:
            choices = ", ".join(f"{device}+{name}" for name in ENGINES)
            raise UserError(f"--device {requested}: expected {choices} or {device}")
        if engine and count_ranks()[0] > 1:
            raise UserError(f"--device {requested}: +{engine} applies to one process, not to torchrun's; use {device}")
    kind, index = _claim(device, precision)
    may_restart = _number("TORCHELASTIC_MAX_RESTARTS", 0) > 0
    if may_restart and os.environ.get(OWN_STORE) != "1" and os.environ.get("RANK") == "0":
        # restarted ranks read old addresses from torchrun's store (pytorch issue 135712)
        warn(f"torchrun --max-restarts: a restart may fail unless {OWN_STORE}=1 is set")
    ranks, local_ranks = count_ranks()
    if ranks > 1 and index is not None:
        raise UserError(f"--device {device}: under torchrun each rank uses its own GPU; use --device cuda")
    if ranks > 1 and kind == "mps":
        raise UserError(f"--device {device}: one process uses Apple's GPU; do without torchrun, or use --device cpu")
    index = int(os.environ["LOCAL_RANK"]) if ranks > 1 else index or 0
    torch_device = torch.device(kind) if kind == "cpu" else torch.device(kind, index)
    if kind == "cuda":
        if index >= (count := torch.cuda.device_count()):
            raise UserError(f"--device {device}: {local_ranks} ranks, but torch finds {count} GPUs; each needs its own")
        torch.cuda.set_device(torch_device)
    if ranks > 1:
        join(ranks, local_ranks, torch_device)
    scaler = torch.amp.GradScaler(kind) if precision == "fp16" else None
    rank = int(os.environ["RANK"]) if ranks > 1 else 0
    return Ranks(torch_device, engine, ranks, rank, PRECISIONS[precision or "fp32"], scaler)


def join(ranks: int, local_ranks: int, device: torch.device) -> None:
    """Join the other ranks, unless this process has done so, and leave them before Python exits."""
    if torch.distributed.is_initialized():
        return
    if "OMP_NUM_THREADS" not in os.environ:  # torchrun sets it for several ranks on a machine
        torch.set_num_threads(max(1, count_cores() // local_ranks))
    meeting = meet(ranks)  # kept until the group is there, because it holds the store that the ranks use
    is_gpu = device.type == "cuda"
    torch.distributed.init_process_group(
        "nccl" if is_gpu else "gloo",
        rank=int(os.environ["RANK"]),
        world_size=ranks,
        timeout=SILENCE,
        device_id=device if is_gpu else None,
    )
    del meeting
    atexit.register(leave)


def _claim(device: str, precision: str) -> tuple[str, int | None]:
    """Return the kind and number of a device, see `resolve_device`, and let a processor keep freed memory."""
    kind, index = resolve_device(device)
    if kind == "cpu":
        if precision == "fp16":
            raise OptionError("training.precision", "fp16 needs a GPU; on a CPU use bf16 or fp32")
        keep_freed_memory()
    return kind, index


def leave() -> None:
    """Leave the process group before Python exits.

    Threads of gloo may hold tensors, and freeing one at exit aborts a finished rank (pytorch pull 179291).
    """
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def meet(ranks: int) -> object:
    """Wait until all ranks have joined, and return their store. PyTorch alone would wait for half an hour."""
    from torch.distributed.rendezvous import rendezvous

    variables = ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    expected = " ".join(f"{name}={os.environ[name]}" for name in variables)
    waiting = f"waiting for the other ranks, for at most {PATIENCE} seconds: {expected}"
    patience = timedelta(seconds=PATIENCE)
    timer = Timer(WARN_AFTER, warn, [waiting])
    timer.daemon = True
    timer.start()
    try:
        store, rank, _ = next(rendezvous("env://", timeout=patience))
        store.set(f"dmlkit/{rank}", "here")
        store.wait([f"dmlkit/{other}" for other in range(ranks)], patience)
    except torch.distributed.DistError as error:
        raise UserError(
            f"not all of {ranks} ranks have joined within {PATIENCE} seconds ({expected}); start all ranks with "
            "torchrun, or unset WORLD_SIZE to run a single process"
        ) from error
    finally:
        timer.cancel()
    return store


def count_ranks() -> tuple[int, int]:
    """Return how many ranks torchrun has started, in total and on this machine; 1 and 1 without torchrun."""
    ranks, local_ranks = _number("WORLD_SIZE", 1), _number("LOCAL_WORLD_SIZE", 1)
    if ranks > 1:
        missing = [name for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
        if missing:
            raise UserError(f"WORLD_SIZE={ranks}, but {missing[0]} is not set; {START_RANKS}")
        _number("MASTER_PORT", 1)
    if ranks % local_ranks:
        raise UserError(f"WORLD_SIZE={ranks} is not a multiple of LOCAL_WORLD_SIZE={local_ranks}; {START_RANKS}")
    for name, count in (("RANK", ranks), ("LOCAL_RANK", local_ranks)):
        if _number(name, 0) >= count:
            raise UserError(
                f"{name}={os.environ[name]}: expected at most {count - 1} with {count} ranks; {START_RANKS}"
            )
    return ranks, local_ranks


def _number(variable: str, minimum: int) -> int:
    """Return the whole number in an environment variable; the least allowed value if it is not set."""
    text = os.environ.get(variable, str(minimum))
    if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) < minimum:
        raise UserError(f"{variable}={excerpt(text)}: expected a whole number of at least {minimum}; {START_RANKS}")
    return int(text)


def is_first_rank() -> bool:
    """Return whether this process prints for all ranks that torchrun started."""
    return os.environ.get("RANK", "0") == "0"


def resolve_device(device: str) -> tuple[str, int | None]:
    """Return the kind of a device, and its number if one is requested."""
    kind, index = parse_device(device)
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if kind == "cuda" and not torch.cuda.is_available():
        raise UserError(f"--device {device}: torch finds no CUDA device; use --device cpu")
    if kind == "cuda" and index is not None and index >= torch.cuda.device_count():
        raise UserError(f"--device {device}: expected at most cuda:{torch.cuda.device_count() - 1}, the last device")
    if kind == "mps" and not torch.backends.mps.is_available():
        raise UserError(f"--device {device}: torch finds no Apple GPU; use --device cpu")
    return kind, index


def keep_freed_memory() -> None:
    """Let glibc keep the memory of freed large tensors for reuse instead of returning it to the system.

    The system clears every newly allocated page: EfficientNet-Lite0 on 160 pixels trains with 13 instead of 26 images/s
    on one core; the gradient of 1 000 000 proxies, 2 GB, takes 6 s longer. Other C libraries do not change.
    """
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "mallopt"):
        trim_threshold, mmap_threshold = -1, -3
        library.mallopt(trim_threshold, -1)  # never: above 2 GB, embedding spent a third of its time on pages
        if not library.mallopt(mmap_threshold, 2**31 - 1):
            library.mallopt(mmap_threshold, 2**25)  # the most before glibc 2.35


def release_freed_memory() -> None:
    """Return kept memory to the system before processes are forked.

    A forked process shares every page with its parent, which copies a page before it writes to it. A training step of
    120 images of 160 pixels leaves 5 GB: validating 198 images then took 20 s, after this call 5 s.
    """
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "malloc_trim"):
        library.malloc_trim(0)
