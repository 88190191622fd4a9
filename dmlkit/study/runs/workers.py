"""Several runs of a study at once, each in a process of its own: one a GPU, or with a share of the CPU's cores."""

import os
import signal
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import active_children, connection, get_context, parent_process
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import torch
from lightning_fabric import Fabric

from dmlkit.distributed.launch import start_fabric
from dmlkit.distributed.stopping import StopRequest, TrainingStoppedError
from dmlkit.errors import UserError
from dmlkit.recipe.plugin import load_file, plugin_files
from dmlkit.recipe.schema import Recipe
from dmlkit.run_folder.documents import EpochRow
from dmlkit.study.protocol import ProtocolName, run_once
from dmlkit.training.progress import Progress, Silent

LOOK = 0.2  # seconds between two looks at the processes
TELL = 0.5  # seconds between two steps that a process tells of
Happening = Literal["step", "epoch", "start_model", "finish", "fail"]  # methods of a run's progress
Notify = Callable[[str, Happening, Mapping[str, Any]], None]
"""Takes the name of a run, a method of its progress and what that is called with."""
Event = tuple[str, Happening, Mapping[str, Any]]  # what `Notify` takes


@dataclass(frozen=True)
class Run:
    """A run that a process trains.

    Args:
        name: told with everything that happens in it.
        recipe: with its seed.
        folder: where to.
    """

    name: str
    recipe: Recipe
    folder: Path


@dataclass(frozen=True)
class _Worker:
    """What a process keeps from one run to the next."""

    device: str
    events: "SimpleQueue[Event]"


@dataclass
class ForwardedProgress(Silent):
    """A run's progress in its process: passed on, steps not more often than `TELL`.

    Args:
        name: of the run.
        put: passes an event on.
        last: when a step was passed on, in seconds.
    """

    name: str
    put: Callable[[Event], object]
    last: float = 0.0

    def step(self, **told: Any) -> None:
        if perf_counter() - self.last > TELL:
            self.last = perf_counter()
            self.put((self.name, "step", told))

    def epoch(self, row: EpochRow) -> None:
        self.put((self.name, "epoch", {"row": row}))

    def start_model(self, *_: object) -> Progress:
        self.put((self.name, "start_model", {}))
        return self


_workers: list[_Worker] = []  # of this process: none or one


def train_at_once(
    runs: Sequence[Run],
    protocol: ProtocolName,
    jobs: int,
    fabric: Fabric,
    stop_requested: Callable[[Fabric], bool],
    notify: Notify,
) -> None:
    """Train runs, ``jobs`` of them at once; complete ones are left as they are.

    Each process takes the next GPU in turn, or its share of the threads.

    Args:
        runs: in the order in which they begin.
        protocol: of the study.
        jobs: processes.
        fabric: of this process: says which kind of device.
        stop_requested: looked at now and then; then every run stops after a checkpoint.
        notify: called with what happens, and with ``finish`` or ``fail`` after each run.

    Raises:
        UserError: a process dies.
        TrainingStoppedError: as asked, after checkpoints.
    """
    context = get_context("spawn")  # a forked process cannot use CUDA
    events, devices = context.SimpleQueue(), context.SimpleQueue()
    listen, stop = context.Pipe(duplex=False)
    for job in range(jobs):
        devices.put(_device(fabric, job))
    threads = max(1, torch.get_num_threads() // jobs)
    pending: set[Future[None]] = set()
    with ProcessPoolExecutor(jobs, context, _begin, (events, devices, listen, threads, plugin_files())) as pool:
        try:
            with _ignored(signal.SIGINT):  # Ctrl-C goes to every process; here the first one tells the others
                names = {pool.submit(_train, run, protocol): run.name for run in runs}
            pending.update(names)
            while pending:
                done, waiting = wait(pending, LOOK, FIRST_COMPLETED)
                pending = {future for future in waiting if not future.cancelled()}  # which `wait` never calls done
                while not events.empty():
                    notify(*events.get())
                for future in done:
                    if not future.cancelled() and not isinstance(future.exception(), TrainingStoppedError):
                        _notify_end(future, names[future], notify)
                if stop_requested(fabric) and not stop.closed:
                    _cancel(pending)
                    stop.close()
        except BrokenProcessPool:
            raise UserError(
                "a process of the study died, perhaps for lack of memory; go on with the same command, or with fewer "
                "--jobs"
            ) from None
        except Exception:
            _cancel(pending)
            stop.close()
            while not all(future.done() for future in pending):
                wait(pending, LOOK)
                while not events.empty():  # a pipe holds 64 KB: who writes to a full one would wait for ever
                    events.get()
            raise
        except KeyboardInterrupt:  # Ctrl-C came twice
            for process in active_children():
                process.kill()
            raise
    if stop.closed:
        raise TrainingStoppedError("stopped, each run after a checkpoint")


def _notify_end(future: Future[None], name: str, notify: Notify) -> None:
    try:
        future.result()
    except UserError as error:
        notify(name, "fail", {"reason": str(error)})
    else:
        notify(name, "finish", {})


def _cancel(futures: Iterable[Future[None]]) -> None:
    """Those that have not begun; unlike ``pool.shutdown(wait=False)``, the pool's end waits for the others still."""
    for future in futures:
        future.cancel()


def _device(fabric: Fabric, job: int) -> str:
    """The device of a process: the next GPU after the first one's."""
    kind, index = fabric.device.type, fabric.device.index
    return f"cuda:{(index + job) % torch.cuda.device_count()}" if kind == "cuda" else kind


@contextmanager
def _ignored(number: signal.Signals) -> Generator[None]:
    """Processes that begin meanwhile ignore this signal for good."""
    previous = signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(number, previous)


def _begin(
    events: "SimpleQueue[Event]",
    devices: "SimpleQueue[str]",
    listen: "connection.Connection[Any, Any]",
    threads: int,
    plugins: Sequence[Path],
) -> None:
    """What a process does first: before it is handed a recipe it has the members that the recipe names."""
    for path in plugins:
        load_file(path)
    request = StopRequest()
    signal.signal(signal.SIGTERM, request)
    threading.Thread(target=_listen, args=(request, listen), daemon=True).start()
    torch.set_num_threads(threads)
    _workers.append(_Worker(devices.get(), events))


def _listen(request: StopRequest, listen: "connection.Connection[Any, Any]") -> None:
    """Stop with the study, and end with its process."""
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel, listen])
    request.came = True
    connection.wait([parent.sentinel])
    os._exit(1)  # the main thread may be anywhere; a run goes on from its checkpoint


def _train(run: Run, protocol: ProtocolName) -> None:
    (worker,) = _workers
    fabric = start_fabric(worker.device, run.recipe.training.precision)
    run_once(protocol, run.recipe, run.folder, fabric, ForwardedProgress(run.name, worker.events.put).start_model)
