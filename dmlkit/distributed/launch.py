"""Where to run: one process on the best device, or the ranks that torchrun started."""

import atexit
import ctypes
import logging
import os
import re
import sys
from datetime import timedelta
from threading import Timer

import torch
from lightning_fabric import Fabric
from lightning_fabric.plugins.environments.lightning import LightningEnvironment
from lightning_fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from torch.distributed.rendezvous import rendezvous

from dmlkit.errors import UserError
from dmlkit.files.escape import excerpt

OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
MEND_RANKS = "start ranks with torchrun, or unset it"
TELL_AFTER = 10  # seconds without the other ranks
PATIENCE = 300  # seconds for all ranks to come; they are started together, but may read Python from a slow disk
PRECISIONS = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}


def start_fabric(device: str = "auto", precision: str = "fp32") -> Fabric:
    """Claim a device and, under torchrun, join the other ranks.

    Args:
        device: ``auto`` (CUDA, else Apple's GPU, else CPU), ``cpu``, ``cuda``, ``cuda:N`` or ``mps``.
        precision: ``fp32``, ``bf16`` or ``fp16``.

    Raises:
        UserError: the device does not exist here, or other ranks do not come.
    """
    logging.getLogger("lightning_fabric").setLevel(logging.WARNING)
    kind, index = resolve_device(device)
    if kind == "cpu":
        if precision == "fp16":
            raise UserError("training.precision: fp16 needs a GPU; on a CPU use bf16 or fp32")
        keep_freed_memory()
    _warn_of_restarts()
    ranks, local_ranks = count_ranks()
    if ranks > 1 and index is not None:
        raise UserError(f"--device {device}: under torchrun each rank takes its own GPU; use --device cuda")
    fabric = Fabric(
        accelerator=kind,
        devices=[index] if index is not None else local_ranks,
        num_nodes=ranks // local_ranks,
        strategy="ddp" if ranks > 1 else "auto",
        precision=PRECISIONS[precision],  # pyright: ignore[reportArgumentType] - three of the many literals
        # named, so that Fabric looks for no other: within a job of Slurm it refuses some numbers of tasks
        plugins=TorchElasticEnvironment() if ranks > 1 else LightningEnvironment(),
    )
    # until Fabric has joined them, for it holds the place where they meet
    meeting = meet(ranks) if ranks > 1 else None
    fabric.launch()
    del meeting
    if ranks > 1:
        atexit.register(leave)
    return fabric


def leave() -> None:
    """Part from the other ranks while Python still runs; Fabric does so with NCCL alone.

    Threads of gloo may hold tensors; to free one while Python ends aborts a rank that is done (pytorch pull 179291).
    """
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def meet(ranks: int) -> object:
    """Wait until all ranks have come; returns the place. Fabric would wait half an hour, as for any step of theirs.

    Raises:
        UserError: some have not come within `PATIENCE`.
    """
    variables = ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    expected = " ".join(f"{name}={os.environ[name]}" for name in variables)
    waiting = f"waiting for the other ranks, for at most {PATIENCE} seconds: {expected}"
    told = Timer(TELL_AFTER, logging.getLogger("dmlkit").warning, [waiting])
    told.daemon = True
    told.start()
    patience = timedelta(seconds=PATIENCE)
    try:
        store, rank, _ = next(rendezvous("env://", timeout=patience))
        store.set(f"dmlkit/{rank}", "here")
        store.wait([f"dmlkit/{other}" for other in range(ranks)], patience)
    except torch.distributed.DistError as error:
        raise UserError(
            f"not all of {ranks} ranks have come within {PATIENCE} seconds ({expected}); start all of them with "
            "torchrun, or unset WORLD_SIZE to run alone"
        ) from error
    finally:
        told.cancel()
    return store


def count_ranks() -> tuple[int, int]:
    """How many ranks torchrun has started, in all and on this machine; 1 and 1 without torchrun.

    Raises:
        UserError: the variables of torchrun are set in part, or to what it never sets.
    """
    ranks, local_ranks = _number("WORLD_SIZE", 1), _number("LOCAL_WORLD_SIZE", 1)
    if ranks > 1:
        missing = [name for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
        if missing:
            raise UserError(f"WORLD_SIZE={ranks}, but {missing[0]} is not set; {MEND_RANKS}")
        _number("MASTER_PORT", 1)
    if ranks % local_ranks:
        raise UserError(f"WORLD_SIZE={ranks} is no multiple of LOCAL_WORLD_SIZE={local_ranks}; {MEND_RANKS}")
    for name, count in (("RANK", ranks), ("LOCAL_RANK", local_ranks)):
        if _number(name, 0) >= count:
            raise UserError(f"{name}={os.environ[name]}, counted from 0, is too large for {count} ranks; {MEND_RANKS}")
    return ranks, local_ranks


def _number(variable: str, least: int) -> int:
    """The whole number that a variable of the environment holds; its least value where it is not set."""
    text = os.environ.get(variable, str(least))
    if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) < least:
        raise UserError(f"{variable}={excerpt(text)}: expected a whole number of at least {least}; {MEND_RANKS}")
    return int(text)


def _warn_of_restarts() -> None:
    """Ranks started again read the addresses of those before them from torchrun's store (pytorch issue 135712)."""
    may_restart = _number("TORCHELASTIC_MAX_RESTARTS", 0) > 0
    if may_restart and os.environ.get(OWN_STORE) != "1" and os.environ.get("RANK") == "0":
        logging.getLogger("dmlkit").warning(f"torchrun --max-restarts: a restart may fail unless {OWN_STORE}=1 is set")


def is_first_rank() -> bool:
    """Whether this process speaks for all that torchrun started."""
    return os.environ.get("RANK", "0") == "0"


def lost_ranks(error: RuntimeError) -> bool:
    """Whether an error says that another rank has gone."""
    return isinstance(error, torch.distributed.DistError) or "gloo/transport" in str(error)


def resolve_device(device: str) -> tuple[str, int | None]:
    """The kind of a device and its number, where one was asked for.

    Raises:
        UserError: there is no such device here.
    """
    match = re.fullmatch(r"(auto|cpu|mps|cuda)(?::(\d+))?", device)
    if match is None or (match[2] and match[1] != "cuda"):
        raise UserError(f"--device {device}: expected auto, cpu, cuda, cuda:N or mps")
    kind, index = match[1], int(match[2]) if match[2] else None
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if kind == "cuda" and not torch.cuda.is_available():
        raise UserError(f"--device {device}: torch finds no CUDA device here; use --device cpu")
    if kind == "cuda" and index is not None and index >= torch.cuda.device_count():
        raise UserError(f"--device {device}: there are {torch.cuda.device_count()} CUDA devices, counted from 0")
    if kind == "mps" and not torch.backends.mps.is_available():
        raise UserError(f"--device {device}: torch finds no Apple GPU here; use --device cpu")
    return kind, index


def keep_freed_memory() -> None:
    """Let glibc reuse the memory of large tensors instead of giving it back and asking for it again.

    The system clears every page that it hands out anew: 64 images of 224 x 224 become floats in 24 ms, with memory
    kept in 3 ms; the gradient of 1 000 000 proxies, 2 GB, 6 s longer. Other C libraries are left as they are.
    """
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "mallopt"):
        for option in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
            library.mallopt(option, 2**31 - 1)
