"""dmlkit: train, evaluate, embed and export deep metric learning models.

The main interfaces are the command line (``dmlkit --help``) and recipes. Their operations are also functions::

    import dmlkit

    dmlkit.train("glyphs/proxy_anchor", "runs/demo", overrides=["training.epochs=3"])
    print(dmlkit.evaluate("runs/demo").report.metrics["recall@1"])
    model = dmlkit.load("runs/demo")
    embeddings = model.embed(["robin.jpg", "wren.jpg"])  # (2, D)
    print(model.similarity(embeddings, embeddings))
    gallery = dmlkit.open_gallery("galleries/birds", run="runs/demo")  # opened, or created
    gallery.add("photos/")
    for path, answer in gallery.identify("new/").labeled():
        print(path, answer.label, answer.score)

`Client` sends images to ``dmlkit serve``, and imports no torch. `load` also takes the name of a pretrained model, e.g.
``timm:vit_small_patch14_dinov2``. The components can also be used as a library::

    from dmlkit.losses import ProxyAnchor
    from dmlkit.manifolds import Sphere

Importing this package imports neither torch nor any other heavy dependency.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036  # pip refuses such a Python, a clone on the path does not
    sys.exit(f"dmlkit needs Python 3.11 or later; this is Python {sys.version_info[0]}.{sys.version_info[1]}")

from typing import TYPE_CHECKING

from dmlkit.component.lazy import import_on_demand
from dmlkit.errors import UserError

if TYPE_CHECKING:
    from dmlkit.evaluation.image_gallery import ImageGallery, open_gallery
    from dmlkit.evaluation.run import evaluate_run as evaluate
    from dmlkit.serve.client import Client
    from dmlkit.training.start import start
    from dmlkit.training.train import train
    from dmlkit.vectors.embedder import Embedder, load

__all__ = ["Client", "Embedder", "ImageGallery", "UserError", "evaluate", "load", "open_gallery", "start", "train"]
__version__ = "0.1.0"

import_on_demand(__name__)  # torch takes seconds
