"""Command lines put together at random: an exit code that is documented, and nothing changed but the output."""

import inspect
import shutil
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import pytest
import typer
from hypothesis import event, given
from hypothesis import strategies as st
from typer.models import ArgumentInfo

from dmlkit.cli.app import app
from tests.fuzz.conftest import ALLOWED, Workplace, examples, hashes

PLACES = (
    *("base.yaml", "photos.yaml", "study.yaml", "run", "run/embeddings/test", "study", "protocol", "cache", "photos"),
    *("x.npy", "y.npy", "table.csv", "photos/ant/0.png", "run/checkpoints/best.pt", "nowhere", "", ".", ".."),
    *("/dev/null", "new", "new/er", "base.yaml/x", "a" * 300, "[/x]", "\x1b]0;x\x07", "-", "a\nb"),
)
WORDS = ("", "0", "1", "2", "-1", "1e999", "nan", "recall@1", "map@r", "test", "all", "best", "poincare", "none", "x=y")
SETTINGS = ("seed=1", "loss.margin=0.2", "loss={name: triplet}", "transform.size=8", "dataset.classes=4", "metrics=[]")
GOOD: dict[str, tuple[str, ...]] = {
    "recipe": ("base.yaml", "photos.yaml"),
    "run": ("run", "study/runs/small/seed-0"),
    "runs": ("run", "study/runs/small/seed-0"),
    "source": ("run", "run/embeddings/test", "gallery"),
    "gallery": ("gallery",),
    "queries": ("photos/ant", "run/embeddings/test"),
    "version": ("1",),
    "study": ("study.yaml",),
    "folders": ("study",),
    "images": ("photos", "photos/ant", "photos/ant/0.png"),
    "target": ("photos.yaml", "table.csv", "photos"),
    "output": ("new", "run", "cache", "study", "protocol", "photos", "x.npy", "base.yaml"),
    "per_class": ("new.csv", "x.npy", "base.yaml"),
    "embeddings": ("x.npy",),
    "labels": ("y.npy",),
    "repeats": ("1",),
}
"""Words that fit a parameter, so that commands get further than to their first error."""
# What takes long, asks the network, or starts other processes, whose tests are elsewhere.
LEFT_OUT = {"--help", "--install-completion", "--show-completion", "--jobs", "--engine", "--debug", "--device"}


def commands(group: typer.Typer, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Callable[..., Any]]:
    """The function of every command, by its words."""
    found: dict[tuple[str, ...], Callable[..., Any]] = {}
    for inner in group.registered_groups:
        assert inner.typer_instance is not None
        name = inner.typer_instance.info.name
        found |= commands(inner.typer_instance, (*path, *([name] if isinstance(name, str) else [])))
    for one in group.registered_commands:
        assert one.callback is not None
        found[(*path, one.name or one.callback.__name__)] = one.callback
    return found


COMMANDS = commands(app)
REQUIRED = inspect.Parameter.empty


def choices_of(kind: Any) -> list[str]:
    """What a parameter is one of, if that is said."""
    if get_origin(kind) is Literal:
        return [str(choice) for choice in get_args(kind)]
    return [choice for inner in get_args(kind) for choice in choices_of(inner)]


@st.composite
def lines(draw: Callable[..., Any]) -> list[str]:
    """A command with places where it wants arguments, and some of its options; every other one of words that fit."""
    is_tame = draw(st.booleans())
    path = draw(st.sampled_from(sorted(COMMANDS)))
    words, hints = list(path), get_type_hints(COMMANDS[path], include_extras=True)
    for name, parameter in inspect.signature(COMMANDS[path]).parameters.items():
        kind, said = get_args(hints[name]) if get_origin(hints[name]) is Annotated else (hints[name], None)
        declared = (getattr(said, "default", None), *(getattr(said, "param_decls", None) or ()))
        names = [word for word in declared if isinstance(word, str) and word.startswith("-")]
        names = names or [f"--{name.replace('_', '-')}"]
        fitting = (*choices_of(kind), *GOOD.get(name, ())) * 8
        places = fitting if is_tame and fitting else (*fitting, *PLACES)
        if isinstance(said, ArgumentInfo):
            if parameter.default is REQUIRED or draw(st.booleans()):
                words.append(draw(st.sampled_from(places)))
        elif not LEFT_OUT & set(names) and (parameter.default is REQUIRED or draw(st.integers(0, 5)) == 0):
            words.append(draw(st.sampled_from([one for one in names if one.startswith("-")])))
            if kind is not bool:
                others = SETTINGS if "--set" in names else () if is_tame and fitting else (*places, *WORDS)
                words.append(draw(st.sampled_from([*fitting, *others])))
    return words


@pytest.fixture(scope="module")
def workplace(ground: Path, tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    source = tmp_path_factory.mktemp("commands")
    shutil.copytree(ground, source / "whole" / "inner")
    (source / "whole" / "base.yaml").write_text("somebody's")
    return Workplace(source / "whole", source / "used")


@pytest.mark.slow
@pytest.mark.heavy
@examples(100, 1_000)
@given(words=lines())
def test_a_command_ends_as_documented_and_keeps_to_its_output(
    words: list[str], workplace: Workplace, command: Callable[..., tuple[int, str]]
):
    base = workplace.whole()
    folder = base / "inner"
    allowed = outputs(words)
    before = hashes(base)
    with chdir(folder):
        code, said = command(*words)
    event(f"{words[0]} {code}")
    assert code in ALLOWED, said
    after = hashes(base)
    changed = {name for name in before if after.get(name) != before[name]}
    if code == 2 and "--overwrite" not in words:
        assert not changed, (words, said, changed)
    assert all(any(name.startswith(place) for place in allowed) for name in changed), (words, said, changed)


def outputs(words: list[str]) -> tuple[str, ...]:
    """Where a command may change what was there: in a run that it works on, and what it made itself before."""
    reading = ("report", "list", "check", "schema", "curvature", "search", "identify")
    if words[0] == "gallery":
        return ("inner/gallery/",)
    return () if words[0] in reading else ("inner/run/", "inner/study/", "inner/protocol/", "inner/cache/")
