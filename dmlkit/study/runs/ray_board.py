"""What the runs of a study on a Ray cluster tell the driver."""

import json
from typing import Any

from dmlkit.run_folder.documents import EpochRow
from dmlkit.study.runs.workers import Event


def start_board() -> Any:
    """An actor beside the driver that keeps what the runs tell, as text: it imports neither dmlkit nor torch."""
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
