"""The page of `dmlkit serve` with a gallery of 10 000 images, in headless Chromium.

The gallery has 10 000 images of 64 pixels with thumbnails: 5 000 with one label, the others in 500 labels of 10. Each
time is the median of 5 fresh pages, from the click, or the start of loading, until what is named is drawn:

- `page`: the number of images is shown, and photos can be dropped.
- `labels`: 500 labels, as many as the page shows, can be clicked.
- `images`: the first 60 images of the largest label are there, and the pictures of those that are visible are decoded.
- `filter`: after typing a part of a name, only the labels that contain it are shown.

Run: python benchmarks/page.py RUN FOLDER, with a run that takes images, e.g. that of `make demo`, and an empty folder;
needs Playwright and chromium (`make test-browser`).
"""

import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from report import write_report

IMAGES, LARGEST, ROUNDS = 10_000, 5000, 5
DECODED = (
    "() => { const shown = [...document.querySelectorAll('#images img')];"
    "const seen = shown.filter((one) => one.getBoundingClientRect().top < innerHeight);"
    "return shown.length >= 60 && seen.length > 0 && seen.every((one) => one.complete && one.naturalWidth > 0); }"
)


def write_images(folder: Path) -> None:
    random = np.random.default_rng(0)
    for index in range(IMAGES):
        label = "everything" if index < LARGEST else f"label {(index - LARGEST) // 10:03}"
        small = Image.fromarray(random.integers(0, 256, (6, 6, 3), dtype=np.uint8))
        (folder / label).mkdir(parents=True, exist_ok=True)
        small.resize((64, 64), Image.Resampling.BICUBIC).save(folder / label / f"{index}.jpg")


def milliseconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return 1000 * (time.perf_counter() - started)


def wait_until(page: Any, expression: str) -> None:
    """Wait until a page says so; its own way to wait evaluates text, which the policy of the page forbids."""
    end = time.perf_counter() + 30
    while not page.evaluate(expression):
        if time.perf_counter() > end:
            raise TimeoutError(expression)


def visit(browser: Any, address: str, width: int) -> list[float]:
    """Return the times of one fresh page."""
    page = browser.new_page(viewport={"width": width, "height": 800})

    def load() -> None:
        page.goto(address)
        page.locator("#source", has_text="images").wait_for()

    def labels() -> None:
        page.click("nav a[href='#gallery']")
        wait_until(page, "document.querySelectorAll('#labels button').length === 500")

    def images() -> None:
        page.click("text=/^everything/")
        wait_until(page, DECODED)

    def filtered() -> None:
        page.fill("#filter", "label 49")
        wait_until(page, "document.querySelectorAll('#labels button').length === 10")

    times = [milliseconds(work) for work in (load, labels, images, filtered)]
    page.close()
    return times


def main() -> None:
    from playwright.sync_api import sync_playwright  # pyright: ignore[reportMissingImports]

    run, folder = sys.argv[1], Path(sys.argv[2])
    dmlkit = [sys.executable, "-m", "dmlkit"]
    if not (folder / "gallery").exists():
        write_images(folder / "photos")
        words = ["gallery", "create", run, str(folder / "photos"), "-o", str(folder / "gallery"), "--thumbnails"]
        subprocess.run([*dmlkit, *words], check=True)
    command = [*dmlkit, "serve", str(folder / "gallery"), "--port", "0"]
    rows: list[list[str]] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "COLUMNS": "300"}) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        address = next(word for word in line.split() if word.startswith("http://"))
        try:
            with sync_playwright() as driver:
                path = shutil.which("chromium") or driver.chromium.executable_path
                browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
                visit(browser, address, 1280)  # starts the browser's processes and reads the thumbnails' file
                for width in (1280, 360):
                    times = zip(*(visit(browser, address, width) for _ in range(ROUNDS)), strict=True)
                    rows.append([f"{width} px", *(f"{statistics.median(column):.0f} ms" for column in times)])
                browser.close()
        finally:
            process.terminate()
    write_report("page", __doc__, ["width", "page", "labels", "images", "filter"], rows)


if __name__ == "__main__":
    main()
