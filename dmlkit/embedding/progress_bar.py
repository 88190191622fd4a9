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
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from dmlkit.embedding.in_memory import Advance


class _Speed(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(f"{task.finished_speed or task.speed or 0:,.0f} images/s")


@contextmanager
def image_progress(console: Console, description: str, total: int) -> Generator[Advance]:
    """A bar over images; yields what advances it. Silent where there is no terminal."""
    columns = (
        TextColumn(description, markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        _Speed(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task(description, total=total)
        yield lambda images: bar.update(task, advance=images)
