"""A Ray cluster: a connection to it, and what one of its workers takes."""

import logging
import os
import signal
from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module

from dmlkit.distributed.stopping import StopRequest
from dmlkit.errors import UserError

MAX_READERS = 8  # processes beside a GPU that read images


def check_ray(device: str, *modules: str) -> None:
    """Refuse what Ray cannot do, before anything is done.

    Args:
        device: ``auto`` (GPUs where the cluster has some), ``cpu`` or ``cuda``.
        modules: of Ray, e.g. ``ray.data``, that are needed too.

    Raises:
        UserError: Ray is not installed, or it cannot give such a device.
    """
    try:
        for module in ("ray", *modules):
            import_module(module)
    except ImportError:
        raise UserError("--engine ray: Ray is not installed; pip install 'dmlkit[ray]'") from None
    if device not in ("auto", "cpu", "cuda"):
        raise UserError(f"--device {device}: Ray hands every worker its device; expected auto, cpu or cuda")


@contextmanager
def ray_cluster(hint: str) -> Generator[bool]:
    """A connection to Ray, unless the program has one, that keeps Ray's own messages few.

    It goes to the cluster that ``RAY_ADDRESS`` names, or that runs on this machine, or to a new one.

    Args:
        hint: what stays when a worker fails, and how to go on.

    Yields:
        Whether the connection is new, and ends with the block.

    Raises:
        UserError: over a new connection a worker fails for good.
    """
    import ray
    from ray.exceptions import RayError

    if ray.is_initialized():
        yield False
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a cluster of ours tells nobody about it
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # else it warns of Ray Data's own way to start workers
    handler = signal.getsignal(signal.SIGTERM)
    ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    if isinstance(handler, StopRequest):  # Ray's own handler would end the process at once
        signal.signal(signal.SIGTERM, handler)
    try:
        yield True
    except RayError as error:
        words = str(error).strip().splitlines()[-1]
        raise UserError(
            f"--engine ray: a worker failed: {words}; every machine needs the same dmlkit and what it imports; "
            f"{hint} (--debug shows Ray's words)"
        ) from error
    finally:
        ray.shutdown()


def worker_share(device: str) -> tuple[int, int]:
    """GPUs and processors of one worker, such that every machine with GPUs can keep all of them busy.

    Without GPUs a worker has one processor.

    Raises:
        UserError: ``cuda``, where no machine has a GPU.
    """
    import ray

    machines: list[dict[str, float]] = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    due = [machine.get("CPU", 0) // machine["GPU"] for machine in machines if machine.get("GPU")]
    if device == "cpu" or (device == "auto" and not due):
        return 0, 1
    if not due:
        raise UserError("--device cuda: no machine of this Ray cluster has a GPU; use --device cpu")
    return 1, int(min(MAX_READERS, max(1, min(due))))
