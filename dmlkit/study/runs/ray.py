"""Several runs of a study at once on a Ray cluster: each a task with a GPU, or a processor, of its own."""

import json
import platform
import signal
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import chdir, contextmanager
from pathlib import Path
from time import monotonic, sleep
from typing import Any, NamedTuple

import torch

from dmlkit.distributed.launch import start_fabric
from dmlkit.distributed.ray_cluster import check_ray, ray_cluster, worker_share
from dmlkit.distributed.stopping import StopRequest, TrainingStoppedError
from dmlkit.errors import UserError
from dmlkit.recipe.plugin import refuse_plugin_files
from dmlkit.run_folder.documents import EpochRow
from dmlkit.study.protocol import ProtocolName, is_complete, run_once
from dmlkit.study.runs.workers import Event, ForwardedProgress, Notify, Run

RETRIES = 10  # of a run whose worker dies
LOOK = 0.5  # seconds between two looks at the runs
ARRIVAL = 60  # seconds after which a network file system shows a file on every machine


class Setting(NamedTuple):
    """What the tasks of a study share."""

    protocol: ProtocolName
    gpus: int  # of a task, 0 or 1
    processors: int  # of a task
    folder: Path  # where the command was started; relative paths begin there
    command: list[str]  # of the driver's process, for the record of each run


class Outcome(NamedTuple):
    """How a task ended: with a complete run, unless it says otherwise."""

    stopped: bool = False  # after a checkpoint
    fault: str = ""  # a user's mistake comes back as text, since Ray would wrap an exception in its own


def train_on_ray(
    runs: Sequence[Run], protocol: ProtocolName, device: str, stop_requested: Callable[[], bool], notify: Notify
) -> None:
    """Train runs on the Ray cluster that ``RAY_ADDRESS`` names, or that runs on this machine, or on a new one.

    Each run is a task: Ray places it, and asks an autoscaler for more machines while some wait. It takes a GPU and
    the processors that are its due, or, where there is no GPU, one processor, and goes on from its last checkpoint
    when its worker dies. All machines must reach the study's folder and the images by the same paths; relative paths
    begin where the driver was started.

    Args:
        runs: none of them complete, in the order in which they begin.
        protocol: of the study.
        device: ``auto`` (GPUs where the cluster has some), ``cpu`` or ``cuda``.
        stop_requested: looked at now and then; then every run stops after a checkpoint.
        notify: called with what happens, and with ``finish`` or ``fail`` after each run.

    Raises:
        UserError: Ray is not installed or has no such device, or its workers keep dying.
        TrainingStoppedError: as asked, after checkpoints.
    """
    check_ray(device)
    refuse_plugin_files()
    with ray_cluster("complete runs and checkpoints stay, the same command goes on"):
        gpus, processors = worker_share(device)
        tasks = _Tasks(Setting(protocol, gpus, processors, Path.cwd(), sys.argv), notify)
        try:
            for run in runs:
                tasks.start(run)
            while tasks.pending:
                tasks.advance()
                if tasks.faults or stop_requested():
                    tasks.stop()
        finally:
            tasks.stop()
    if tasks.faults:
        raise tasks.faults[0]
    if tasks.stopped:
        raise TrainingStoppedError("stopped, each run after a checkpoint")


class _Tasks:
    """The tasks of runs, and what becomes of them.

    Args:
        setting: of all of them.
        notify: see `train_on_ray`.
    """

    def __init__(self, setting: Setting, notify: Notify) -> None:
        import ray

        self.setting, self.notify = setting, notify
        self.board = start_board()
        self.awake = self.board.put.remote()  # known once it has started
        self.train: Any = ray.remote(num_gpus=setting.gpus, num_cpus=setting.processors, max_retries=RETRIES)(train_run)
        self.pending: dict[Any, Run] = {}  # by Ray's reference to the outcome
        self.faults: list[UserError] = []
        self.stopped = False

    def start(self, run: Run) -> None:
        run.folder.parent.mkdir(parents=True, exist_ok=True)  # the task looks whether its machine reaches that
        self.pending[self.train.remote(run, self.setting, self.board)] = run

    def advance(self) -> None:
        """Wait a little, notify what happened meanwhile, and see to the tasks that ended."""
        import ray

        ended, _ = ray.wait(list(self.pending), num_returns=len(self.pending), timeout=LOOK)
        if ray.wait([self.awake], timeout=LOOK)[0]:
            for event in ray.get(self.board.take.remote()):
                self.notify(*unpacked(event))
        elif not self.stopped:
            return  # before it has started no run is told of
        for task in ended:
            try:
                self._end(task, self.pending.pop(task))
            except UserError as error:
                self.faults.append(error)

    def _end(self, task: Any, run: Run) -> None:
        import ray
        from ray.exceptions import TaskCancelledError

        try:
            outcome: Outcome = ray.get(task)
        except TaskCancelledError:  # before it began
            if self.stopped:
                return
            raise
        if outcome.fault:
            self.notify(run.name, "fail", {"reason": outcome.fault})
        elif not outcome.stopped:
            _wait_for_figures(run, self.setting.protocol)
            self.notify(run.name, "finish", {})
        elif not self.stopped:  # something else ended its worker
            self.start(run)

    def stop(self) -> None:
        """Let no other task begin, and ask those that did to stop after a checkpoint."""
        import ray

        if not self.stopped and self.pending:
            self.stopped = True
            for task in self.pending:
                ray.cancel(task, recursive=False)  # not what it has told


def _wait_for_figures(run: Run, protocol: ProtocolName) -> None:
    """Else the driver would take a run that it does not see yet for one that was never trained."""
    deadline = monotonic() + ARRIVAL
    while not is_complete(protocol, run.folder):
        if monotonic() > deadline:
            raise UserError(f"{run.folder}: its figures are not here; every machine of the Ray cluster must reach it")
        sleep(LOOK)


def train_run(run: Run, setting: Setting, board: Any) -> Outcome:
    """Train a run; Ray calls this on one of the cluster's machines."""
    import ray

    with _stoppable():
        try:
            sys.argv = setting.command
            torch.set_num_threads(setting.processors)
            with chdir(setting.folder):
                if not run.folder.parent.is_dir():
                    raise UserError(f"{run.folder.parent}: not there; every machine of the Ray cluster must reach it")
                fabric = start_fabric("cuda" if setting.gpus else "cpu", run.recipe.training.precision)
                told = ForwardedProgress(run.name, lambda event: board.put.remote(packed(event)))
                run_once(setting.protocol, run.recipe, run.folder, fabric, told.start_model)
        except TrainingStoppedError:
            return Outcome(stopped=True)
        except (UserError, OSError) as error:
            return Outcome(fault=f"{run.name}, on {platform.node()}: {error}")
        finally:
            ray.get(board.put.remote())  # after it all that was told is on the board
    return Outcome()


class _RepeatableStop(StopRequest):
    """A request that may come twice."""

    def __call__(self, *_: Any) -> None:
        self.came = True


@contextmanager
def _stoppable() -> Generator[None]:
    """Ray's way to cancel a task is Ctrl-C, and its way to end a worker SIGTERM: both are requests to training."""
    request = _RepeatableStop()
    previous = {number: signal.signal(number, request) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def start_board() -> Any:
    """An actor beside the driver that keeps what the runs notify, as text: it imports neither dmlkit nor torch."""
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
    """What a run tells, as text."""
    name, what, told = event
    return json.dumps((name, what, {"row": told["row"].model_dump(mode="json")} if what == "epoch" else told))


def unpacked(text: str) -> Event:
    """What was packed."""
    name, what, told = json.loads(text)
    return name, what, {"row": EpochRow.model_validate(told["row"])} if what == "epoch" else told
