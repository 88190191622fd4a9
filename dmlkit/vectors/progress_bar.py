"""Progress over images: a bar in a terminal, elsewhere a line now and then."""

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import monotonic

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

Advance = Callable[[int], None]
"""Callback with the number of images that are newly done."""
Bar = Callable[[str, int], AbstractContextManager[Advance]]
"""Starts a step, given its name and its number of images, and returns its `Advance`."""
EMBEDDING = "embedding"
"""Name of the most frequent step, in which images are read and embedded."""
LINE_EVERY = 10.0  # seconds, where there is no terminal


def no_bar(_what: str, _total: int) -> AbstractContextManager[Advance]:
    """Return a `Bar` that shows nothing."""
    return nullcontext(lambda _: None)


class _Speed(ProgressColumn):
    def render(self, task: Task) -> Text:
        # images of one batch arrive together: between the first two the recent speed is thousands of times too large
        recent, mean = task.finished_speed or task.speed, task.completed / max(task.elapsed or 0, 1e-3)
        return Text(f"{min(recent, mean):,.0f} images/s" if recent else "")  # a step done at once has no speed


@contextmanager
def image_progress(console: Console, description: str, total: int) -> Generator[Advance]:
    """Show progress over images, and yield its `Advance`; without a terminal print a line every 10 seconds."""
    if not console.is_terminal:
        started = reported = monotonic()
        done = 0

        def line(images: int) -> None:
            nonlocal done, reported
            done += images
            now = monotonic()
            if now - reported < LINE_EVERY or not 0 < done < total:
                return
            reported, speed = now, done / (now - started)
            text = f"{description}: {done:,} of {total:,}, {speed:,.0f} images/s, {(total - done) / speed:.0f} s left"
            console.print(text, markup=False, highlight=False, soft_wrap=True)

        yield line
        return
    title = TextColumn(description, markup=False)
    columns = title, BarColumn(), MofNCompleteColumn(), _Speed(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(description, total=total)
        yield lambda images: bar.update(task, advance=images)
