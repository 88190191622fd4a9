"""Start of a command: one process on the best device, or the ranks that torchrun started."""

import atexit
import ctypes
import logging
import os
import re
import sys
from dataclasses import dataclass
from datetime import timedelta
from threading import Timer
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch

from dmlkit.distributed.device_name import parse_device
from dmlkit.errors import OptionError, UserError, warn
from dmlkit.files.escape import excerpt

if TYPE_CHECKING:
    from lightning_fabric import Fabric

Sent = TypeVar("Sent")
OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
START_RANKS = "start ranks with torchrun, or unset the variable"
WARN_AFTER = 10  # seconds without the other ranks
PATIENCE = 300  # seconds for all ranks to join; they start together, but may read Python from a slow disk
ENGINES = ("bf16", "onnxruntime", "fastest")
"""What may follow a device, see `dmlkit.vectors.computation`."""
PRECISIONS = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}


class Ranks(Protocol):
    """Device of this process and its connection to the other ranks: what of Fabric is used without training."""

    @property
    def device(self) -> torch.device:
        """Device of this rank."""
        ...

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        ...

    @property
    def global_rank(self) -> int:
        """Number of this rank, from 0."""
        ...

    @property
    def is_global_zero(self) -> bool:
        """Whether this is the first rank."""
        ...

    def broadcast(self, obj: Sent, src: int = 0) -> Sent:
        """Return the object of rank ``src`` on all ranks."""
        ...


@dataclass(frozen=True)
class OneProcess:
    """A single rank."""

    device: torch.device
    engine: str = ""  # what computes embeddings, one of `ENGINES`; empty for torch in float32
    world_size: int = 1
    global_rank: int = 0
    is_global_zero: bool = True

    def broadcast(self, obj: Sent, src: int = 0) -> Sent:
        """Return the object."""
        return obj


def start_ranks(device: str = "auto") -> Ranks:
    """Claim a device for everything but training and, under torchrun, join the other ranks.

    A single process does without Fabric, whose import takes 2 s of a processor: it imports PyTorch's compiler.

    Args:
        device: see `start_fabric`; a single process may add ``+bf16``, ``+onnxruntime`` or ``+fastest``, which choose
            what computes embeddings, see `dmlkit.vectors.computation`. Default: torch in float32.
    """
    given, (device, *engine) = device, device.split("+")
    if len(engine) > 1 or not {*engine} <= {*ENGINES}:
        choices = ", ".join(f"{device}+{name}" for name in ENGINES)
        raise UserError(f"--device {given}: expected {choices} or {device}")
    if count_ranks()[0] > 1:
        if engine:
            raise UserError(f"--device {given}: +{engine[0]} applies to one process, not to torchrun's; use {device}")
        return start_fabric(device)
    kind, index = _claim(device)
    place = torch.device(kind) if kind == "cpu" else torch.device(kind, index or 0)
    if kind == "cuda":
        torch.cuda.set_device(place)
    return OneProcess(place, engine[0] if engine else "")


def start_fabric(device: str = "auto", precision: str = "fp32") -> "Fabric":
    """Claim a device for a training and, under torchrun, join the other ranks.

    Args:
        device: ``auto`` (CUDA, else Apple's GPU, else CPU), ``cpu``, ``cuda``, ``cuda:N`` or ``mps``.
    """
    from lightning_fabric import Fabric
    from lightning_fabric.plugins.environments.lightning import LightningEnvironment
    from lightning_fabric.plugins.environments.torchelastic import TorchElasticEnvironment

    logging.getLogger("lightning_fabric").setLevel(logging.WARNING)
    kind, index = _claim(device, precision)
    may_restart = _number("TORCHELASTIC_MAX_RESTARTS", 0) > 0
    if may_restart and os.environ.get(OWN_STORE) != "1" and os.environ.get("RANK") == "0":
        # restarted ranks read old addresses from torchrun's store (pytorch issue 135712)
        warn(f"torchrun --max-restarts: a restart may fail unless {OWN_STORE}=1 is set")
    ranks, local_ranks = count_ranks()
    if ranks > 1 and index is not None:
        raise UserError(f"--device {device}: under torchrun each rank uses its own GPU; use --device cuda")
    fabric = Fabric(
        accelerator=kind,
        devices=[index] if index is not None else local_ranks,
        num_nodes=ranks // local_ranks,
        strategy="ddp" if ranks > 1 else "auto",
        precision=PRECISIONS[precision],  # pyright: ignore[reportArgumentType] - three of the many literals
        # set explicitly, because in a Slurm job Fabric would choose Slurm's environment and reject some task counts
        plugins=TorchElasticEnvironment() if ranks > 1 else LightningEnvironment(),
    )
    # kept until Fabric has joined the ranks, because it holds the store that they use
    meeting = meet(ranks) if ranks > 1 else None
    fabric.launch()
    del meeting
    if ranks > 1:
        atexit.register(leave)
    return fabric


def _claim(device: str, precision: str = "fp32") -> tuple[str, int | None]:
    """Return the kind and number of a device, see `resolve_device`, and let a processor keep freed memory."""
    kind, index = resolve_device(device)
    if kind == "cpu":
        if precision == "fp16":
            raise OptionError("training.precision", "fp16 needs a GPU; on a CPU use bf16 or fp32")
        keep_freed_memory()
    return kind, index


def leave() -> None:
    """Leave the process group before Python exits; Fabric does this only with NCCL.

    Threads of gloo may hold tensors, and freeing one at exit aborts a finished rank (pytorch pull 179291).
    """
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def meet(ranks: int) -> object:
    """Wait until all ranks have joined, and return their store. Fabric would wait for half an hour."""
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


def _number(variable: str, least: int) -> int:
    """Return the whole number in an environment variable; the least allowed value if it is not set."""
    text = os.environ.get(variable, str(least))
    if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) < least:
        raise UserError(f"{variable}={excerpt(text)}: expected a whole number of at least {least}; {START_RANKS}")
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

    The system clears every newly allocated page: converting 64 images of 224 x 224 to floats takes 24 ms instead of
    3 ms with kept memory; the gradient of 1 000 000 proxies, 2 GB, takes 6 s longer. Other C libraries do not change.
    """
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "mallopt"):
        for option in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
            library.mallopt(option, 2**31 - 1)
