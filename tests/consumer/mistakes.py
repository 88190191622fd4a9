"""What pyright must find in a stranger's program; each line says which rule, and no other line has a fault."""


def a_misspelt_name() -> None:
    from dmlkit.losses import ProxyAncor  # reportAttributeAccessIssue

    ProxyAncor(8)


def a_misspelt_attribute() -> None:
    import dmlkit.manifolds

    dmlkit.manifolds.Sfere(8)  # reportAttributeAccessIssue


def a_misspelt_function() -> None:
    import dmlkit

    dmlkit.lod("runs/demo")  # reportAttributeAccessIssue
    dmlkit.load("runs/demo", checkpoint="first")  # reportArgumentType
    dmlkit.open_gallery("galleries/birds").identify("new", method="best")  # reportArgumentType


def an_option_of_another_type() -> None:
    from dmlkit.losses import ProxyAnchor
    from dmlkit.manifolds import Sphere

    ProxyAnchor(Sphere(8), 10, margin="large")  # reportArgumentType
    ProxyAnchor(Sphere(8), 10, margn=0.2)  # reportCallIssue


def a_component_of_another_family() -> None:
    from dmlkit.datasets import GlyphsConfig
    from dmlkit.losses import ProxyAnchor
    from dmlkit.optimizers import AdamWConfig
    from dmlkit.recipe.schema import Recipe

    Recipe(dataset=GlyphsConfig(), loss=AdamWConfig())  # reportArgumentType
    ProxyAnchor(GlyphsConfig(), 10)  # reportArgumentType
