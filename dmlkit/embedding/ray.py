"""Embed on a Ray cluster: Ray Data hands the parts to workers, adds workers, and replaces those that die."""

import logging
import os
from pathlib import Path
from typing import Any

from dmlkit.distributed.launch import start_fabric
from dmlkit.distributed.ray_cluster import check_ray, ray_cluster, worker_share
from dmlkit.embedding.in_memory import Advance
from dmlkit.embedding.job import Compute, EmbedJob, PartEmbedder
from dmlkit.embedding.trained import load_model
from dmlkit.errors import UserError
from dmlkit.recipe.plugin import refuse_plugin_files
from dmlkit.run_folder.folder import CheckpointName, RunFolder


def ray_compute(job: EmbedJob, run: Path, checkpoint: CheckpointName, device: str) -> Compute:
    """How Ray computes parts: on the cluster that ``RAY_ADDRESS`` names, or that runs on this machine, or a new one.

    A worker takes a GPU and the processors that are its due, which read images, or, where there is no GPU, one
    processor. Each loads the model once.

    Args:
        job: what, and where to; its dataset is sent to the workers.
        run: the run folder, which all workers reach, as they do the images and the output.
        checkpoint: whose weights.
        device: ``auto`` (GPUs where the cluster has some), ``cpu`` or ``cuda``.

    Raises:
        UserError: Ray is not installed, or it cannot give such a device.
    """
    check_ray(device, "ray.data")
    refuse_plugin_files()
    import ray.data

    def compute(numbers: list[int], advance: Advance) -> None:
        if not numbers:
            return
        with ray_cluster("complete parts stay, the same command goes on") as is_new:
            if is_new:
                _keep_quiet()
            gpus, processors = worker_share(device)
            arguments = (ray.put(job), run, checkpoint, "cuda" if gpus else "cpu", processors, Path.cwd())
            items = ray.data.from_items([{"part": part} for part in numbers], override_num_blocks=len(numbers))
            done = items.map_batches(
                RayWorker,
                fn_constructor_args=arguments,
                batch_size=1,
                num_gpus=gpus,
                num_cpus=processors,
                compute=ray.data.ActorPoolStrategy(min_size=1, max_size=len(numbers)),
            )
            for row in done.iter_rows():
                if row["fault"]:
                    raise UserError(row["fault"])
                advance(len(job.parts.images(row["part"])))

    return compute


def _keep_quiet() -> None:
    """An error of Ray Data reaches the user as one, not as Ray's log."""
    import ray.data

    ray.data.DataContext.get_current().enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)


class RayWorker:
    """One worker: the model, loaded once; called with the number of a part, it computes and writes that part.

    Args:
        job: what, and where to, or Ray's reference to it.
        run: the run folder.
        checkpoint: whose weights.
        device: ``cpu`` or ``cuda``.
        processors: its due.
        folder: where the command was started; relative paths begin there.
    """

    def __init__(
        self, job: Any, run: Path, checkpoint: CheckpointName, device: str, processors: int, folder: Path
    ) -> None:
        import ray

        self.fault = ""
        try:
            os.chdir(folder)
            self.job: EmbedJob = ray.get(job)
            fabric = start_fabric(device)
            trained = load_model(RunFolder(run), fabric, checkpoint)
            self.job.parts.check(self.job.describe(trained))
            self.embed = PartEmbedder(self.job, trained, fabric, workers=processors if device == "cuda" else 0)
        except (UserError, OSError) as error:  # told by the first call: what fails here Ray would try for ever
            self.fault = f"a Ray worker cannot start: {error}"

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Compute a part; a user's mistake comes back as text, since Ray would wrap an exception in its own."""
        number = int(batch["part"][0])
        if not self.fault:
            try:
                self.embed([number], lambda _: None)
            except (UserError, OSError) as error:
                self.fault = str(error)
        return {"part": [number], "fault": [self.fault]}
