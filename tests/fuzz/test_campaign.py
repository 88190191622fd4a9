"""The campaign's findings by their ids, through the command line alone: each test here fails on commit 9d2330f."""

import json
import os
import resource
import shutil
import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pyarrow import parquet

from tests.fuzz.conftest import hashes
from tests.processes import Forked, command_lines, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.heavy]
Command = Callable[..., tuple[int, str]]
EMBEDDINGS = "run/embeddings/test"
PAIR_LOSSES = ("n_pair", "triplet", "multi_similarity", "lifted_structure", "circle", "margin", "contrastive")
BALANCED = "sampler={{name: class_balanced, classes_per_batch: {}, images_per_class: {}}}"


@pytest.fixture
def here(ground: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the ground, to work in."""
    folder = tmp_path / "here"
    shutil.copytree(ground, folder)
    monkeypatch.chdir(folder)
    return folder


def write(name: str, text: str) -> Path:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def copied_recipe(name: str) -> Path:
    return write(name, f"# mine\n{Path('base.yaml').read_text()}")


STRANGERS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "d2": (("docs/results.md",), ("study", "study.yaml", "-o", "docs")),
    "d3": (("w/recipe.yaml", "w/checkpoints/x.pth"), ("train", "w/recipe.yaml", "-o", "w", "--overwrite")),
    "d7": (("mine/embeddings.npy", "mine/parts/part-1.safetensors"), ("embed", "run", "photos", "-o", "mine")),
}


@pytest.mark.parametrize("case", STRANGERS)
def test_files_of_others_stay(case: str, here: Path, command: Command):
    names, words = STRANGERS[case]
    for name in names:
        copied_recipe(name)
    before = hashes(here)
    assert command(*words)[0] == 2
    assert hashes(here) == before


EMBEDDED = ("export", EMBEDDINGS, "--format")
SOURCES: dict[str, tuple[str, ...]] = {
    "d6 npz": (*EMBEDDED, "npz", "-o", f"{EMBEDDINGS}/embeddings.npy"),
    "d6 parquet": (*EMBEDDED, "parquet", "-o", f"{EMBEDDINGS}/items.parquet"),
    "d6 faiss": (*EMBEDDED, "faiss", "-o", f"{EMBEDDINGS}/manifest.json"),
    "d6 safetensors": ("export", "run", "--format", "safetensors", "-o", "run/checkpoints/best.pt"),
    "d6 arrays": ("eval", "--embeddings", "x.npy", "--labels", "y.npy", "--per-class", "y.npy"),
    "d8": ("train", "base.yaml", "-o", "run", "--overwrite", "--set", "optimizer.lr=1e30"),
}


@pytest.mark.parametrize("case", SOURCES)
def test_what_dmlkit_wrote_or_reads_stays(case: str, here: Path, command: Command):
    before = hashes(here)
    assert command(*SOURCES[case])[0] == 2
    assert hashes(here) == before


CHECK = ("check", "base.yaml", "--set")
REFUSED: dict[str, tuple[str, ...]] = {
    "d4": (*CHECK, "training.clip_grad_norm=1e999"),
    **{
        f"w4 {loss} {shape}": (*CHECK, f"loss={{name: {loss}}}", "--set", BALANCED.format(*shape))
        for loss in PAIR_LOSSES
        for shape in ((6, 1), (1, 4))
    },
    "w4 one class": (
        *("train", "base.yaml", "-o", "new", "--set", "loss={name: proxy_nca}"),
        *("--set", "dataset.classes=6", "--set", "sampler.batch_size=3"),
    ),
    "w7": ("train", "base.yaml", "-o", "new", "--device", "cpu", "--set", "training.precision=fp16"),
    "w8 manifold": ("eval", "run", "--set", "manifold={name: euclidean}"),
    "w8 seed": ("eval", "run", "--set", "seed=9"),
    "w8 root": ("eval", "run", "--set", "dataset.classes=8", "--dataset-root", "photos"),
    "w9 checkpoint": ("eval", EMBEDDINGS, "--checkpoint", "last"),
    "w9 set": ("eval", EMBEDDINGS, "--set", "nonsense"),
    "w9 run": ("eval", "run", "--manifold", "euclidean"),
    "w9 export": (*EMBEDDED, "npz", "--checkpoint", "last"),
    "w9 curvature": ("curvature", EMBEDDINGS, "--split", "test"),
    "w9 device": ("train", "base.yaml", "--dry-run", "--device", "nonsense"),
    "w14 metrics": (*CHECK, "metrics=[{name: map_at_r}, {name: nmi, restarts: 1}, {name: nmi}]"),
    "w14 k": (*CHECK, "metrics=[{name: map_at_r}, {name: recall, k: [1, 1]}]"),
    "w18": ("eval", "--embeddings", "x.npy", "--labels", "y.npy", "--gallery", "x.npy", "--gallery-labels", "y.npy"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_gave_a_wrong_figure_is_refused(case: str, here: Path, command: Command):
    code, said = command(*REFUSED[case])
    assert code == 2, said


def test_a_run_without_its_last_checkpoint_is_not_trained_again_d9(here: Path, command: Command):
    words = ("train", "base.yaml", "-o", "two", "--set", "training.epochs=2")
    assert command(*words)[0] == 0
    Path("two/checkpoints/last.pt").unlink()
    before = hashes(here)
    assert command(*words, "--resume")[0] == 2
    assert hashes(here) == before


def test_a_kill_at_the_start_blocks_no_folder_d10(here: Path, command: Command):
    Path("new/checkpoints").mkdir(parents=True)
    assert command("train", "base.yaml", "-o", "new", "--resume")[0] == 0


def test_a_picture_that_cannot_be_written_leaves_the_old_one_d11(here: Path, command: Command):
    assert command("plot", "pca", "run", "-o", "p.png")[0] == 0
    before, limits = Path("p.png").read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, limits[1]))
    try:
        code = command("plot", "pca", "run", "-o", "p.png")[0]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert code == 2
    assert Path("p.png").read_bytes() == before


def test_another_question_leaves_the_runs_own_evaluation_w1(here: Path, command: Command):
    before = hashes(here / "run")
    assert command("eval", "run", "--set", "transform.size=8")[0] == 0
    after = hashes(here / "run")
    assert after.keys() > before.keys() and {name: after[name] for name in before} == before


def test_indexes_have_items_of_their_own_w2(here: Path, command: Command):
    assert command(*EMBEDDED, "faiss", "-o", "birds.2023")[0] == 0
    before = hashes(here, "run")
    assert command("embed", "run", "photos", "-o", "more")[0] == 0
    assert command("export", "more", "--format", "faiss", "-o", "birds.2024")[0] == 0
    after = hashes(here, "run", "more")
    assert {name: after[name] for name in before if not name.startswith("more")} == before


def test_two_trainings_do_not_share_a_folder_w3(here: Path, command: Command):
    first = Forked(command_lines, str(here), "train base.yaml -o new --set training.epochs=100000")
    try:
        wait_until(Path("new/checkpoints/last.pt").exists, first)
        first.send_signal(signal.SIGSTOP)  # it holds the folder still
        assert command("train", "base.yaml", "-o", "new", "--overwrite", "--set", "seed=9")[0] == 2
    finally:
        first.kill()


def test_nothing_is_trained_on_no_image_w5(here: Path, command: Command):
    for image in (*Path("photos/ant").iterdir(), *Path("photos/bee").iterdir()):
        image.write_bytes(image.read_bytes()[:40])
    assert command("train", "photos.yaml", "-o", "new", "--set", "dataset.on_bad_image=skip")[0] == 2


def test_a_linked_folder_is_embedded_w6(here: Path, command: Command):
    shutil.copytree("photos/ant", "elsewhere")
    Path("photos/zz").symlink_to("../elsewhere")
    assert command("embed", "run", "photos", "-o", "new")[0] == 0
    assert parquet.read_table("new/items.parquet").num_rows == 4 * 3 + 3


def test_damaged_weights_are_noticed_w10(here: Path, command: Command):
    path = Path("run/checkpoints/best.pt")
    data = bytearray(path.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 64] = bytes(255 - byte for byte in data[len(data) // 2 :][:64])
    path.write_bytes(data)
    assert command("eval", "run")[0] == 2


@pytest.mark.parametrize("scale", [1e-7, 1e20])
def test_the_length_of_rows_does_not_count_on_the_sphere_w11(scale: float, here: Path, command: Command):
    np.save("scaled.npy", np.load("x.npy") * np.float32(scale))
    figures = [
        json.loads(command("eval", "--embeddings", name, "--labels", "y.npy", "--json")[1])
        for name in ("x.npy", "scaled.npy")
    ]
    assert figures[0]["metrics"] == figures[1]["metrics"]


TABLES = {
    "w12": "path,label,x1,y1,x2,y2\nant/0.png,ant,,0,8,8\nbee/0.png,bee,0,0,8,8\n",
    "w20 labels": "path,label\nant/0.png,ant\nant/0.png,bee\n",
    "w20 twice": "path,label\nant/0.png,ant\nant/0.png,ant\n",
}


@pytest.mark.parametrize("case", TABLES)
def test_a_table_that_contradicts_itself_is_not_trained_on(case: str, here: Path, command: Command):
    rows = "".join(f"{label}/{index}.png,{label}\n" for label in ("cat", "dog") for index in range(3))
    rows += "".join(f"{label}/{index}.png,{label}\n" for label in ("ant", "bee") for index in (1, 2))
    rows = rows if "x1" not in TABLES[case] else rows.replace("\n", ",0,0,8,8\n")
    write("photos/table.csv", TABLES[case] + rows)
    table = "dataset={name: table, file: photos/table.csv, validation_fraction: 0}"
    code, said = command("train", "photos.yaml", "--dry-run", "--set", table)
    assert code == 2 and "table.csv:" in said, said


def test_figures_of_the_old_weights_go_with_them_w13(here: Path, command: Command):
    assert command("train", "base.yaml", "-o", "run", "--overwrite", "--set", "seed=1")[0] == 0
    assert not list(Path("run/evaluations").glob("*")) and not list(Path(EMBEDDINGS).glob("*"))


def test_weights_that_are_not_finite_embed_nothing_w15(here: Path, command: Command):
    path = Path("run/checkpoints/best.pt")
    saved = torch.load(path, weights_only=True)
    saved["model"] = {name: tensor * float("nan") for name, tensor in saved["model"].items()}
    torch.save(saved, path)
    assert command("embed", "run", "photos", "-o", "new")[0] == 2


def test_compare_shows_what_only_a_later_run_has_w16(here: Path, command: Command):
    metrics = "metrics=[{name: map_at_r}, {name: r_precision}]"
    assert command("train", "base.yaml", "-o", "more", "--set", metrics)[0] == 0
    code, said = command("compare", "run", "more")
    assert code == 0 and "r_precision" in said


def test_folders_of_one_name_have_evaluations_of_their_own_w17(here: Path, command: Command):
    assert command("train", "photos.yaml", "-o", "new")[0] == 0
    for year in ("2023", "2024"):
        shutil.copytree("photos", f"{year}/photos")
        assert command("eval", "new", "--dataset-root", f"{year}/photos")[0] == 0
    assert len(list(Path("new/evaluations").glob("*.json"))) == 2


def test_a_legend_leaves_no_class_out_w19(here: Path, command: Command, monkeypatch: pytest.MonkeyPatch):
    from matplotlib.figure import Figure
    from matplotlib.legend import Legend

    made: list[Legend] = []
    legend = Figure.legend

    def noted(figure: Figure, *arguments: Any, **options: Any) -> Legend:
        made.append(legend(figure, *arguments, **options))
        return made[-1]

    monkeypatch.setattr(Figure, "legend", noted)
    Path("photos/cat").rename("photos/_x")
    assert command("train", "photos.yaml", "-o", "new")[0] == 0
    assert command("plot", "pca", "new", "-o", "p.png", "--split", "all")[0] == 0
    assert "_x" in [text.get_text() for text in made[-1].get_texts()]


def test_postscript_starts_no_ghostscript_s1(here: Path, command: Command, monkeypatch: pytest.MonkeyPatch):
    write("bin/gs", f"#!/bin/sh\ntouch {here}/started\nexit 1\n").chmod(0o755)
    monkeypatch.setenv("PATH", f"{here}/bin:{os.environ['PATH']}")
    monkeypatch.setattr("PIL.EpsImagePlugin.gs_binary", None)  # looked for once a process
    write("photos/ant/x.png", "%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n%%EOF\n")
    assert command("embed", "run", "photos", "-o", "new")[0] == 2
    assert not Path("started").exists()


def test_a_terminal_obeys_no_name_s4(here: Path, command: Command):
    write("odd.yaml", Path("base.yaml").read_text() + '"\\e]0;pwn\\aseed": 1\n')
    code, said = command("check", "odd.yaml")
    assert code == 2 and "pwn" in said and "\x1b" not in said and "\x07" not in said


@pytest.mark.parametrize("name", ["m[/x].npy", "m[red]a.npy", "m[link=http:]a.npy"])
def test_markup_in_names_is_text_s5(name: str, here: Path, command: Command):
    shutil.copy("x.npy", write(name, ""))
    code, said = command("eval", "--embeddings", name, "--labels", "y.npy")
    assert code == 0 and name in said, said


def test_a_study_shows_no_other_file_s6(here: Path, command: Command):
    write("secret.txt", "the secret")
    write("papers/claims/study.yaml", Path("study.yaml").read_text().replace("base.yaml", "../../secret.txt"))
    code, said = command("study", "papers/claims/study.yaml", "-o", "new")
    assert code == 2 and "the secret" not in said, said


@contextmanager
def at_most(seconds: int) -> Generator[None]:
    def hangs(*_: object) -> None:
        raise TimeoutError("hangs")

    before = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def test_a_pipe_stops_no_command_s7(here: Path, command: Command):
    os.mkfifo("photos/ant/x.png")
    os.mkfifo("pipe.yaml")
    for words in (("embed", "run", "photos", "-o", "new"), ("check", "pipe.yaml")):
        with at_most(300):
            code, said = command(*words)
        assert code == 2 and "hangs" not in said, said


def test_a_zip_is_not_inflated_beyond_its_document_s8(here: Path, command: Command):
    assert command("compare", "run", "study/runs/small/seed-0")[0] == 0
    path = next(Path("run/evaluations").glob("*.npz"))
    with np.load(path) as stored:
        names = list(stored)
    np.savez_compressed(path, **dict.fromkeys(names, np.zeros(50_000_000)))  # type: ignore[arg-type]
    read, write = os.pipe()
    if os.fork() == 0:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        code = command("compare", "run", "study/runs/small/seed-0")[0]
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        os.write(write, json.dumps([code, grown]).encode())
        os._exit(0)
    os.close(write)
    os.wait()
    with os.fdopen(read) as pipe:
        code, grown = json.loads(pipe.read())
    assert code == 0 and grown < 200_000  # kB; one of the arrays has 400 000


def test_a_manifest_holds_no_code_s9(here: Path, command: Command):
    assert command("train", "base.yaml", "-o", "new", "--set", "manifold={name: poincare}")[0] == 0
    assert command("embed", "new", "photos", "-o", "vectors")[0] == 0
    index = json.loads(Path("vectors/manifest.json").read_text())["index"]
    assert not any(isinstance(value, str) and "(" in value for value in index.values())


def test_names_are_text_in_documents_s10(here: Path, command: Command):
    np.save("names.npy", np.array(["=1+1", "b", "c"])[np.arange(24) % 3])
    command("eval", "--embeddings", "x.npy", "--labels", "names.npy", "--per-class", "classes.csv")
    assert not any(cell.startswith("=") for cell in Path("classes.csv").read_text().replace("\n", ",").split(","))
    evil = "<img src=x onerror=alert(1)> ](http://evil)"
    write("evil.yaml", Path("study.yaml").read_text().replace("Margins matter.", json.dumps(evil)))
    assert command("study", "evil.yaml", "-o", "new")[0] == 0
    assert command("report", "new", "-o", "new.md")[0] == 0
    assert "<img" not in Path("new.md").read_text().replace("\\<img", "")


def test_parts_of_somebody_else_are_computed_again_s11(here: Path, command: Command):
    from safetensors import safe_open
    from safetensors.torch import save_file

    from tests.fuzz.test_kills import in_child

    assert command("embed", "run", "photos", "-o", "whole")[0] == 0
    words = ("embed", "run", "photos", "-o", "new")
    steps = in_child(words, here, None)
    for step in range(1, steps):
        shutil.rmtree("new", ignore_errors=True)
        in_child(words, here, step)
        if parts := list(Path("new").glob("parts/part-*.safetensors")):
            break
    with safe_open(parts[0], "pt") as stored:
        metadata, tensors = stored.metadata(), {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    save_file({name: tensor[:3].clone() for name, tensor in tensors.items()}, parts[0], metadata)
    assert command(*words)[0] == 0
    assert np.array_equal(np.load("new/embeddings.npy"), np.load("whole/embeddings.npy"))
