"""``dmlkit final``: training on every class."""

from pathlib import Path
from typing import Annotated

from dmlkit.cli.options import Device, RunPath, SetDataset, command
from dmlkit.cli.train import Overwrite, Resume, train_and_print


@command("dmlkit final runs/demo")
def final(
    run: RunPath,
    /,
    output: Annotated[Path | None, "FOLDER", "Run folder to write. Default: RUN-final."] = None,
    overrides: SetDataset = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    device: Device = "auto",
) -> None:
    """Train the recipe of a finished run on every class, for as many epochs as validation chose.

    No class is left to test this model on: report the results of RUN for it.
    """
    from dmlkit.run_folder.folder import RunFolder, final_place

    output = final_place(run, output)
    RunFolder(output).check_startable(resume=resume, overwrite=overwrite)

    from dmlkit.training.summary import final_recipe

    recipe, basis = final_recipe(run, overrides or [])
    train_and_print(recipe, output, device, resume=resume, overwrite=overwrite, basis=basis)
