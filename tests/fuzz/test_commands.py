"""Command lines put together at random: an exit code that is documented, and nothing changed but the output."""

import inspect
import shutil
import signal
from collections.abc import Callable, Generator
from contextlib import chdir, contextmanager
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st
from PIL import Image
from typer.main import get_command_name
from typer.models import ArgumentInfo

from dmlkit.cli.app import MODULES, PANEL_OF
from dmlkit.cli.options import APPS
from dmlkit.review.folder import ReviewFolder
from tests.fuzz.conftest import ALLOWED, Workplace, examples, hashes

PLACES = (
    *("base.yaml", "photos.yaml", "study.yaml", "run", "run/embeddings/test", "study", "photos"),
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
    "output": ("new", "run", "study", "photos", "x.npy", "base.yaml"),
    "labels": ("y.npy",),
}
"""Words that fit a parameter, so that commands get further than to their first error."""
# What takes long, asks the network, or starts other processes, whose tests are elsewhere.
LEFT_OUT = {"--workers", "--ray", "--device"}


def commands() -> dict[tuple[str, ...], Callable[..., Any]]:
    """The function of every command, by its words."""
    found: dict[tuple[str, ...], Callable[..., Any]] = {}
    for module in {MODULES.get(name, name) for name in PANEL_OF}:
        place = import_module(f"dmlkit.cli.{module}")
        group = APPS[place.__name__]
        for registered in group.registered_commands:
            name = registered.name or get_command_name(registered.callback.__name__)
            found[(group.info.name, name) if isinstance(group.info.name, str) else (name,)] = registered.callback
    return found


COMMANDS = {path: command for path, command in commands().items() if path != ("serve",)}  # it runs until stopped
REQUIRED = inspect.Parameter.empty


def choices_of(kind: Any) -> list[str]:
    """What a parameter is one of, if that is said."""
    if get_origin(kind) is Literal:
        return [str(choice) for choice in get_args(kind)]
    return [choice for inner in get_args(kind) for choice in choices_of(inner)]


class Parameter(NamedTuple):
    """A parameter of a command, as the command line declares it."""

    name: str
    kind: Any
    words: tuple[str, ...]  # of an option; none of an argument
    is_required: bool


def parameters_of(path: tuple[str, ...]) -> list[Parameter]:
    """The parameters of a command."""
    hints, found = get_type_hints(COMMANDS[path], include_extras=True), list[Parameter]()
    for name, parameter in inspect.signature(COMMANDS[path]).parameters.items():
        kind, *_, said = get_args(hints[name]) if get_origin(hints[name]) is Annotated else (hints[name], None)
        declared = (getattr(said, "default", None), *(getattr(said, "param_decls", None) or ()))
        words = tuple(word for word in declared if isinstance(word, str) and word.startswith("-"))
        words = () if isinstance(said, ArgumentInfo) else words or (f"--{name.replace('_', '-')}",)
        found.append(Parameter(name, kind, words, parameter.default is REQUIRED))
    return found


@st.composite
def wild_lines(draw: Callable[..., Any]) -> list[str]:
    """A command with places where it wants arguments, and some of its options; every other one of words that fit."""
    is_tame = draw(st.booleans())
    path = draw(st.sampled_from(sorted(COMMANDS)))
    words = list(path)
    for name, kind, names, is_required in parameters_of(path):
        fitting = (*choices_of(kind), *GOOD.get(name, ())) * 8
        places = fitting if is_tame and fitting else (*fitting, *PLACES)
        if not names:
            if is_required or draw(st.booleans()):
                words.append(draw(st.sampled_from(places)))
        elif not LEFT_OUT & set(names) and (is_required or draw(st.integers(0, 5)) == 0):
            words.append(draw(st.sampled_from(names)))
            if kind is not bool:
                others = SETTINGS if "--set" in names else () if is_tame and fitting else (*places, *WORDS)
                words.append(draw(st.sampled_from([*fitting, *others])))
    return words


Form = tuple[str, str]
TUNED = ("--set", "dataset.classes=24", "--set", "dataset.validation_fraction=0.4")
FORMS: dict[str, tuple[Form, ...]] = {
    "align": (("gallery tuned photos", "output=new checkpoint=best,last json device"),),
    "calibrate": (
        ("tuned --far 0.3", "far checkpoint json device overrides=dataset.seed=3"),
        ("large --fpir 0.3", "strangers=photos near=1 json device run"),
    ),
    "check": (("base.yaml", "overrides"), ("study/runs/small/seed-0/recipe.yaml", "overrides")),
    "cluster": (
        ("run -k 2", "split=test,all device output=new.csv,new.html overrides=dataset.seed=3"),
        ("run/embeddings/test -k 3", "method=kmeans,agglomerative output=new.csv,new.html"),
        ("run/embeddings/test --threshold 0.9", "method=agglomerative,hdbscan output=new.csv,new.html"),
        ("gallery -k 2", "method=kmeans,agglomerative output=new.csv,new.html"),
        ("x.npy -k 3", "labels=y.npy manifold method=kmeans output=new.csv,new.html"),
    ),
    "compare": (
        ("run study/runs/small/seed-0", "output=new.md,new.tex json by checkpoint device overrides=dataset.seed=3"),
    ),
    "copy": (("glyphs/proxy_anchor new.yaml", ""), ("glyphs/mpa", "")),
    "curvature": (("run/embeddings/test", ""), ("x.npy", "manifold"), ("run", "split device overrides=dataset.seed=3")),
    "data check": (
        ("photos.yaml", "overrides=transform.size=8"),
        ("photos.yaml --run run --threshold 0.9", "device overrides=transform.size=8"),
        ("photos", "dataset=folder every"),
        ("table.csv", ""),
    ),
    "data convert": (("table.csv -o new.csv", ""), ("photos -o new.csv", "")),
    "duplicates": (
        ("run --threshold 0.9", "split=test,all device output=new.csv,new.html overrides=dataset.seed=3"),
        ("run/embeddings/test --threshold 0.5", "output=new.csv,new.html other"),
        ("run/embeddings/test", "threshold other"),
        ("x.npy z.npy --threshold -0.5", "labels=y.npy manifold output=new.csv,new.html"),
    ),
    "embed": (
        ("run photos", "output checkpoint skip_bad_images device labels=folder dims=3,5"),
        ("run --split test -o new", "device checkpoint"),
        ("run --split train", "overrides=dataset.seed=3"),
    ),
    "eval": (
        (
            "run",
            "split checkpoint device metric output=new.csv json rerank=k_reciprocal:k1=9,expansion|second=flip,scales",
        ),
        ("run --metric map@r", "evidence=center split json"),
        ("run --form 6 --form 4:int8", "metric=recall@1,map@r form=fp16,binary,4:rescored json"),
        ("run", "split checkpoint metric overrides=transform.size=20"),
        ("run photos", "checkpoint metric json"),
        ("run/embeddings/test", "metric output=new.csv form=4,int8,4:rescored json"),
        ("x.npy --labels y.npy", "manifold metric output=new.csv json"),
        ("gallery", "metric output=new.csv json"),
        ("x.npy z.npy --labels y.npy --labels y.npy", "metric=recall@1,map@r json"),
        ("base.yaml", "metric json overrides"),
    ),
    "export": (
        ("run/embeddings/test --format faiss", "output=new.faiss precision=fp32,fp16,int8,binary"),
        ("run --format hub", "license=mit,apache-2.0 output=new checkpoint=best,last"),
        ("run/embeddings/test --format npz", "output=new.npz"),
        ("run/embeddings/test --format parquet", "output=new.parquet"),
        ("run/embeddings/test --format tensorboard", "output=new"),
        ("run/embeddings/test --format lancedb -o new", "table overwrite"),
        ("run --format safetensors", "output=new.safetensors checkpoint=best,last overrides=dataset.seed=3"),
        ("run --format onnx", "output=new.onnx takes=images,squares dims=2,4 precision=fp32,fp16,int8"),
    ),
    "final": (
        ("run", "output overrides=dataset.seed=3 device"),
        ("run -o new --resume", "device"),
        ("run -o tuned --overwrite", "overrides=dataset.seed=3 device"),
    ),
    "gallery add": (("gallery photos/ant", "label run device"), ("gallery photos", "run"), ("gallery table.csv", "")),
    "gallery compact": (("gallery", ""),),
    "gallery create": (("run -o new", ""), ("run -o new photos", "label thumbnails threshold checkpoint device")),
    "gallery history": (("gallery", "json"),),
    "gallery index": (("large", "method recall=0.9,0.5"),),
    "gallery info": (("gallery", "json verify"),),
    "gallery migrate": (("gallery run", "device"), ("large tuned", "checkpoint"), ("gallery tuned photos", "")),
    "gallery remove": (("gallery --label ant", "label=bee,cat"),),
    "gallery rename": (("gallery ant bee", ""), ("gallery ant wasp", "")),
    "gallery restore": (("gallery 1", ""),),
    "identify": (
        ("gallery photos/ant/0.png", "output=new.csv,new.json,new.html method run device threshold"),
        ("gallery photos -o new.html", "by=folder run threshold"),
        ("gallery photos -o new.csv --method vote", "k run threshold"),
        ("x.npy z.npy -o new.csv --labels y.npy", "method manifold threshold"),
    ),
    "inspect": (
        ("run -o new.html", "split device overrides=dataset.seed=3"),
        ("run", ""),
        ("run/embeddings/test -o new.html", ""),
        ("x.npy -o new.html", "labels=y.npy manifold"),
    ),
    "list": (("", ""), ("losses", ""), ("recipes", "root"), ("metrics", ""), ("-o new.md", "")),
    "plot disk": (("run", "thumbnails split number checkpoint device output=new.svg overrides=dataset.seed=3"),),
    "plot epochs": (("run study/runs/small/seed-0 -o new.png", "metric=map@r"),),
    "plot heatmap": (("run", "split number checkpoint device output=new.svg overrides=dataset.seed=3"),),
    "plot histogram": (("run", "split checkpoint device output=new.svg overrides=dataset.seed=3"),),
    "plot pca": (("run", "thumbnails split number checkpoint device output=new.svg overrides=dataset.seed=3"),),
    "plot results": (("study", "metric=map@r output=new.png"),),
    "plot retrieval": (("run", "number k=1,3,12 split checkpoint device output=new.pdf overrides=dataset.seed=3"),),
    "plot tsne": (("run", "thumbnails split number checkpoint device output=new.svg overrides=dataset.seed=3"),),
    "report": (("study -o new.md", ""),),
    "report-bug": (("", ""), ("run", ""), ("base.yaml", "")),
    "review": (("gallery photos -o new", "number wrong=0.01,0.5 add run device"),),
    "schema": (("", ""),),
    "search": (
        ("run/embeddings/test run/embeddings/test", "k output=new.csv,new.html json"),
        ("gallery photos/bee", "k exact run output=new.csv,new.html json device"),
        ("run/embeddings/test photos/ant/0.png", "k output=new.csv json run"),
        ("run gallery", "k output=new.csv,new.html json device"),
        ("x.npy z.npy", "k manifold output=new.html json"),
        ("gallery photos", "rerank=expansion:n=1,k_reciprocal k output=new.csv,new.html json"),
    ),
    "select": (
        ("gallery photos", "number output=new.csv method threshold run json device"),
        ("run photos -n 2", "split output=new.csv method device"),
        ("x.npy -n 2", "manifold method threshold"),
        ("x.npy x.npy -n 2 --labels y.npy", "manifold method output=new.csv"),
        ("gallery --measure -n 2", "method threshold json"),
    ),
    "start": (
        ("photos -o new.yaml", "device budget=1m license_only"),
        ("photos -o new.yaml", "quick device license_only"),
        ("table.csv -o new.yaml", ""),
    ),
    "status": (("study", "json"),),
    "study": (
        ("study.yaml -o study", "dry_run device"),
        ("study.yaml -o new", "overrides=optimizer.lr=0.01 dry_run budget device"),
    ),
    "train": (
        ("base.yaml", "output overrides dry_run device"),
        ("photos.yaml -o new", "overrides=seed=1,transform.size=8"),
        ("base.yaml -o run --resume", "dry_run device"),
        ("base.yaml -o run --overwrite", "overrides device"),
        ("photos.yaml --review reviewed -o new", "overrides=seed=1,transform.size=8 device"),
    ),
    "verify": (
        ("tuned photos/ant/0.png photos/bee/0.png", "json device checkpoint prior=0.1,0.9"),
        ("tuned pairs.csv", "json output=new.csv|root"),
    ),
    "why": (("tuned photos/ant/0.png photos/bee/0.png", "output=new.png number=1,30 json checkpoint device"),),
}
"""Of every command words that make it work, and options that go with them: with values of their own where the usual
ones do not fit, or one of several where they exclude each other."""
KEPT_OUT = {"download", "ray", "paper", "workers"}
KEPT_OUT |= {"box_source", "box_margin", "box_confidence", "by", "column", "root", "second", "where"}
"""Options that start processes, or want what is not in the files here."""
VALUES: dict[str, tuple[str, ...]] = {
    "device": ("cpu",),
    "far": ("0.5", "0.9"),
    "k": ("1", "3", "100"),
    "label": ("ant", "bee"),
    "metric": ("recall@1", "recall@3", "map@r", "nmi", "r_precision"),
    "other": ("run",),
    "output": ("new",),
    "overrides": (*SETTINGS[:4], "loss.scale=8", "optimizer.lr=0.01", "embedding_dim=4"),
    "root": (".",),
    "run": ("run",),
    "table": ("new",),
    "threshold": ("0.5", "0.99"),
    "budget": ("1h",),
    "split": ("test", "train", "all"),
}


def values_of(parameter: Parameter, own: str) -> tuple[str, ...]:
    """What an option may be given: its own values, of its type, or of its name."""
    named = VALUES.get(parameter.name, ())
    numbers = ("4", "5", "7") if int in (parameter.kind, *get_args(parameter.kind)) else ()
    return tuple(own.split(",")) if own else named or tuple(choices_of(parameter.kind)) or numbers


@st.composite
def working_lines(draw: Callable[..., Any]) -> list[str]:
    """A command that works, with some of the options that go with it."""
    # no run of the workplace is on a disk, and no gallery of it is calibrated
    name = draw(st.sampled_from(sorted(set(FORMS) - {"plot disk"})))
    fixed, options = draw(st.sampled_from(FORMS[name]))
    path, words = tuple(name.split()), fixed.split()
    declared = {parameter.name: parameter for parameter in parameters_of(path)}
    for option in options.split():
        one, _, own = draw(st.sampled_from(option.split("|"))).partition("=")
        if draw(st.integers(0, 2)):
            continue
        parameter = declared[one]
        if set(parameter.words) & set(words) and "list" not in str(parameter.kind):
            continue  # an option of one value is refused the second time
        if parameter.words:
            words.append(draw(st.sampled_from(parameter.words)))
        if parameter.kind is not bool:
            words.append(draw(st.sampled_from(values_of(parameter, own))))
    return [*path, *words]


def test_every_command_has_a_form_and_every_option_is_in_one():
    assert set(FORMS) == {" ".join(path) for path in COMMANDS}
    for name, forms in FORMS.items():
        named = {option.partition("=")[0] for _, options in forms for option in options.replace("|", " ").split()}
        fixed = {word for words, _ in forms for word in words.split()}
        for parameter in parameters_of(tuple(name.split())):
            is_fixed = bool(fixed & set(parameter.words)) or not parameter.words
            assert is_fixed or parameter.name in named or parameter.name in KEPT_OUT, (name, parameter)


@pytest.fixture(scope="module")
def workplace(
    ground: Path, tmp_path_factory: pytest.TempPathFactory, command: Callable[..., tuple[int, str]]
) -> Workplace:
    source, more = tmp_path_factory.mktemp("commands"), tmp_path_factory.mktemp("more")  # an index needs 256 images
    shutil.copytree(ground, source / "whole" / "inner")
    (source / "whole" / "base.yaml").write_text("somebody's")
    with chdir(source / "whole" / "inner"):
        Path("pairs.csv").write_text(
            "a,b,same\nphotos/ant/0.png,photos/ant/1.png,1\nphotos/ant/0.png,photos/bee/1.png,0\n"
        )
        np.save("z.npy", np.random.default_rng(1).normal(size=(24, 6)).astype(np.float32))
        for label in ("ant", "bee"):
            (more / label).mkdir(parents=True)
            for index in range(128):
                pixels = np.random.default_rng([index, label == "bee"]).integers(0, 256, (8, 8, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(more / label / f"{index}.png")
        for words in (
            ("train", "base.yaml", "-o", "tuned", *TUNED),
            ("calibrate", "tuned", "--far", "0.3"),
            ("gallery", "create", "run", str(more), "-o", "large"),
            ("review", "large", str(more / "ant"), "-o", "reviewed"),
        ):
            code, said = command(*words)
            assert code == 0, said
        state = ReviewFolder(Path("reviewed"))
        state.reply({row: f"kind {row % 8}" for row in range(len(state.review.proposals))}, "ada")
    return Workplace(source / "whole", source / "used")


class HangError(BaseException):
    """A command takes processor time without end."""


@contextmanager
def no_hang() -> Generator[None]:
    """End what takes 100 s of processor time in the block; what waits is ended with its test."""

    def end(*_: object) -> None:
        raise HangError

    previous = signal.signal(signal.SIGPROF, end)
    signal.setitimer(signal.ITIMER_PROF, 100)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, previous)


def check(words: list[str], workplace: Workplace, command: Callable[..., tuple[int, str]]) -> int:
    """Run a command: its exit code is documented, and it changes no file but its output's."""
    base = workplace.whole()
    before = hashes(base)
    with chdir(base / "inner"), no_hang():
        code, said = command(*words)
    event(f"{words[0]} {code}")
    assert code in ALLOWED and "Traceback" not in said, said
    after = hashes(base)
    changed = {name for name in before if after.get(name) != before[name]}
    if code == 2 and "--overwrite" not in words:
        assert not changed, (words, said, changed)
    assert all(name.startswith(outputs(words)) for name in changed), (words, said, changed)
    return code


@pytest.mark.heavy
@examples(40, 600)
@given(words=wild_lines())
def test_a_command_ends_as_documented_and_keeps_to_its_output(words, workplace, command):
    check(words, workplace, command)


@pytest.mark.heavy
@examples(30, 400)
@given(words=working_lines())
def test_a_command_that_works_is_no_error_of_usage_and_keeps_to_its_output(words, workplace, command):
    assert check(words, workplace, command) != 2, words


def outputs(words: list[str]) -> tuple[str, ...]:
    """Where a command may change what was there: in a run that it works on, and the files that its options name."""
    reading = ("report", "list", "check", "schema", "curvature", "search", "identify")
    options = ("-o", "--output")
    named = [
        f"inner/{place}" for option, place in pairwise(words) if option in options and place not in ("", ".", "..")
    ]
    if words[0] == "gallery":
        return ("inner/gallery/", "inner/large/", *named)
    return (*named, "\0") if words[0] in reading else ("inner/run/", "inner/study/", "inner/tuned/", *named)
