"""Connection to a Ray cluster, and the resources of its workers."""

import logging
import os
import signal
from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module

from dmlkit.distributed.stopping import StopRequest
from dmlkit.errors import UserError

MAX_READERS = 8  # processes per GPU that read images


def check_ray(device: str, *modules: str) -> None:
    """Raise a `UserError` unless Ray is installed and supports the device.

    Args:
        device: ``auto`` (GPUs if the cluster has any), ``cpu`` or ``cuda``.
        modules: further modules of Ray that are needed, e.g. ``ray.data``.
    """
    try:
        for module in ("ray", *modules):
            import_module(module)
    except ImportError:
        raise UserError("--engine ray: Ray is not installed; install it with: pip install 'dmlkit[ray]'") from None
    if device not in ("auto", "cpu", "cuda"):
        raise UserError(f"--device {device}: expected auto, cpu or cuda, because Ray assigns devices to workers")


@contextmanager
def ray_cluster(hint: str) -> Generator[bool]:
    """Connect to Ray, unless the program is connected, with few messages from Ray itself.

    The cluster is the one named by ``RAY_ADDRESS``, one that runs on this machine, or a new one.

    Args:
        hint: what is kept if a worker fails, and how to continue, for the error.

    Yields:
        Whether the connection is new; a new connection ends with the block.

    Raises:
        UserError: a worker of a new connection fails permanently.
    """
    import ray
    from ray.exceptions import RayError

    if ray.is_initialized():
        yield False
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no usage reports from our clusters
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # else it warns about how Ray Data starts workers
    handler = signal.getsignal(signal.SIGTERM)
    ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    if isinstance(handler, StopRequest):  # Ray's handler would end the process immediately
        signal.signal(signal.SIGTERM, handler)
    try:
        yield True
    except RayError as error:
        words = str(error).strip().splitlines()[-1]
        raise UserError(
            f"--engine ray: a worker failed: {words}; every machine needs the same version of dmlkit and its "
            f"dependencies; {hint} (--debug shows Ray's error)"
        ) from error
    finally:
        ray.shutdown()


def worker_share(device: str) -> tuple[int, int]:
    """Return the numbers of GPUs and processors per worker, such that every machine can use all its GPUs.

    Without GPUs a worker has one processor.

    Raises:
        UserError: the device is ``cuda``, and no machine has a GPU.
    """
    import ray

    machines: list[dict[str, float]] = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    due = [machine.get("CPU", 0) // machine["GPU"] for machine in machines if machine.get("GPU")]
    if device == "cpu" or (device == "auto" and not due):
        return 0, 1
    if not due:
        raise UserError("--device cuda: no machine of this Ray cluster has a GPU; use --device cpu")
    return 1, int(min(MAX_READERS, max(1, min(due))))
