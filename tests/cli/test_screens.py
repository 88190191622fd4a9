"""Text from outside is shown as it is: no command hands a terminal what it would obey, and no markup is read."""

import json
import logging
import os
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from io import BytesIO, StringIO, TextIOWrapper
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from dmlkit.cli.app import MOST_LINES, lines_of, prepare_environment, show_warning
from dmlkit.cli.console import Output, print_table, print_tables, say, say_prose
from dmlkit.cli.evaluate import print_values
from dmlkit.cli.study_progress import RunsProgress
from dmlkit.errors import UserError
from dmlkit.evaluation.by_value import figures_by_value
from dmlkit.files.escape import UNPRINTABLE, printable
from dmlkit.files.paths import raise_faults
from dmlkit.training import estimate
from tests.conftest import END, ROOT, TINY_RECIPE, Cli, Result, every_command
from tests.datasets import trees

HOSTILE = "\x1b]0;pwn\x07[/x][red]\u202e\x9b31m[link=http://evil]"
QUICK = ("--set", "training.epochs=1", "--set", "training.workers=0", "--device", "cpu")


def held(result: Result) -> str:
    """What a command printed, which holds no character that a terminal obeys."""
    text = result.out + result.err
    assert not [character for character in text if UNPRINTABLE.match(character) and character != "\n"], text
    assert not {*"\x1b\x07\u202e\x9b"} & {*text}, text
    assert "Traceback" not in text and "MarkupError" not in text
    assert result.code in (0, 1, 2), text
    return text


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Images of 6 classes with names that hurt."""
    for label in range(6):
        for index in range(3):
            trees.photo(tmp_path / "photos" / f"{label}{HOSTILE.replace('/', '_')}" / f"{index}.png", 3 * label + index)
    return tmp_path / "photos"


@pytest.mark.parametrize(
    "words",
    [
        ["check", "{recipe}", "--set", f"{HOSTILE}=1"],
        ["check", "{recipe}", "--set", f"seed={HOSTILE}"],
        ["check", "{hostile}"],
        ["check", HOSTILE],
        ["train", "{recipe}", "--device", HOSTILE],
        ["train", "{recipe}", f"--{HOSTILE}"],
        ["train", "{recipe}", HOSTILE],
        ["train", f"--debug={HOSTILE}"],
        [f"--{HOSTILE}"],
        ["export", HOSTILE, "--format", HOSTILE],
        ["gallery", "create", HOSTILE, HOSTILE, "-o", HOSTILE, "--label", HOSTILE],
        ["duplicates", HOSTILE, "--threshold", HOSTILE],
        ["study", "{hostile}"],
        ["data", "check", "{table}"],
        ["list", HOSTILE],
        ["list", "recipes", "--root", "{collection}"],
        [HOSTILE],
    ],
)
def test_no_message_holds_what_a_terminal_obeys_s4_s5_t9(dmlkit, tiny_recipe: Path, tmp_path: Path, words: list[str]):
    places = {"{recipe}": tiny_recipe, "{hostile}": tmp_path / "hostile.yaml", "{table}": tmp_path / "hostile.csv"}
    places["{collection}"] = tmp_path / "col[red]lection"
    quoted = json.dumps(HOSTILE)
    places["{hostile}"].write_text(f"{quoted}: 1\nclaim: {quoted}\nloss: {{name: {quoted}}}\n")
    places["{table}"].write_text(f"path,label,{HOSTILE}\n{HOSTILE},{HOSTILE},{HOSTILE}\n", encoding="utf-8")
    places["{collection}"].mkdir()
    (places["{collection}"] / "r[b].yaml").write_text(f"# {HOSTILE}\n# Published: {HOSTILE}\n{TINY_RECIPE}")
    assert held(dmlkit(*(places.get(word, word) for word in words)))


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """What a function prints in a console of some width, by default a file."""

    def printed(
        function: Callable[..., None], *arguments: object, width: int | None = 80, is_terminal: bool = False
    ) -> str:
        console = Console(file=(file := StringIO()), width=width, force_terminal=is_terminal, color_system=None)
        monkeypatch.setattr(Output, "console", console)
        function(*arguments)
        return file.getvalue()

    return printed


def test_a_bar_holds_no_name_raw_s4_s5(monkeypatch: pytest.MonkeyPatch, printed: Callable[..., str]):
    def draw() -> None:
        with RunsProgress() as progress:
            progress.expect(1, 1)
            progress.start_run(HOSTILE, 1).start_model()
            progress.bar.refresh()

    monkeypatch.setenv("TERM", "xterm")
    shown = printed(draw, width=200, is_terminal=True)
    assert "]0;pwn" in shown and "[/x][red]" in shown
    assert not [mark for mark in ("\x1b]", "\x07", "\u202e", "\x9b") if mark in shown]


@pytest.mark.parametrize("command", [words for words, _ in every_command()])
def test_help_obeys_no_text_and_has_choices_in_its_texts_and_not_in_a_wide_column_s4(dmlkit, command, monkeypatch):
    """A column with <nearest|vote|mean> left 32 of 80 columns; --overwrite <bool> reads as if a value followed."""
    monkeypatch.setenv("COLUMNS", "80")
    shown = held(dmlkit(*command.split(), "--help"))
    lines = shown.splitlines()
    assert "Usage" in shown and max(map(len, lines)) <= 80
    assert "…" not in shown  # rich cuts a word that is wider than its column
    assert not [line for line in lines if re.search(r"(?<!\?P)<\w+[|>\[]", line)]


def test_class_and_run_names_are_shown_as_they_are_s4_s5(dmlkit, tiny_recipe: Path, tmp_path: Path, photos: Path):
    run = tmp_path / "runs[red]\x1b[31m"
    dataset = f"dataset={{name: folder, root: {photos}, validation_fraction: 0}}"
    sets = ("--set", dataset, "--set", "sampler.batch_size=4")
    assert run.name.replace("\x1b", "\\x1b") in held(dmlkit("train", tiny_recipe, "-o", run, *sets, *QUICK))
    assert "[red]\\u202e" in held(dmlkit("eval", run, "--device", "cpu"))
    assert "\\u009b31m" in held(dmlkit("eval", run, "--json", "--device", "cpu"))
    other = tmp_path / "b[a]"
    assert dmlkit("train", tiny_recipe, "-o", other, *sets, *QUICK, "--set", "seed=4").code == 0
    for form in ([], ["--json"]):
        shown = held(dmlkit("compare", run, other, *form, "--device", "cpu"))
        assert "red" in re.sub(r"[\s│]", "", shown)  # a narrow table breaks names
    (broken := next(photos.iterdir()) / "0.png").write_bytes(b"")
    assert "[red]" in held(dmlkit("data", "check", photos)) and broken.exists()
    assert "[red]" in held(dmlkit("train", tiny_recipe, "-o", tmp_path / "c", *sets, *QUICK))


def test_list_shows_brackets(dmlkit):
    assert "'dmlkit[timm]'" in dmlkit("list", "backbones").out


def test_a_message_has_a_most_of_lines_and_of_characters_u7():
    lines = lines_of("\n".join(["x" * 100_000] * 900))
    assert len(lines) == MOST_LINES + 1 and lines[-1] == "and 879 more"
    assert max(map(len, lines)) < 2100
    with pytest.raises(UserError) as raised:
        raise_faults([*(f"a{'b' * number}: no" for number in range(900)), "b" * 200_000])  # its time was quadratic once
    assert lines_of(str(raised.value))[-1] == "and 881 more"


@pytest.mark.parametrize("columns", ["40", "1", "0", "\u00b2"])
def test_a_narrow_terminal_cuts_no_figure_off_u13(monkeypatch: pytest.MonkeyPatch, columns: str, printed):
    monkeypatch.setenv("COLUMNS", columns)
    prepare_environment()
    rows = [["metric", "run", "value", "95 % interval"], ["map@r", "runs/a", "0.2708", "0.1719 .. 0.3698"]]
    text = printed(print_table, rows, width=None)
    assert all(cell in text for row in rows for cell in row) and "…" not in text


@pytest.mark.parametrize("given", [None, "active"])
def test_waiting_threads_leave_the_processor_to_others_unless_the_environment_says_otherwise(monkeypatch, given):
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.setenv(name, given or "")  # so that it is put back
        if given is None:
            monkeypatch.delenv(name)
    prepare_environment()
    waiting = [os.environ[name] for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")]
    assert waiting == ([given, given] if given else ["passive", "20000"])


def test_warnings_are_one_plain_line_u15(capsys: pytest.CaptureFixture[str]):
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show_warning
        warnings.warn(f"first {HOSTILE}\nsecond", UserWarning, stacklevel=1)
    err = capsys.readouterr().err
    assert err.startswith("warning: first \\x1b]0;pwn") and err.count("\n") == 1 and ".py" not in err


def test_an_ascii_output_gets_every_character_t15(monkeypatch: pytest.MonkeyPatch):
    out = TextIOWrapper(BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    prepare_environment()
    monkeypatch.setattr(Output, "console", Console())
    say("0.1 ± 0.2 …")
    out.seek(0)
    assert out.read() == "0.1 \\xb1 0.2 \\u2026\n"


def test_output_to_a_full_device_is_one_line_t4():
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    with Path("/dev/full").open("w") as full:
        words = [sys.executable, "-m", "dmlkit", "--version"]
        result = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT, timeout=END)
    assert result.returncode == 2 and result.stderr.splitlines() == ["error: [Errno 28] No space left on device"]


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("search x.npy x.npy", "a.csv"),
        ("search x.npy x.npy", "a.html"),
        ("identify x.npy x.npy --labels x.txt", "a.csv"),
        ("identify x.npy x.npy --labels x.txt", "a.html"),
        ("cluster x.npy -k 2", "a.csv"),
        ("duplicates x.npy --threshold 0.9", "a.csv"),
        ("duplicates x.npy x.npy --threshold 0.9", "a.html"),
        ("select x.npy x.npy --labels x.txt", "a.csv"),
        ("compare one two --device cpu", "a.md"),
    ],
)
def test_a_file_is_written_though_what_reads_the_output_has_ended(dmlkit, monkeypatch, tmp_path, words: str, name: str):
    monkeypatch.chdir(tmp_path)
    np.save("x.npy", np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32))
    Path("x.txt").write_text("a\nb\n" * 10)
    for run in ("one", "two"):
        shutil.copytree(ROOT / "tests/fixtures/0.1.0/run", run)
    dmlkit(*words.split(), "-o", name).ok()
    whole = Path(name).read_bytes()
    Path(name).unlink()
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        monkeypatch.setattr("sys.stdout", stream)
        assert dmlkit(*words.split(), "-o", name).code == 1
    assert Path(name).read_bytes() == whole


def test_python_without_docstrings_is_refused_t15():
    words = [sys.executable, "-OO", "-m", "dmlkit", "list", "losses"]
    result = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, timeout=END)
    assert result.returncode == 2 and "python -OO removes docstrings" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_table_breaks_no_name_where_its_texts_fit_below_one_another(printed: Callable[..., str]):
    paths = [f"photos/{letter * 30}/test_001.jpg" for letter in "ab"]
    rows = [["similarity", "a", "b", "images"], ["0.9749", *paths, "12"]]
    stacked, side_by_side = printed(print_table, rows), printed(print_table, rows, width=140)
    assert max(map(len, stacked.splitlines())) <= 80
    assert [path in line for line in stacked.splitlines() for path in paths if path in line] == [True, True]
    assert [paths[0] in line and paths[1] in line for line in side_by_side.splitlines()].count(True) == 1
    assert stacked.index("0.9749") < stacked.index("12") < stacked.index(paths[0]) < stacked.index(paths[1])


def test_a_study_of_many_metrics_has_a_table_of_as_many_as_fit_each_with_its_variants(printed: Callable[..., str]):
    metrics = [f"{kind} {name}" for kind in ("separated", "concatenated") for name in ("precision@1", "map@r")]
    values = [
        ["0.4219 ± 0.5956", "0.2840 ± 0.2316", "0.4583 ± 0.7941", "0.3038 ± 0.1250"],
        ["0.1", "0.2", "0.3", "0.4"],
    ]
    rows = [["variant", "checkpoint", *metrics], ["small", "best", *values[0]], ["", "last", *values[1]]]
    lines = printed(print_tables, rows, 2).splitlines()
    seen = [
        [cell.strip() for cell in line.strip("│┃").replace("┃", "│").split("│")] for line in lines if line[0] in "│┃"
    ]
    tables = [seen[start : start + 3] for start in range(0, len(seen), 3)]
    assert max(map(len, lines)) <= 80 and len(tables) == 2
    assert all([row[:2] for row in table] == [row[:2] for row in rows] for table in tables)
    assert [[*one[2:], *other[2:]] for one, other in zip(*tables, strict=True)] == [row[2:] for row in rows]
    assert printed(print_tables, rows, 2, width=140) == printed(print_table, rows, width=140)


def test_the_width_of_each_cell_of_many_columns_is_measured_a_few_times(
    printed: Callable[..., str], monkeypatch: pytest.MonkeyPatch
):
    measured, measure = list[object](), Console.measure
    monkeypatch.setattr(Console, "measure", lambda *args, **options: measured.append(0) or measure(*args, **options))
    head, line = [f"metric {number}" for number in range(60)], ["0.4219 ± 0.5956"] * 60
    printed(print_tables, [["variant", "checkpoint", *head], ["small", "best", *line]], 2)
    assert len(measured) < 10 * 2 * 62


def test_an_interval_is_below_its_number_where_a_table_of_numbers_is_too_wide(printed: Callable[..., str]):
    heads = ["group", "queries", "map@r, 95 % interval", "to others, 95 % interval", "Holm's p"]
    rows = [heads, ["front door camera", "40", "0.3826  0.273 .. 0.597", "-0.0376  -0.114 .. +0.017", "1.0000"]]
    narrow = printed(print_table, rows)
    assert max(map(len, narrow.splitlines())) <= 80 and rows[1][2] in printed(print_table, rows, width=140)
    number, interval = (next(line for line in narrow.splitlines() if part in line) for part in ("0.3826", "0.273"))
    assert "-0.0376" in number and "-0.114 .. +0.017" in interval and number.index("0.3826") > interval.index("0.273")


def test_each_table_of_error_rates_has_its_own_worst_value_first(printed: Callable[..., str]):
    rates = {"far": torch.tensor([0.2, 0.3, 0.1]), "frr": torch.tensor([0.5, 0.4, 0.6])}
    by = figures_by_value(rates, torch.arange(3), ["cam0", "cam1", "cam2"], "camera", are_errors=True)
    tables = printed(print_values, by, ["far", "frr"]).split("worst first")[1:]
    assert [re.findall(r"cam\d", table) for table in tables] == [["cam1", "cam0", "cam2"], ["cam2", "cam0", "cam1"]]


def test_a_terminal_wraps_between_words_and_a_file_keeps_the_line(printed: Callable[..., str]):
    line = " ".join(f"{number:07}" for number in range(30))
    screen = printed(say, line, is_terminal=True)
    assert printed(say, line) == line + "\n"
    assert len(screen.splitlines()) == 3 and screen.split() == line.split()
    command = f"next: dmlkit serve {'x' * 60} --review june --allow-writes"
    assert printed(say, command, is_terminal=True) == command + "\n"
    assert printed(say_prose, "note: a\tb\nc\0d\x85e") == "note: a\\tb\\nc\\x00d\\x85e\n"  # a name keeps what it has


def test_a_terminal_gets_messages_wrapped_between_words_and_a_file_one_line(monkeypatch: pytest.MonkeyPatch):
    """Also those that are logged, such as which image changed, whose name may hold what a terminal obeys."""

    class Screen(StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("COLUMNS", "60")
    prepare_environment()
    message = f"photos/{'x' * 30}/1.jpg: {HOSTILE.split('[/x]')[0]} has changed; rerun dmlkit embed runs/a photos"
    shown: list[str] = []
    for stream in (Screen(), StringIO()):
        monkeypatch.setattr(sys, "stderr", stream)
        logging.getLogger("dmlkit").warning(message)
        shown.append(re.sub(r"\x1b\[\d*m", "", stream.getvalue()))
    screen, file = shown
    assert file == printable(message) + "\n" and screen.split() == file.split()
    assert max(map(len, screen.splitlines())) <= 60 and "dmlkit embed runs/a photos" in screen


SCREENS = [
    "start photos -o recipe.yaml",
    "train recipe.yaml -o run",
    "eval run",
    "inspect run",
    "calibrate run --far 0.5",
    "gallery create run photos -o gallery",
    "calibrate gallery --fpir 0.5",
    "identify gallery photos",
    "search run photos/00_a-kind-of-crow-with-a-long-name/0.png",
    "duplicates run",
    "cluster run -k 3",
]


@pytest.mark.slow
def test_the_screens_of_the_first_hour_fit_80_columns(tmp_path: Path, monkeypatch, dmlkit: Cli):
    """No line is longer, and each name of a class, which has no space, is whole on one line."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(estimate, "free_memory", lambda _: 1e12)
    names = [f"{number:02}_a-kind-of-crow-with-a-long-name" for number in range(20)]
    for number, name in enumerate(names):
        for image in range(4):
            trees.photo(Path("photos") / name / f"{image}.png", 10 * number + image)
    quick = ["backbone.tuning={name: none}", "transform={name: plain, size: 32}", "training.epochs=2"]
    for words in SCREENS:
        more = [part for change in [*quick, "training.workers=0"] for part in ("--set", change)]
        result = dmlkit(*words.split(), "--device", "cpu", *(more if words.startswith("train") else [])).ok()
        lines = result.out.splitlines()
        assert [line for line in lines if len(line.rstrip()) > 80] == [], words
        assert [line for line in lines if "_a-kind" in line and not any(name in line for name in names)] == [], words


def test_a_second_command_of_a_process_warns_and_prints_like_the_first_one(dmlkit, tmp_path: Path):
    table = tmp_path / "birds.csv"
    table.write_text("1.jpg,crow\n2.jpg,owl\n")
    first = dmlkit("data", "convert", table, "-o", tmp_path / "table.csv")
    assert "has no header" in first.err
    dmlkit("list", "recipes", "start")
    assert dmlkit("gallery", "history", tmp_path, "--json").code == 2
    assert dmlkit("data", "convert", table, "-o", tmp_path / "table.csv") == first


def test_inspect_names_its_own_default_split_and_checks_its_default_page(dmlkit: Cli, tmp_path: Path, monkeypatch):
    """A run that final wrote is refused, and the page is not written into a gallery, as with -o."""
    shown = " ".join(dmlkit("inspect", "--help").ok().out.replace("\u2502", " ").split())
    assert "Default: test; all for timm:NAME." in shown and "final" not in shown
    (tmp_path / "gallery.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    dmlkit("inspect", ".").refused("--output inspection.html: this is inside a gallery")
