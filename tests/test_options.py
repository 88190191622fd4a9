"""Components defined once: the class, its constructor and its configuration have the same options."""

import inspect
import pickle
from collections.abc import Iterable
from importlib import import_module
from typing import Annotated, Any, Literal

import pytest
import torch
from pydantic import Field, NonNegativeFloat, PositiveInt, TypeAdapter, ValidationError
from torch import Tensor, nn

from dmlkit.backbones.base import BackboneConfig
from dmlkit.component import Component, ComponentConfig, MemberError, OptionsConfig, Requirement, one_of, option
from dmlkit.losses import (
    MPA,
    Contrastive,
    CrossBatchMemory,
    Loss,
    Margin,
    MultiSimilarity,
    ProxyAnchor,
    RecallSurrogate,
    Triplet,
)
from dmlkit.losses.base import LossConfig
from dmlkit.losses.pair_loss import PairLoss
from dmlkit.losses.proxies.transport_weights import TransportWeights
from dmlkit.manifolds import Euclidean, Poincare, Sphere
from dmlkit.manifolds.base import Manifold
from dmlkit.miners import All, Hard
from dmlkit.recipe.schema import FAMILIES
from dmlkit.regularizers import GraphConsistency

DERIVED = [
    variant
    for root in FAMILIES.values()
    for variant in root.variants.values()
    if variant.component is not None and variant.__module__.startswith("dmlkit.")
]
ONLY_IN_RECIPES = {"name", "weight", "run", "teacher", *BackboneConfig.model_fields}
"""Keys that no constructor takes: the trainer reads them, or `BackboneConfig.build`."""


class WheelConfig(ComponentConfig, frozen=True):
    round: bool = True

    def build(self, axle: str) -> "Wheel":
        raise NotImplementedError


class Wheel(Component, nn.Module, family=WheelConfig):
    axle: str = option(kw_only=False)
    radius: NonNegativeFloat = 1.0
    """Radius, in meters."""
    turns: Tensor = option(init=False)
    state: str = option(default="new", init=False)

    def __post_init__(self) -> None:
        self.register_buffer("turns", torch.zeros(()))


class Spoked(Wheel, name="spoked"):
    """A wheel with spokes."""

    first_count: Annotated[int, Field(ge=3)] = option(default=8, alias="spokes")
    color: Literal["red", "blue"] | None = None

    def requirements(self) -> Iterable[Requirement]:
        return (Requirement("road", (self.color,), self.state),)


@pytest.mark.parametrize("config", DERIVED, ids=lambda config: config.__name__)
def test_constructor_and_configuration_have_the_same_options_and_defaults_and_it_can_be_pickled(config: Any):
    parameters = inspect.signature(config.component).parameters.values()
    options = {one.name: one.default for one in parameters if one.kind is inspect.Parameter.KEYWORD_ONLY}
    required = inspect.Parameter.empty
    fields = {key: required if one.is_required() else one.default for key, one in config.model_fields.items()}
    assert options == {key: default for key, default in fields.items() if key not in ONLY_IN_RECIPES}
    assert config.component.__name__ + "Config" == config.__name__
    needed = {key: "a run" for key, field in config.model_fields.items() if field.is_required()}
    built = config.model_validate(needed, context={"is_trained": True})
    assert pickle.loads(pickle.dumps(built)) == built


def test_at_least_the_eight_families_are_derived():
    families = {name for name, root in FAMILIES.items() if set(root.variants.values()) <= set(DERIVED)}
    assert families == {"losses", "manifolds", "miners", "pooling", "samplers", "heads", "transport", "regularizers"}


def test_options_arguments_and_presets_are_attributes():
    wheel = Spoked("steel", spokes=5)
    assert (wheel.axle, wheel.first_count, wheel.radius, wheel.color, wheel.state) == ("steel", 5, 1.0, None, "new")
    assert wheel.turns.item() == 0 and dict(wheel.named_buffers()).keys() == {"turns"}
    assert Spoked("steel", spokes=5).axle == Spoked(axle="steel", spokes=5).axle
    said = str(inspect.signature(Wheel)).replace("typing.", "")  # Python 3.13 leaves the module out
    assert said == "(axle: str, *, radius: Annotated[float, Ge(ge=0)] = 1.0)"
    with pytest.raises(TypeError, match="Spoked: missing a required argument: 'axle'"):
        Spoked()  # pyright: ignore[reportCallIssue]


def test_the_configuration_builds_what_the_constructor_builds():
    config = TypeAdapter(Annotated[WheelConfig, one_of]).validate_python(
        {"name": "spoked", "spokes": 4, "color": "red"}
    )
    assert config == Spoked.Config(spokes=4, color="red") and config.round
    built: Any = config.build("wood")
    assert isinstance(built, Spoked) and (built.axle, built.first_count, built.color) == ("wood", 4, "red")
    assert [requirement.allowed for requirement in config.requirements()] == [("red",)]
    assert [requirement.reason for requirement in config.requirements()] == ["new"]


WRONG = [
    ({"spokes": 2}, ValueError, "Spoked: spokes: got 2, expected greater than or equal to 3"),
    ({"spokes": "5"}, ValueError, "Spoked: spokes: got '5', expected a valid integer"),
    ({"color": "green"}, ValueError, "Spoked: color: got 'green', expected 'red' or 'blue'"),
    ({"first_count": 5}, TypeError, "Spoked: got an unexpected keyword argument 'first_count'"),
    ({"state": "old"}, TypeError, "Spoked: got an unexpected keyword argument 'state'"),
]


@pytest.mark.parametrize(("options", "kind", "message"), WRONG, ids=[message for *_, message in WRONG])
def test_a_wrong_option_is_refused_in_one_line(options: dict[str, Any], kind: type[Exception], message: str):
    with pytest.raises(kind) as raised:
        Spoked("steel", **options)
    assert str(raised.value) == message
    with pytest.raises(ValidationError):
        Spoked.Config(**options)


def test_an_empty_option_is_refused_in_the_words_of_other_wrong_ones():
    with pytest.raises(ValueError, match=r"^RecallSurrogate: at: got \(\), expected at least 1 item"):
        RecallSurrogate(Sphere(3), at=())


def test_a_nested_component_is_given_as_such_or_by_its_configuration():
    sphere = Sphere(3)
    assert isinstance(Triplet(sphere).miner, All)
    assert isinstance(Triplet(sphere, miner=Hard()).miner, Hard)
    assert isinstance(Triplet(sphere, miner=Hard.Config()).miner, Hard)
    memory = CrossBatchMemory(sphere, loss=Triplet.Config(margin=0.3, miner=Hard.Config()))
    assert memory.loss.margin == 0.3 and memory.loss.manifold is sphere
    assert MPA(sphere, 4, transport=TransportWeights.Config(group_size=2)).transport.group_size == 2
    with pytest.raises(ValueError, match="Triplet: miner: got str, expected Miner"):
        Triplet(sphere, miner="hard")  # pyright: ignore[reportArgumentType]


def test_arguments_reach_nested_components():
    """The default miner of the margin loss needs the manifold, and that of a memory the number of classes."""
    assert Margin(Sphere(5), 3).miner.dim == 5
    memory = CrossBatchMemory.Config(loss=Margin.Config()).build(Sphere(5), 3)
    assert memory.loss.beta.shape == (3,) and memory.num_classes == 3


def test_a_class_without_a_needed_method_is_refused_at_its_definition():
    with pytest.raises(MemberError, match=r"Bare: the class must define compute_pairs\(\)$"):

        class Bare(PairLoss, name="bare"):
            """Nothing."""

    assert "bare" not in LossConfig.variants


def test_a_constructor_that_its_configuration_cannot_call_is_refused_at_its_definition():
    with pytest.raises(MemberError, match=r"Own: __init__\(\): missing a required argument: 'num_classes'; annotate"):

        class Own(Loss, name="own"):
            def __init__(self, manifold: Manifold, num_classes: int) -> None: ...

            def compute(self, embeddings: Tensor, labels: Tensor) -> Tensor:
                return embeddings.sum()

    with pytest.raises(MemberError, match=r"Lean: __init__\(\): got an unexpected keyword argument 'margin'; annotate"):

        class Lean(Loss, name="lean"):
            margin: float = 0.1

            def __init__(self, manifold: Manifold) -> None: ...

            def compute(self, embeddings: Tensor, labels: Tensor) -> Tensor:
                return embeddings.sum()

    assert not {"own", "lean"} & {*LossConfig.variants}


def test_an_attribute_without_a_value_is_refused_at_its_definition():
    with pytest.raises(MemberError, match=r"Loose: margin: an attribute is an option and needs a value or option\("):

        class Loose(PairLoss):
            margin: float


def test_a_key_of_recipes_is_no_parameter_of_the_constructor():
    config = GraphConsistency.Config(weight=0.5, bandwidth=2.0)
    assert (config.weight, GraphConsistency.Config().weight, config.build(Sphere(2)).bandwidth) == (0.5, 0.001, 2.0)
    with pytest.raises(TypeError, match="GraphConsistency: got an unexpected keyword argument 'weight'"):
        GraphConsistency(Sphere(2), weight=0.5)  # pyright: ignore[reportCallIssue]


def test_a_value_without_an_annotation_is_the_new_default_of_an_inherited_option():
    class Wide(Contrastive):
        negative_margin = 3.0

    class Wider(Wide):
        pass

    points, labels = torch.tensor([[0.0], [2.0]]), torch.tensor([0, 1])
    assert (Wide.Config().negative_margin, Wider.Config().negative_margin) == (3.0, 3.0)
    assert Wider(Euclidean(1))(points, labels).item() == 1 and Contrastive(Euclidean(1))(points, labels).item() == 0
    assert Wide(Euclidean(1), negative_margin=4.0)(points, labels).item() == 4


def test_a_derived_configuration_has_its_own_keys_after_those_of_its_bases():
    own = ["proxy_norm", "margin", "scale"]
    assert list(ProxyAnchor.Config.model_fields) == ["name", "chunk_size", "negative_fraction", *own]
    assert issubclass(Contrastive.Config, PairLoss.Config) and issubclass(PairLoss.Config, LossConfig)
    assert vars(Triplet)["Config"] is import_module("dmlkit.losses.triplet").TripletConfig
    assert not issubclass(TransportWeights.Config, ComponentConfig)
    assert issubclass(TransportWeights.Config, OptionsConfig)


def test_what_a_family_tells_beside_its_options_is_that_of_the_class():
    assert (Triplet.Config.shares_classes, ProxyAnchor.Config.shares_classes) == (False, True)
    assert FAMILIES["transport"].variants["none"].moves is False
    assert FAMILIES["samplers"].variants["class_balanced"](images_per_class=1).pairs == "of different classes only"


def test_values_of_options_are_in_the_state_of_the_class_and_not_of_its_module():
    assert Poincare(2, curvature=-0.5).curvature.item() == -0.5
    assert MultiSimilarity(Sphere(2), mining_margin=None).mining_margin is None
    assert not any("margin" in key for key in MultiSimilarity(Sphere(2)).state_dict())


def test_a_class_without_a_name_is_no_member_and_adds_its_options_to_those_of_its_subclasses():
    class Counted(Loss):
        least: PositiveInt = 1

    assert "least" in Counted.Config.model_fields
    assert not any(issubclass(variant, Counted.Config) for variant in LossConfig.variants.values())


def test_a_loss_refuses_a_similarity_that_its_requirements_exclude():
    class Bounded(Loss):
        def requirements(self) -> Iterable[Requirement]:
            return (Requirement("manifold.similarity", ("cosine",), "it is bounded"),)

        def compute(self, embeddings: Tensor, labels: Tensor) -> Tensor:
            return embeddings.sum()

    message = "Bounded: expected a manifold with similarity 'cosine', because it is bounded; got 'negative_distance'"
    with pytest.raises(ValueError, match=message):
        Bounded(Euclidean(2))
    assert Bounded(Sphere(2)).manifold.similarity_name == "cosine"
