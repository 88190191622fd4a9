"""Recipes as text: YAML 1.2, overrides, and every fault with its place."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmlkit.errors import UserError
from dmlkit.files.yaml_tree import parse_yaml
from dmlkit.metrics.base import MetricConfig
from dmlkit.recipe.file import dump_recipe, parse_recipe, plain, read_recipe
from dmlkit.recipe.schema import Recipe
from dmlkit.study.definition.file import read_study
from tests.conftest import ROOT, refuses

GOOD = "dataset: {name: glyphs}\nloss:\n  name: triplet\n  margin: 0.2\n"


@pytest.mark.parametrize("name", sorted({*MetricConfig.variants} - {"baks", "baus", "graded_ndcg", "h_ap", "map_at_r"}))
def test_every_metric_is_written_as_it_is_read(name: str):
    """`spread` was written as the names of its three figures, which no recipe takes.

    The names that are left out need a threshold or levels, or are there already.
    """
    recipe = parse_recipe(f"{GOOD}metrics: [{{name: {name}}}, map@r]\n", "r.yaml")
    assert parse_recipe(dump_recipe(recipe), "again.yaml") == recipe


def faults(text: str, *overrides: str) -> list[str]:
    with pytest.raises(UserError) as error:
        parse_recipe(text, "r.yaml", overrides)
    return str(error.value).splitlines()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-4", 3e-4),
        ("1.", 1.0),
        (".5", 0.5),
        ("-2E+3", -2000.0),
        ("no", "no"),
        ("true", True),
        ("False", False),
        ("~", None),
        ("", None),
        ("null", None),
        ("010", 10),
        ("0o10", 8),
        ("0x1F", 31),
        ("1:30", "1:30"),
        ("1_000", "1_000"),
        ("2026-01-01", "2026-01-01"),
        ("'3'", "3"),
        ("[1, 2.5, a]", [1, 2.5, "a"]),
    ],
)
def test_scalars_follow_yaml_1_2(text: str, value: object):
    found = parse_yaml(text, "r.yaml").data
    assert found == value and type(found) is type(value)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_float_survives(value: float):
    assert float(parse_yaml(f"x: {value!r}", "r.yaml").data["x"]) == value


def test_the_resolved_recipe_reads_back_equal():
    recipe = parse_recipe(GOOD, "r.yaml", ["optimizer.lr=1e-5", "training.clip_grad_norm=10"])
    assert parse_recipe(dump_recipe(recipe), "again.yaml") == recipe
    assert recipe.optimizer.lr == 1e-5


def test_all_faults_at_once_with_their_lines():
    text = (
        "seed: many\n"
        "dataset: {name: glyphs, clases: 10}\n"
        "loss:\n"
        "  name: triplet\n"
        "  margn: 0.2\n"
        "sampler: {name: rndom}\n"
        "training:\n"
        "  epochs: 0\n"
        "epocs: 3\n"
    )
    assert faults(text) == [
        "r.yaml:1: seed: got 'many', expected a valid integer",
        "r.yaml:2: dataset.clases: unknown key; did you mean 'classes'?",
        "r.yaml:5: loss.margn: unknown key; did you mean 'margin'?",
        "r.yaml:6: sampler.name: unknown sampler 'rndom'; did you mean 'random'? or load its file with --plugin FILE",
        "r.yaml:8: training.epochs: got 0, expected greater than 0",
        f"r.yaml:9: epocs: unknown key; expected one of {', '.join(Recipe.model_fields)}",
    ]


def test_missing_and_misshapen_parts():
    assert faults("loss: triplet\n")[0] == "r.yaml:1: dataset: this key is missing and has no default; add it"
    assert faults("dataset: {name: glyphs}\nloss: triplet\n")[0].startswith(
        "r.yaml:2: loss: got 'triplet'; expected a mapping such as {name: NAME}, with NAME one of "
    )
    assert "a mapping without a name" in faults("dataset: {name: glyphs}\nloss: {margin: 1}\n")[0]
    assert faults("[1, 2]")[0].startswith("r.yaml:1: ")
    assert faults("")[0].startswith("r.yaml")
    assert faults("", "seed=1") == faults("")


def test_faults_inside_lists_name_the_item():
    text = GOOD + "metrics:\n- {name: map_at_r}\n- {name: recall, k: [0]}\n"
    assert faults(text)[0] == "r.yaml:7: metrics.1.k.0: got 0, expected greater than 0"


def test_values_of_one_part_that_do_not_go_together_are_told_plainly():
    assert faults(GOOD, "transform={name: imagenet, size: 64, resize: 48}") == [
        "--set transform={name: imagenet, size: 64, resize: 48}: transform: "
        "size 64 cannot be cropped from images resized to 48; use a resize of at least 64"
    ]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a: 1\na: 2\n", "r.yaml:2: a: this key is given twice"),
        ("a: !!python/object/apply:os.system [ls]\n", "is not allowed"),
        (
            "a: &x [&y [1, 1, 1, 1, 1, 1, 1, 1, 1, 1], *y, *y]\nb: &z [*x, *x, *x, *x, *x, *x, *x, *x, *x, *x]\n"
            "c: &w [*z, *z, *z, *z, *z, *z, *z, *z, *z, *z]\nd: [*w, *w, *w, *w, *w, *w, *w, *w, *w, *w]\n",
            "levels; expected a recipe",
        ),
        ("a: &x [*x]\n", "levels; expected a recipe"),
    ],
)
def test_hostile_or_broken_yaml_is_one_line(text: str, line: str):
    printed = faults(text)
    assert len(printed) == 1 and line in printed[0]


def test_overrides_replace_and_are_named_in_faults():
    assert parse_recipe(GOOD, "r.yaml", ["loss.margin=1e-1"]).loss.margin == 0.1
    assert parse_recipe(GOOD, "r.yaml", ["loss={name: proxy_anchor}"]).loss.name == "proxy_anchor"
    assert parse_recipe(GOOD, "r.yaml", ["training.epochs=7"]).training.epochs == 7
    text = GOOD + "metrics: [{name: recall}, {name: map_at_r}]\n"
    assert parse_recipe(text, "r.yaml", ["metrics.0.k=[1, 10]"]).metrics[0].k == (1, 10)
    assert "is the value 0.2, expected a mapping" in faults(GOOD, "loss.margin.x=1")[0]
    assert "does not exist" in faults(text, "metrics.7.k=[1]")[0]


def test_rules_across_parts_name_the_part_with_the_need():
    assert faults(GOOD + "training: {select_by: recall@3}\n") == [
        "r.yaml:5: training.select_by: got 'recall@3', expected one of the recipe's metrics: "
        "recall@1, recall@2, recall@4, recall@8, map@r"
    ]
    assert faults(GOOD + "training: {select_by: eer}\nmetrics: [eer]\n") == [
        "r.yaml:5: training.select_by: got eer, of which smaller is better; expected a metric where larger is better"
    ]


def test_a_warm_up_ends_within_the_training():
    text = GOOD + "schedule: {name: cosine, warmup_epochs: 5}\ntraining: {epochs: 4}\n"
    assert faults(text) == ["r.yaml:5: schedule.warmup_epochs: got 5, expected at most training.epochs, 4"]
    assert parse_recipe(text, "r.yaml", is_trained=True).training.epochs == 4  # runs of older versions stay readable
    assert parse_recipe(text.replace("epochs: 4", "epochs: 5"), "r.yaml").training.epochs == 5


def test_names_with_a_number_are_read_and_written_as_they_are():
    names = "[eer, tar@far=1e-3, tar@far=0.05, ari]"
    recipe = parse_recipe(f"{GOOD}training: {{select_by: tar@far=1e-3}}\nmetrics: {names}\n", "r.yaml")
    assert [metric.names() for metric in recipe.metrics] == [("eer",), ("tar@far=1e-3", "tar@far=0.05"), ("ari",)]
    assert plain(recipe)["metrics"] == ["eer", "tar@far=1e-3", "tar@far=0.05", "ari"]


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ("[{name: nmi, restarts: 1}, {name: nmi, restarts: 20}, map@r]", "metrics.1: nmi is listed twice"),
        ("[{name: recall, k: [1]}, {name: recall, k: [1, 2]}, map@r]", "metrics.1: recall@1 is listed twice"),
        ("[map@r, {name: map_at_r}]", "metrics.1: map@r is listed twice"),
        ("[{name: recall, k: [1, 1]}, map@r]", "metrics.0: recall@1 is listed twice"),
        ("[recall@1, recall@1, map@r]", "metrics.0: recall@1 is listed twice"),
        ("[map@r]\ntraining: {loggers: [wandb, wandb]}", "training.loggers.1: wandb is listed twice; remove one"),
    ],
)
def test_a_figure_has_one_name_w14(metrics: str, message: str):
    text = f"dataset: {{name: glyphs}}\nloss: {{name: triplet}}\nmetrics: {metrics}\n"
    with pytest.raises(UserError) as error:
        parse_recipe(text, "r.yaml")
    assert str(error.value).startswith((f"r.yaml:3: {message}", f"r.yaml:4: {message}"))
    merged = parse_recipe(text.replace(metrics, "[recall@1, recall@2, map@r]"), "r.yaml").metrics
    assert [name for metric in merged for name in metric.names()] == ["recall@1", "recall@2", "map@r"]


def test_a_study_is_no_recipe_nor_the_other_way_around():
    recipe, study = ROOT / "recipes" / "cars" / "mpa.yaml", ROOT / "recipes" / "study" / "mpa.yaml"
    refuses(f"{study}: got a study, expected a recipe; use dmlkit study for it", read_recipe, study)
    refuses(f"{recipe}: got a recipe, expected a study; use dmlkit train for it", read_study, recipe)


def test_unreadable_files(tmp_path):
    refuses("no such file", read_recipe, tmp_path / "none.yaml")
    refuses("cannot read", read_recipe, tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"seed: 1\nname: caf\xe9\n")
    refuses("latin.yaml:2: cannot read this recipe: this is not UTF-8", read_recipe, tmp_path / "latin.yaml")
    (tmp_path / "two.yaml").write_text("seed: 1\n---\nseed: 2\n")
    refuses("two.yaml:2: not valid YAML: this line begins another document", read_recipe, tmp_path / "two.yaml")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("training.clip_grad_norm=1e999", "1e999 is not a finite number"),
        ("seed=18446744073709551616", "does not fit into 64 bits"),
        ("seed=" + "9" * 5000, "has more than 400 digits"),
        ("<<={seed: 1}", "merge keys are not supported"),
        ("? [a, b]\n: 1", "expected key.subkey=value"),
        ("loss={? [a, b] : 1}", "got a list or a mapping as the name of a key"),
        ("seed=" + "[" * 900 + "]" * 900, "levels; expected a recipe"),
        ("metrics.\u00b2=1", "expected a list"),
        ("metrics." + "9" * 5000 + ".k=1", "expected a list"),
        (".".join(["a"] * 2000) + "=1", "expected key.subkey=value"),
    ],
    ids=range(10),
)
def test_values_that_hurt_are_one_line(change: str, message: str):
    with pytest.raises(UserError) as error:
        parse_recipe(GOOD, "good.yaml", [change])
    assert message in str(error.value) and "\n" not in str(error.value) and len(str(error.value)) < 1000


def test_a_merge_key_of_a_file_is_told_with_its_line_u9():
    assert faults(GOOD + "<<: {seed: 1}\n")[0].startswith("r.yaml:5: <<: YAML's merge keys are not supported; write")


@pytest.mark.parametrize("text", ["x" * 900_000, "- " + "y" * 90_000, GOOD + f"seed: {'z' * 40_000}\n"])
def test_a_message_shows_an_excerpt_of_a_file_u7(text: str):
    (line,) = faults(text)
    assert len(line) < 400 and "characters)" in line


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("metrics=5", "metrics: got 5, expected a list"),
        ("training=5", "training: got 5, expected a mapping"),
        ("metrics=[]", "metrics: got [], expected at least 1 item"),
        ("metrics=[{name: recall, k: []}]", "metrics.0.k: got [], expected at least 1 item"),
        ("backbone={name: resnet18, pooling: {name: nope}}", "backbone.pooling.name: unknown pooling 'nope'; expected"),
        ("metrics=[{name: nope}]", "metrics.0.name: unknown metric 'nope'; expected one of ami"),
    ],
)
def test_faults_are_told_once_and_in_words_of_recipes_u6_u8(change: str, message: str):
    (line,) = faults(GOOD, change)
    assert line.startswith(f"--set {change}: {message}")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a: 1\nb: [1, 2\nc: 3\n", 2),
        ("a: 1\nloss: {name: triplet\nc: {d: 3}\n", 2),
        ("a: 1\nloss: {name: triplet,\n  margin: 0.2\n  scale: 3}\n", 3),
        ("a: 1\nb: [1, 2}\nc: 3\n", 2),
        ("a: 1\nb:\n  c: 3\n\td: 4\n", 4),
        ("a: 1\nb: 'x\nc: 3\nd: 4\n", 2),
        ("a: 1\nb:\n  c 2\n  d: 3\n", 3),
        ("a: 1\nb:2\nc: 3\n", 2),
        ("a: 1\nb:2\n", 2),
        ("a:\n  b:\n    c: 1\n   d: 2\n", 4),
        ("a:\n  - 1\n  b: 2\n", 3),
        ("a: 1\nb: c: 2\n", 2),
        ("a: 1\n---\nb: 2\n", 2),
        ("a: 1\nb: \x07\n", 2),
        ("a: 1\nloss: {name: triplet margin: 2}\n", 2),
        ("a: 1\n# x\nb: [1,\n  2,\n\n# y\nc: 3\n", 3),
    ],
)
def test_an_error_of_yaml_has_the_line_to_correct(text: str, line: int):
    refuses(rf"^r\.yaml:{line}: ", parse_yaml, text, "r.yaml")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("loss.name=contrastive", "loss.margin: unknown key; expected one of name, positive_margin"),
        ("dataset.name=folder", "dataset.root: this key is missing and has no default; add it"),
        ("transform=null", "transform: got null, but dataset glyphs has images"),
        ("nothing.x=1", "nothing: unknown key"),
        ("<seed=1", "<seed: unknown key; did you mean 'seed'?"),
        ("metrics.0=3", "metrics: got {'0': 3}, expected a list"),
        ("loss={name: triplet", "not valid YAML: expected ',' or '}', but got '<stream end>'"),
        ("loss.margin", "expected key.subkey=value, e.g. --set loss.margin=0.2"),
        ("loss.margin=big", "loss.margin: got 'big', expected a valid number"),
        ("dataset={name: folder, root: ''}", "dataset.root: got '', expected at least 1 character"),
        ("dataset.levels=[A]", "dataset.levels.0: got 'A', expected pattern '^[a-z][a-z0-9_]*$'"),
        ("loss=!x y", "not valid YAML: the tag !x is not allowed; write plain values"),
    ],
)
def test_an_error_of_an_override_names_the_option(override: str, message: str):
    (line,) = faults(GOOD, override)
    assert line.startswith(f"--set {override}: {message}")


def test_a_requirement_that_an_override_breaks_names_the_option():
    text = "dataset: {name: glyphs}\nloss: {name: margin, miner: {name: distance_weighted}}\n"
    (line,) = faults(text, "manifold.name=poincare")
    assert line.startswith("--set manifold.name=poincare: loss.miner: distance_weighted needs manifold.name sphere")


@pytest.mark.parametrize(
    ("backbone", "message"),
    [
        ("name: resnet18, weights: imagnet", "unknown weights 'imagnet'; did you mean 'imagenet'?"),
        ("name: vit, weights: swag", "unknown weights 'swag'; expected imagenet, one of IMAGENET1K_V1"),
        ("name: convnext, weights: IMAGENET1K_V9", "unknown weights 'IMAGENET1K_V9'; did you mean 'IMAGENET1K_V1'?"),
        ("name: googlenet, weights: x", "unknown weights 'x'; expected imagenet, one of IMAGENET1K_V1"),
        ("name: bn_inception, weights: imagenet", "'imagenet': expected a file"),
        ("name: timm, model: resnet18, weights: imagnet", "got 'imagnet', expected pretrained or a file"),
    ],
)
def test_unknown_weights_are_refused_when_a_recipe_is_read(backbone: str, message: str):
    (line,) = faults(f"dataset: {{name: glyphs}}\nloss: {{name: triplet}}\nbackbone: {{{backbone}}}\n")
    assert line.startswith(f"r.yaml:3: backbone.weights: {message}")
