"""Concurrent runs of a study in processes, each with its own GPU or a share of the CPU cores."""

import os
import signal
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import active_children, connection, get_context, parent_process
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import torch

from dmlkit.distributed.device_name import count_cores
from dmlkit.distributed.launch import Ranks, start_ranks
from dmlkit.distributed.stopping import StopRequest, TrainingStoppedError, handled_by
from dmlkit.errors import UserError, reason_of
from dmlkit.loading.batches import limit_workers
from dmlkit.recipe.plugin import load_file, plugin_files
from dmlkit.recipe.schema import Recipe
from dmlkit.run_folder.documents import EpochRow
from dmlkit.study.protocol import run_once
from dmlkit.study.record import ProtocolName
from dmlkit.training.progress import Progress, Silent

LOOK = 0.2  # seconds between two checks of the processes
STEP_INTERVAL = 0.5  # least seconds between two steps that a process reports
Happening = Literal["step", "epoch", "start_model", "finish", "fail"]  # methods of a run's progress
Notify = Callable[[str, Happening, Mapping[str, Any]], None]
"""Called with the name of a run, a method of its progress, and the arguments of this method."""
Event = tuple[str, Happening, Mapping[str, Any]]  # the arguments of `Notify`


@dataclass(frozen=True)
class Run:
    """Run of a study."""

    name: str  # which all its events carry
    recipe: Recipe  # with its seed
    folder: Path


@dataclass
class ForwardedProgress(Silent):
    """Progress of a run that is forwarded as events, with at most one step per `STEP_INTERVAL`."""

    name: str  # of the run
    put: Callable[[Event], object]  # forwards an event
    last: float = 0.0  # time of the last forwarded step, in seconds

    def step(self, **arguments: Any) -> None:
        """See `Progress`."""
        if perf_counter() - self.last > STEP_INTERVAL:
            self.last = perf_counter()
            self.put((self.name, "step", arguments))

    def epoch(self, row: EpochRow) -> None:
        """See `Progress`."""
        self.put((self.name, "epoch", {"row": row}))

    def start_model(self) -> Progress:
        """Forward the start of a model, and return its progress."""
        self.put((self.name, "start_model", {}))
        return self


_workers: list[tuple[str, "SimpleQueue[Event]"]] = []  # device and events; at most one per process


def train_at_once(
    runs: Sequence[Run],
    protocol: ProtocolName,
    workers: int,
    ranks: Ranks,
    stop_requested: Callable[[Ranks], bool],
    notify: Notify,
) -> None:
    """Train runs in ``workers`` processes; complete runs do not change.

    Each process uses the next GPU in turn, or its share of the threads, and its share of the cores to read images.

    Args:
        stop_requested: checked regularly; if it returns True every run stops after a checkpoint.
        notify: called with the events of runs, and with ``finish`` or ``fail`` after each run.
    """
    context = get_context("spawn")  # a forked process cannot use CUDA
    events, devices = context.SimpleQueue(), context.SimpleQueue()
    listen, stop = context.Pipe(duplex=False)
    kind, first = ranks.device.type, ranks.device.index
    for worker in range(workers):  # GPUs in turn, starting with that of the first process
        devices.put(f"cuda:{(first + worker) % torch.cuda.device_count()}" if kind == "cuda" else kind)
    threads, cores = max(1, torch.get_num_threads() // workers), max(1, count_cores() // workers)
    pending: set[Future[None]] = set()
    with ProcessPoolExecutor(
        workers, context, _begin, (events, devices, listen, cores, threads, plugin_files())
    ) as pool:
        try:
            # Ctrl-C goes to every process, but only this one shall stop the others: they start with it ignored
            with handled_by(signal.SIG_IGN, signal.SIGINT):
                names = {pool.submit(_train, run, protocol): run.name for run in runs}
            pending.update(names)
            while pending:
                done, waiting = wait(pending, LOOK, FIRST_COMPLETED)
                pending = {future for future in waiting if not future.cancelled()}  # `wait` never counts these as done
                _forward(events, notify)
                for future in done:
                    _notify_end(future, names[future], notify)
                if stop_requested(ranks) and not stop.closed:
                    _cancel(pending)
                    stop.close()
        except BrokenProcessPool:
            raise UserError(
                "a process of the study died, perhaps because memory ran out; rerun the same command to resume, or use "
                "fewer --workers"
            ) from None
        except Exception:
            _cancel(pending)
            stop.close()
            _wait_for_all(pending, events)
            raise
        except KeyboardInterrupt:  # Ctrl-C came twice
            for process in active_children():
                process.kill()
            raise
    if stop.closed:
        raise TrainingStoppedError("stopped, each run after a checkpoint")


def _forward(events: "SimpleQueue[Event]", notify: Notify) -> None:
    while not events.empty():
        notify(*events.get())


def _wait_for_all(runs: Collection[Future[None]], events: "SimpleQueue[Event]") -> None:
    while not all(run.done() for run in runs):
        wait(runs, LOOK)
        while not events.empty():  # a pipe has 64 KB: a process that writes to a full pipe would wait forever
            events.get()


def _notify_end(future: Future[None], name: str, notify: Notify) -> None:
    """Forward how a run ended, unless it was stopped."""
    if future.cancelled() or isinstance(future.exception(), TrainingStoppedError):
        return
    try:
        future.result()
    except (UserError, OSError) as error:
        notify(name, "fail", {"reason": reason_of(error)})
    else:
        notify(name, "finish", {})


def _cancel(futures: Iterable[Future[None]]) -> None:
    """Cancel runs that have not started; unlike ``pool.shutdown(wait=False)``, the pool still waits for the others."""
    for future in futures:
        future.cancel()


def _begin(
    events: "SimpleQueue[Event]",
    devices: "SimpleQueue[str]",
    listen: "connection.Connection[Any, Any]",
    cores: int,
    threads: int,
    plugins: Sequence[Path],
) -> None:
    """Initialize a process: load plugins, which must come before any recipe, and listen for a stop."""
    for path in plugins:
        load_file(path)
    request = StopRequest()
    signal.signal(signal.SIGTERM, request)
    threading.Thread(target=_listen, args=(request, listen), daemon=True).start()
    limit_workers(cores)
    torch.set_num_threads(threads)
    _workers.append((devices.get(), events))


def _listen(request: StopRequest, listen: "connection.Connection[Any, Any]") -> None:
    """Stop the run when the study stops, and exit when the study's process ends."""
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel, listen])
    request.came = True
    connection.wait([parent.sentinel])
    os._exit(1)  # the main thread may be anywhere; a run resumes from its checkpoint


def _train(run: Run, protocol: ProtocolName) -> None:
    ((device, events),) = _workers
    ranks = start_ranks(device, run.recipe.training.precision)
    run_once(protocol, run.recipe, run.folder, ranks, ForwardedProgress(run.name, events.put).start_model)
