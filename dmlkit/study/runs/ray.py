"""Concurrent runs of a study on a Ray cluster: each is a task with its own GPU or processor."""

import json
import platform
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import chdir
from pathlib import Path
from time import monotonic, sleep
from typing import Any, NamedTuple

import torch

from dmlkit.distributed.launch import start_fabric
from dmlkit.distributed.ray_cluster import check_ray, ray_cluster, worker_share
from dmlkit.distributed.stopping import StopRequest, TrainingStoppedError, handled_by
from dmlkit.errors import UserError, reason_of
from dmlkit.loading.batches import limit_workers
from dmlkit.recipe.plugin import refuse_plugin_files
from dmlkit.run_folder.documents import EpochRow
from dmlkit.study.protocol import is_complete, run_once
from dmlkit.study.record import ProtocolName
from dmlkit.study.runs.workers import Event, ForwardedProgress, Notify, Run

RETRIES = 10  # for a run whose worker dies
LOOK = 0.5  # seconds between two checks of the runs
ARRIVAL = 60  # seconds after which a network file system shows a file on every machine


class Setting(NamedTuple):
    """Settings that the tasks of a study share."""

    protocol: ProtocolName
    gpus: int  # per task, 0 or 1
    processors: int  # per task
    folder: Path  # working folder of the command, for relative paths
    command: list[str]  # of the driver's process, for the record of each run


class Outcome(NamedTuple):
    """Outcome of a task; by default the run is complete."""

    stopped: bool = False  # after a checkpoint
    error: str = ""  # message of a user error: Ray would wrap an exception in its own


def train_on_ray(
    runs: Sequence[Run], protocol: ProtocolName, device: str, stop_requested: Callable[[], bool], notify: Notify
) -> None:
    """Train runs on the Ray cluster that ``RAY_ADDRESS`` names, or that runs on this machine, or on a new one.

    Each run is a task that Ray schedules; an autoscaler adds machines while tasks wait. A task has a GPU and a share of
    the processors, or one processor on a cluster without GPUs. It resumes from its last checkpoint if its worker dies.
    All machines must reach the study's folder and the images by the same paths; relative paths start at the working
    folder of the driver.

    Args:
        runs: runs that are not complete, in the order of their start.
        device: ``auto`` (GPUs if the cluster has some), ``cpu`` or ``cuda``.
        stop_requested: checked regularly; if it returns True every run stops after a checkpoint.
        notify: called with the events of runs, and with ``finish`` or ``fail`` after each run.

    Raises:
        UserError: Ray is not installed or has no such device, or its workers die repeatedly.
        TrainingStoppedError: a stop was requested; all runs have checkpoints.
    """
    check_ray(device)
    refuse_plugin_files()
    with ray_cluster("complete runs and checkpoints are kept; rerun the same command to resume"):
        gpus, processors = worker_share(device)
        tasks = _Tasks(Setting(protocol, gpus, processors, Path.cwd(), sys.argv), notify)
        try:
            for run in runs:
                tasks.start(run)
            while tasks.pending:
                tasks.advance()
                if tasks.errors or stop_requested():
                    tasks.stop()
        finally:
            tasks.stop()
    if tasks.errors:
        raise tasks.errors[0]
    if tasks.stopped:
        raise TrainingStoppedError("stopped, each run after a checkpoint")


class _Tasks:
    """Tasks of the runs, and their outcomes."""

    def __init__(self, setting: Setting, notify: Notify) -> None:
        import ray

        self.setting, self.notify = setting, notify
        self.board = start_board()
        self.awake = self.board.put.remote()  # ready once the board has started
        self.train: Any = ray.remote(num_gpus=setting.gpus, num_cpus=setting.processors, max_retries=RETRIES)(train_run)
        self.pending: dict[Any, Run] = {}  # by Ray's reference to the outcome
        self.errors: list[UserError] = []
        self.stopped = False

    def start(self, run: Run) -> None:
        """Submit a run as a task."""
        run.folder.parent.mkdir(parents=True, exist_ok=True)  # the task checks that its machine reaches this folder
        self.pending[self.train.remote(run, self.setting, self.board)] = run

    def advance(self) -> None:
        """Wait up to `LOOK` seconds, pass new events on, and process the tasks that ended."""
        import ray

        ended, _ = ray.wait(list(self.pending), num_returns=len(self.pending), timeout=LOOK)
        if ray.wait([self.awake], timeout=LOOK)[0]:
            for event in ray.get(self.board.take.remote()):
                self.notify(*unpacked(event))
        elif not self.stopped:
            return  # no run can report before the board has started
        for task in ended:
            try:
                self._end(task, self.pending.pop(task))
            except UserError as error:
                self.errors.append(error)

    def _end(self, task: Any, run: Run) -> None:
        import ray
        from ray.exceptions import TaskCancelledError

        try:
            outcome: Outcome = ray.get(task)
        except TaskCancelledError:  # before it started
            if self.stopped:
                return
            raise
        if outcome.error:
            self.notify(run.name, "fail", {"reason": outcome.error})
        elif not outcome.stopped:
            _wait_for_figures(run, self.setting.protocol)
            self.notify(run.name, "finish", {})
        elif not self.stopped:  # something else ended its worker
            self.start(run)

    def stop(self) -> None:
        """Cancel the tasks that wait, and stop the others after a checkpoint."""
        import ray

        if not self.stopped and self.pending:
            self.stopped = True
            for task in self.pending:
                ray.cancel(task, recursive=False)  # not the events that it has sent


def _wait_for_figures(run: Run, protocol: ProtocolName) -> None:
    """Wait until the driver sees the figures of a run, which it would otherwise train again."""
    deadline = monotonic() + ARRIVAL
    while not is_complete(protocol, run.folder):
        if monotonic() > deadline:
            raise UserError(
                f"{run.folder}: the results of this run are missing; every machine of the Ray cluster must reach it"
            )
        sleep(LOOK)


def train_run(run: Run, setting: Setting, board: Any) -> Outcome:
    """Train a run; Ray calls this on one of the cluster's machines."""
    import ray

    # Ray cancels a task by SIGINT and ends a worker by SIGTERM
    with handled_by(_RepeatableStop(), signal.SIGINT, signal.SIGTERM):
        try:
            sys.argv = setting.command
            torch.set_num_threads(setting.processors)
            limit_workers(setting.processors)
            with chdir(setting.folder):
                if not run.folder.parent.is_dir():
                    raise UserError(
                        f"{run.folder.parent}: does not exist; every machine of the Ray cluster must reach it"
                    )
                fabric = start_fabric("cuda" if setting.gpus else "cpu", run.recipe.training.precision)
                progress = ForwardedProgress(run.name, lambda event: board.put.remote(packed(event)))
                run_once(setting.protocol, run.recipe, run.folder, fabric, progress.start_model)
        except TrainingStoppedError:
            return Outcome(stopped=True)
        except (UserError, OSError) as error:
            return Outcome(error=f"{run.name}, on {platform.node()}: {reason_of(error)}")
        finally:
            ray.get(board.put.remote())  # afterwards all earlier events are on the board
    return Outcome()


class _RepeatableStop(StopRequest):
    """Stop request that may come twice."""

    def __call__(self, *_: Any) -> None:
        self.came = True


def start_board() -> Any:
    """Start an actor that collects the events of runs as text; it imports neither dmlkit nor torch."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    class Board:
        def __init__(self) -> None:
            self.events: list[str] = []

        def put(self, *events: str) -> None:
            self.events += events

        def take(self) -> list[str]:
            events, self.events = self.events, []
            return events

    actor: Any = ray.remote(Board)
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    return actor.options(num_cpus=0, scheduling_strategy=here).remote()  # elsewhere it could die before the driver


def packed(event: Event) -> str:
    """Return an event as text."""
    name, method, arguments = event
    is_epoch = method == "epoch"
    return json.dumps((name, method, {"row": arguments["row"].model_dump(mode="json")} if is_epoch else arguments))


def unpacked(text: str) -> Event:
    """Return the event of a packed text."""
    name, method, arguments = json.loads(text)
    return name, method, {"row": EpochRow.model_validate(arguments["row"])} if method == "epoch" else arguments
