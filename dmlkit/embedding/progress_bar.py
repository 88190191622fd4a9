"""A bar over images, in a terminal."""

from collections.abc import Generator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text


class _Speed(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(f"{task.finished_speed or task.speed or 0:,.0f} images/s")


@contextmanager
def image_progress(console: Console, description: str, total: int | None = None) -> Generator["ImageBar"]:
    """A bar over images; yields what advances it. Silent where there is no terminal."""
    columns = (
        TextColumn(description, markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        _Speed(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        yield ImageBar(bar, bar.add_task(description, total=total))


class ImageBar:
    """Called with how many more images are done."""

    def __init__(self, bar: Progress, task: TaskID) -> None:
        self.bar, self.task = bar, task

    def __call__(self, images: int) -> None:
        self.bar.update(self.task, advance=images)

    def expect(self, total: int) -> None:
        """Told once how many there are."""
        self.bar.update(self.task, total=total)
