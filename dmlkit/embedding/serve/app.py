"""The HTTP interface: what each address takes and returns."""

import asyncio
import base64
import os
from collections.abc import Callable, Generator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import torch
from fastapi import APIRouter, Depends, FastAPI, Query, Request
from fastapi import Path as InPath
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse, Response
from fastapi.security import HTTPBearer
from fastapi.staticfiles import StaticFiles
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from torch import Tensor

from dmlkit import __version__
from dmlkit.datasets.files.dataset import Dataset
from dmlkit.datasets.files.samples import ImageSamples
from dmlkit.embedding.embedder import GivenImages
from dmlkit.embedding.questions.why import explain_images
from dmlkit.embedding.serve.requests import (
    BODY,
    MOST_BYTES,
    Access,
    Guard,
    RefusedError,
    SentImage,
    first_message,
    read_pictures,
)
from dmlkit.embedding.serve.reviewing import ServedReview, review_api, review_of
from dmlkit.embedding.serve.service import BusyError, Pixels, Service
from dmlkit.errors import UserError
from dmlkit.files.escape import excerpt, printable
from dmlkit.loading.inputs import check_resized
from dmlkit.run_folder.folder import RunFolder

METRICS = "PROMETHEUS_MULTIPROC_DIR"
"""Variable of prometheus-client: folder in which the processes of a server keep their counts, to be summed."""
MOST_NEIGHBORS = 1000
BEARER = HTTPBearer(auto_error=False, description="The token of --token.")
"""Says in the OpenAPI document that addresses need a token, so that /docs asks for it; `Guard` checks it."""
PAGE = files("dmlkit.embedding.serve") / "page"
SWAGGER = files("fastapi_offline") / "static"


class Problem(BaseModel):
    """What is wrong with a request."""

    error: str


class Named(BaseModel):
    """Images of the gallery."""

    model_config = ConfigDict(extra="forbid")
    labels: list[str] = []
    ids: list[str] = []


class WantedVersion(BaseModel):
    """A version of the gallery."""

    model_config = ConfigDict(extra="forbid")
    version: Annotated[int, Field(ge=1, le=2**53)]


class Served(Collector):
    """What requests are answered with."""

    def __init__(self, service: Service, access: Access) -> None:
        self.service, self.allow_writes, self.images = service, access.allow_writes, access.images
        self.adding = asyncio.Lock()
        self.registry = CollectorRegistry()
        own = self.registry
        if METRICS in os.environ:  # of all processes, also of those that have ended
            MultiProcessCollector(self.registry)
            own = None
        self.seconds = Histogram("dmlkit_request_seconds", "Time of answers.", registry=own)
        self.embedded = Counter("dmlkit_images", "Images that were embedded.", registry=own)
        self.registry.register(self)

    def collect(self) -> Generator[GaugeMetricFamily]:
        """Yield the size of the gallery, which is that of every process."""
        size = len(self.service.snapshot.points)
        yield GaugeMetricFamily("dmlkit_gallery_images", "Images that are searched.", size)

    async def answered(self, pictures: Sequence[SentImage], work: Callable[[Tensor], Any]) -> Any:
        """Wait for the model's thread to embed pictures and work on their points."""
        with self.seconds.time():
            found = await asyncio.wrap_future(self.service.submit([one.pixels for one in pictures], work))
        self.embedded.inc(len(pictures))
        return found


def served(request: Request) -> Served:
    """Return what a request is answered with."""
    return request.app.state.served


def writer(request: Request) -> Served:
    """Return what a request changes.

    Raises:
        RefusedError: the server does not change the gallery.
    """
    found = served(request)
    if not found.allow_writes:
        raise RefusedError(403, "this server does not change the gallery; start it with --allow-writes")
    return found


async def pictures_of(request: Request) -> list[SentImage]:
    """Return the images of a request."""
    found = served(request)
    trained = found.service.embedder.trained

    def check(name: str, pixels: Pixels) -> None:  # else one image could fail all requests that are embedded with it
        for one in trained.members or (trained,):
            assert one.recipe.transform is not None
            check_resized(torch.from_numpy(pixels).permute(2, 0, 1), one.recipe.transform.resizing, name)

    return await read_pictures(request, found.images, check)


Server = Annotated[Served, Depends(served)]
Writer = Annotated[Served, Depends(writer)]
SentImages = Annotated[list[SentImage], Depends(pictures_of)]
PROBLEMS: dict[int | str, dict[str, Any]] = {
    status: {"model": Problem}
    for status in (400, 401, 403, 404, 405, 409, 413, 415, 422, 500, 503)  # each with its usual meaning
}
OPTIONAL_BODY = {"requestBody": {**BODY["requestBody"], "required": False}}
api = APIRouter(prefix="/v1", responses=PROBLEMS)


@api.get("/info")
async def info(server: Server, request: Request) -> dict[str, Any]:
    """Return what is served."""
    found = await server.answered([], lambda _: server.service.info())
    run = server.service.run
    more = {"run": run and str(run), "writes": server.allow_writes, "review": request.app.state.review is not None}
    return {**found, **more}


@api.post("/embed", openapi_extra=BODY)
async def embed(server: Server, pictures: SentImages) -> dict[str, Any]:
    """Return one embedding per image."""
    points = await server.answered(pictures, Tensor.tolist)
    return {"embeddings": points, "names": [one.name for one in pictures]}


@api.post("/search", openapi_extra=BODY)
async def search(
    server: Server, pictures: SentImages, k: Annotated[int, Query(ge=1, le=MOST_NEIGHBORS)] = 10
) -> dict[str, Any]:
    """Return the k nearest images of each image."""
    found = await server.answered(pictures, lambda points: server.service.search(points, k))
    return {"queries": [{"name": one.name, "nearest": near} for one, near in zip(pictures, found, strict=True)]}


@api.post("/identify", openapi_extra=BODY)
async def identify(server: Server, pictures: SentImages) -> dict[str, Any]:
    """Return the label of each image, or ``unknown``."""
    found = await server.answered(pictures, server.service.identify)
    return {"answers": [{"name": one.name, **answer} for one, answer in zip(pictures, found, strict=True)]}


@api.post("/verify", openapi_extra=BODY)
async def verify(server: Server, pictures: SentImages) -> dict[str, Any]:
    """Return the similarity of two images, and whether they show the same class."""
    if len(pictures) != 2:
        raise RefusedError(422, f"got {len(pictures)} images, expected 2 to compare")
    return await server.answered(pictures, server.service.verify)


async def some_pictures(request: Request) -> list[SentImage]:
    """Return the images of a request; none for a request without a body."""
    return await pictures_of(request) if request.headers.get("content-type") else []


@api.post("/why", openapi_extra=OPTIONAL_BODY)
async def why(
    server: Server,
    request: Request,
    pictures: Annotated[list[SentImage], Depends(some_pictures)],
    id: Annotated[list[Annotated[str, Field(max_length=64)]], Query(max_length=2)] = [],  # noqa: A002, B006
    row: Annotated[int | None, Query(ge=0, le=2**53)] = None,
) -> dict[str, Any]:
    """Return which patches make two images similar: sent ones, ones of the source, or a row of the review."""
    images: list[Any] = [one.pixels for one in pictures]
    if row is not None:
        images.append(review_of(request).path(row))
    snapshot, places = server.service.snapshot, list[int]()
    for name in id:
        place = snapshot.rows.get(name)
        if place is None:
            raise RefusedError(404, f"{excerpt(name)}: there is no picture with this id")
        places.append(place)
    if len(images) + len(places) != 2:
        raise RefusedError(422, f"got {len(images) + len(places)} images, expected 2 to compare")

    def work(_: Tensor) -> dict[str, Any]:
        points = snapshot.points
        crops = [*[None] * len(images), *map(points.box, places)]
        return explained(server.service, GivenImages([*images, *(Path(points.paths[one]) for one in places)], crops))

    return await server.answered([], work)


@api.get("/gallery/labels")
async def labels(server: Server) -> dict[str, Any]:
    """Return the number of images of each label; the empty label counts images without one."""
    return {"labels": await server.answered([], lambda _: server.service.labels())}


@api.get("/gallery/images")
async def images_of_label(
    server: Server,
    label: str,
    offset: Annotated[int, Query(ge=0, le=2**53)] = 0,
    count: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> dict[str, Any]:
    """Return the images of a label."""
    return {"images": await server.answered([], lambda _: server.service.images(label, offset, count))}


@api.get("/images/{id}", response_class=Response, responses={200: {"content": {"image/jpeg": {}}}})
async def thumbnail(server: Server, id: Annotated[str, InPath(max_length=64)]) -> Response:  # noqa: A002
    """Return a small picture of an image of the source."""
    picture = await asyncio.to_thread(server.service.snapshot.thumbnail, id)
    if picture is None:
        raise RefusedError(404, f"{excerpt(id)}: there is no picture with this id")
    return Response(picture, media_type="image/jpeg")


@api.post("/gallery/add", openapi_extra=BODY)
async def add(
    server: Writer, pictures: SentImages, label: Annotated[str, Query(min_length=1, max_length=200)]
) -> dict[str, Any]:
    """Add images to the gallery."""
    files = [(one.name, one.suffix, one.content) for one in pictures]
    return await server.answered([], lambda _: server.service.add(files, label))


@api.post("/gallery/remove")
async def remove(server: Writer, named: Named) -> dict[str, Any]:
    """Remove images from the gallery, by their labels or ids."""
    return await server.answered([], lambda _: server.service.remove(named.labels, named.ids))


@api.get("/gallery/versions")
async def versions(server: Server) -> dict[str, Any]:
    """Return the versions of the gallery, the oldest first."""
    return {"versions": await server.answered([], lambda _: server.service.versions())}


@api.post("/gallery/restore")
async def restore(server: Writer, wanted: WantedVersion) -> dict[str, Any]:
    """Make an old version of the gallery the newest one."""
    return await server.answered([], lambda _: server.service.restore(wanted.version))


@api.post("/review/add")
async def add_reviewed(server: Writer, request: Request) -> dict[str, Any]:
    """Add the images of the review with their labels to the gallery, as a new version."""
    review = review_of(request)
    with server.seconds.time():
        async with server.adding:  # each would load a model
            return await asyncio.to_thread(lambda: server.service.add_listed(review.to_add()))


def make_app(service: Service, access: Access) -> FastAPI:
    """Return the application that answers requests on a service.

    Raises:
        UserError: the folder of the review has none, or one of another gallery.
    """
    app = FastAPI(title="dmlkit", version=__version__, docs_url=None, redoc_url=None)
    app.state.served = Served(service, access)
    app.state.review = access.review and ServedReview(access.review, service.source, service.label_of)
    token = [] if access.token is None else [Depends(BEARER)]
    app.include_router(api, dependencies=token)
    app.include_router(review_api, responses=PROBLEMS, dependencies=token)
    _report_errors(app)
    _add_pages(app)
    app.add_middleware(Guard, access=access, most_bytes=MOST_BYTES)
    return app


def _report_errors(app: FastAPI) -> None:
    """Answer every error with a status and ``{"error": MESSAGE}``, and never with a traceback."""

    def answer(status: int, message: str, **headers: str) -> JSONResponse:
        return JSONResponse({"error": printable(message)}, status, headers)

    @app.exception_handler(RefusedError)
    async def refused(_: Request, error: RefusedError) -> JSONResponse:
        return answer(error.status, str(error))

    @app.exception_handler(UserError)
    async def user_error(_: Request, error: UserError) -> JSONResponse:
        return answer(409, str(error))

    @app.exception_handler(BusyError)
    async def busy(_: Request, __: BusyError) -> JSONResponse:
        return answer(503, "too many images are waiting; send the request again later", **{"retry-after": "1"})

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        found = error.errors()
        if found[0]["loc"] == ("body",):  # the whole: curl -d sends a form unless it is given another type
            kind = request.headers.get("content-type", "")
            return answer(422, f"Content-Type {kind!r}: expected application/json with an object")
        return answer(422, first_message(found))

    @app.exception_handler(HTTPException)
    async def known(_: Request, error: HTTPException) -> JSONResponse:
        return answer(error.status_code, str(error.detail), **(error.headers or {}))

    @app.exception_handler(ClientDisconnect)
    async def gone(_: Request, __: ClientDisconnect) -> Response:
        return Response(status_code=400)  # which nobody receives

    @app.exception_handler(Exception)
    async def defect(_: Request, __: Exception) -> JSONResponse:  # uvicorn logs it
        return answer(500, "internal error; the server's log has the details")


def _add_pages(app: FastAPI) -> None:
    """Add the page, the documentation of the interface, the health check and the metrics."""
    app.mount("/page", StaticFiles(directory=str(PAGE)), name="page")
    app.mount("/swagger", StaticFiles(directory=str(SWAGGER)), name="swagger")

    @app.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(str(PAGE / "index.html"))

    @app.get("/docs", include_in_schema=False)
    async def documentation() -> FileResponse:
        return FileResponse(str(PAGE / "docs.html"))

    @app.get("/healthz")
    async def health() -> dict[str, str]:
        """Return whether the server answers."""
        return {"status": "ok"}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics(server: Server) -> PlainTextResponse:
        """Return counts and times as Prometheus reads them."""
        return PlainTextResponse(generate_latest(server.registry))


LINES = 8  # more of them hide the images
SIDE = 320  # pixels of a picture


def explained(service: Service, images: Dataset) -> dict[str, Any]:
    """Return the pictures of two images as the model sees them, what their patches contribute, and the best pairs.

    Returns:
        ``similarity`` and ``score``; ``grid``, rows and columns of patches; ``images``, two JPEGs in base64; ``heat``,
        per image by how much the score falls without each patch, row by row; ``pairs``, each with the positions ``a``
        and ``b`` of two patches and their ``contribution``, the largest first.

    Raises:
        UserError: the features of the model have no parts, or a file cannot be read.
    """
    trained = service.embedder.trained
    if trained.fusion is not None:
        raise UserError("two models embed these images; an explanation needs one: create the gallery with one model")
    with torch.inference_mode(False), torch.enable_grad():
        seen = explain_images(trained, images, None if service.run is None else RunFolder(service.run))
    found = seen.explanation
    columns = found.grid[1]
    return {
        "similarity": found.similarity,
        "score": found.score,
        "grid": list(found.grid),
        "images": [base64.b64encode(ImageSamples().picture(one, SIDE)).decode() for one in seen.images],
        "heat": found.falls,
        "pairs": [
            {
                "a": pair.a.row * columns + pair.a.column,
                "b": pair.b.row * columns + pair.b.column,
                "contribution": pair.contribution,
            }
            for pair in found.strongest(LINES)
        ],
    }
