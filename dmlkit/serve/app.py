"""The HTTP interface: what each address takes and returns."""

import asyncio
import base64
import os
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Annotated, Any, NamedTuple, get_origin
from urllib.parse import unquote_to_bytes

import torch
from fastapi import APIRouter, Depends, FastAPI, Query, Request
from fastapi import Path as InPath
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse, Response
from fastapi.security import HTTPBearer
from fastapi.staticfiles import StaticFiles
from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest
from prometheus_client import Counter as Count
from prometheus_client.multiprocess import MultiProcessCollector
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from torch import Tensor

from dmlkit import __version__
from dmlkit.datasets.files.dataset import Dataset
from dmlkit.datasets.files.image import thumbnail
from dmlkit.datasets.files.samples import ImageSamples
from dmlkit.distributed.device_name import count_cores
from dmlkit.errors import UserError, counted
from dmlkit.files.escape import excerpt, printable
from dmlkit.files.image_file import BadImageError
from dmlkit.files.pictures import JOINED
from dmlkit.gallery.change import remove_images, restore_version
from dmlkit.gallery.files import GallerySummary
from dmlkit.identify.why import explain_images
from dmlkit.run_folder.folder import RunFolder
from dmlkit.serve.access import Access
from dmlkit.serve.requests import BODY, MOST_LABEL, Guard, first_message, read_files
from dmlkit.serve.reviewing import AnswerRequest, QuestionRequest, ServedReview
from dmlkit.serve.service import Pixels, Service, Snapshot
from dmlkit.vectors.embedder import GivenImages

METRICS = "PROMETHEUS_MULTIPROC_DIR"
"""Variable of prometheus-client: folder in which the processes of a server keep their counts, to be summed."""
MOST_NEIGHBORS = 1000
MOST_NAMES = 1000  # of labels, and of ids, to remove: 2 ms each
BEARER = HTTPBearer(auto_error=False, description="The token of DMLKIT_TOKEN.")
"""Says in the OpenAPI document that addresses need a token, so that /docs asks for it; `Guard` checks it."""
SIDE = 320  # pixels of an explained image
PAGE = files("dmlkit.serve") / "page"
SWAGGER = files("fastapi_offline") / "static"


class Problem(BaseModel):
    """What is wrong with a request."""

    error: str


class Named(BaseModel, extra="forbid"):
    """Images of the gallery."""

    labels: Annotated[list[str], Field(max_length=MOST_NAMES)] = []
    ids: Annotated[list[str], Field(max_length=MOST_NAMES)] = []


class WantedVersion(BaseModel, extra="forbid"):
    """A version of the gallery."""

    version: Annotated[int, Field(ge=1, le=2**53)]


class SentImage(NamedTuple):
    """Image of a request."""

    name: str
    content: bytes
    pixels: Pixels


class Served:
    """What requests are answered with."""

    def __init__(self, service: Service, access: Access) -> None:
        self.service, self.access = service, access
        self.review = access.review and ServedReview(access.review, service)
        self.changing, self.decoding = asyncio.Lock(), asyncio.Semaphore(count_cores())
        self.registry = CollectorRegistry()
        registry = self.registry
        if METRICS in os.environ:  # of all processes, also of those that have ended
            MultiProcessCollector(self.registry)
            registry = None
        self.seconds = Histogram("dmlkit_request_seconds", "Time of answers.", registry=registry)
        self.embedded = Count("dmlkit_images", "Images that were embedded.", registry=registry)
        self.size = Gauge(
            "dmlkit_gallery_images", "Images that are searched.", registry=registry, multiprocess_mode="mostrecent"
        )

    async def answered(self, pictures: Sequence[SentImage], work: Callable[[Tensor], Any]) -> Any:
        """Wait for the model's thread to embed pictures and work on their points."""
        with self.seconds.time():
            result = await asyncio.wrap_future(self.service.submit([picture.pixels for picture in pictures], work))
        self.embedded.inc(len(pictures))
        return result

    async def current(self) -> Snapshot:
        """Return the newest version of the points that are served."""
        return await self.answered([], lambda _: self.service.snapshot)

    async def with_ids(self, *names: str) -> Snapshot:
        """Return points that have some ids; the newest version if those at hand lack one, see `Service`."""
        snapshot = self.service.snapshot
        return snapshot if snapshot.rows.keys() >= {*names} else await self.current()

    async def decoded(self, work: Callable[[], Any]) -> Any:
        """Decode images on a thread, no more of which run than there are processors: each takes memory."""
        async with self.decoding:
            return await asyncio.to_thread(work)

    async def change(self, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Change the gallery on a thread of its own, one change after the other; requests are answered meanwhile."""
        with self.seconds.time():
            async with self.changing:
                await asyncio.wrap_future(self.service.submit([], lambda _: None))  # unless it has another model now
                return await asyncio.to_thread(lambda: {**work(), "version": self.service.reopen()})


def served(request: Request) -> Served:
    """Return what a request is answered with."""
    return request.app.state.served


def writer(request: Request) -> Served:
    """Return what a request changes."""
    current = served(request)
    if not current.access.allow_writes:
        raise HTTPException(403, "this server changes nothing; start it with --allow-writes")
    return current


async def pictures_of(request: Request) -> AsyncGenerator[list[SentImage]]:
    """Yield the images of a request, which count as waiting until it is answered."""
    current = served(request)
    service, files = current.service, await read_files(request, current.access.root)
    with service.held(len(files), await asyncio.to_thread(service.count_pixels, files)):
        yield await current.decoded(lambda: [SentImage(*file, service.decode(*file)) for file in files])


def review_of(request: Request) -> ServedReview:
    """Return the review that is served."""
    review = served(request).review
    if review is None:
        raise HTTPException(404, "this server has no review; start it with --review FOLDER")
    return review


def refuse_unknown(request: Request) -> None:
    """Refuse a parameter that is not UTF-8, or that an address does not take, or takes once: it would be ignored."""
    try:
        unquote_to_bytes(request.scope["query_string"]).decode()
    except UnicodeDecodeError:  # which Starlette would read with a replacement character
        raise HTTPException(422, "query: expected UTF-8, percent-encoded") from None
    known = {field.alias: field for field in request.scope["route"].dependant.query_params}
    if unknown := sorted(request.query_params.keys() - known.keys()):
        expected = f"expected {', '.join(sorted(known))}" if known else "this address takes none"
        raise HTTPException(422, f"query.{excerpt(unknown[0])}: no such parameter; {expected}")
    for name, count in Counter(name for name, _ in request.query_params.multi_items()).items():
        if count > 1 and get_origin(known[name].field_info.annotation) is not list:
            raise HTTPException(422, f"query.{name}: got {count} values, expected one")


Server = Annotated[Served, Depends(served)]
Writer = Annotated[Served, Depends(writer)]
SentImages = Annotated[list[SentImage], Depends(pictures_of, scope="function")]
Reviewed = Annotated[ServedReview, Depends(review_of)]
PROBLEMS: dict[int | str, dict[str, Any]] = {
    status: {"model": Problem}
    for status in (400, 401, 403, 404, 405, 409, 413, 415, 422, 500, 503)  # each with its usual meaning
}
OPTIONAL_BODY = {"requestBody": {**BODY["requestBody"], "required": False}}
api = APIRouter(prefix="/v1", responses=PROBLEMS, dependencies=[Depends(refuse_unknown)])


@api.get("/info")
async def info(server: Server) -> dict[str, Any]:
    """Return what is served."""
    snapshot, service = await server.current(), server.service
    points = snapshot.points
    return {
        "kind": service.kind,
        "source": str(service.source),
        "run": service.run and str(service.run),
        "images": len(points),
        "labels": len({*points.labels} - {None}),
        "dim": snapshot.manifest.dim,
        "similarity": points.manifold.similarity_name,
        "weights": snapshot.manifest.model.fingerprint,
        "version": snapshot.version,
        "recall": snapshot.recall,
        "writes": server.access.allow_writes,
        "review": server.review is not None,
    }


@api.post("/embed", openapi_extra=BODY)
async def embed(server: Server, pictures: SentImages) -> dict[str, Any]:
    """Return one embedding per image."""
    points = await server.answered(pictures, Tensor.tolist)
    return {"embeddings": points, "names": [picture.name for picture in pictures]}


@api.post("/search", openapi_extra=BODY)
async def search(
    server: Server, pictures: SentImages, k: Annotated[int, Query(ge=1, le=MOST_NEIGHBORS)] = 10
) -> dict[str, Any]:
    """Return the k nearest images of each image."""
    neighbors = await server.answered(pictures, lambda points: server.service.search(points, k))
    pairs = zip(pictures, neighbors, strict=True)
    return {"queries": [{"name": picture.name, "nearest": nearest} for picture, nearest in pairs]}


@api.post("/identify", openapi_extra=BODY)
async def identify(server: Server, pictures: SentImages) -> dict[str, Any]:
    """Return the label of each image, or ``unknown``."""
    answers = await server.answered(pictures, server.service.identify)
    return {"answers": [{"name": picture.name, **answer} for picture, answer in zip(pictures, answers, strict=True)]}


@api.post("/verify", openapi_extra=BODY)
async def verify(server: Server, pictures: SentImages) -> dict[str, Any]:
    """Return the similarity of two images, and whether they show the same class."""
    if len(pictures) != 2:
        raise HTTPException(422, f"got {counted(len(pictures), 'image')}, expected 2 to compare")
    return await server.answered(pictures, server.service.verify)


async def some_pictures(request: Request) -> AsyncGenerator[list[SentImage]]:
    """Yield the images of a request; none for a request without a body."""
    if not request.headers.get("content-type"):
        yield []
        return
    async with asynccontextmanager(pictures_of)(request) as pictures:
        yield pictures


@api.post("/why", openapi_extra=OPTIONAL_BODY)
async def why(
    server: Server,
    request: Request,
    pictures: Annotated[list[SentImage], Depends(some_pictures, scope="function")],
    id: Annotated[list[Annotated[str, Field(max_length=64)]], Query(max_length=2)] = [],  # noqa: A002, B006
    row: Annotated[int | None, Query(ge=0, le=2**53)] = None,
) -> dict[str, Any]:
    """Return which patches make two images similar: sent ones, ones of the source, or a row of the review."""
    images: list[Any] = [picture.pixels for picture in pictures]
    if row is not None:
        images.append(review_of(request).path(row))
    snapshot, positions = await server.with_ids(*id), list[int]()
    for name in id:
        position = snapshot.rows.get(name)
        if position is None:
            raise HTTPException(404, f"{excerpt(name)}: there is no picture with this id")
        positions.append(position)
    if len(images) + len(positions) != 2:
        raise HTTPException(422, f"got {counted(len(images) + len(positions), 'image')}, expected 2 to compare")

    def work(_: Tensor) -> dict[str, Any]:
        stored = [snapshot.image(row) for row in positions]
        boxes = [*[None] * len(images), *(box for _, box in stored)]
        return explained(server.service, GivenImages([*images, *(image for image, _ in stored)], boxes))

    return await server.answered([], work)


@api.get("/gallery/labels")
async def labels(server: Server) -> dict[str, Any]:
    """Return the number of images of each label; the empty label counts images without one."""
    points = (await server.current()).points
    return {"labels": dict(sorted(Counter(label or "" for label in points.labels).items()))}


@api.get("/gallery/images")
async def images_of_label(
    server: Server,
    label: str,
    offset: Annotated[int, Query(ge=0, le=2**53)] = 0,
    count: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> dict[str, Any]:
    """Return the images of a label."""
    points = (await server.current()).points
    rows = [row for row, name in enumerate(points.labels) if (name or "") == label][offset : offset + count]
    return {"images": [{"id": str(points.ids[row]), "path": points.paths[row]} for row in rows]}


@api.get("/images/{id}", response_class=Response, responses={200: {"content": {"image/jpeg": {}}}})
async def picture_of(server: Server, id: Annotated[str, InPath(max_length=64)]) -> Response:  # noqa: A002
    """Return a small picture of an image of the source."""
    snapshot = await server.with_ids(id)
    row = snapshot.rows.get(id)
    picture = None if row is None else await server.decoded(lambda: snapshot.picture(row))
    if picture is None:
        raise HTTPException(404, f"{excerpt(id)}: there is no picture with this id")
    return Response(picture, media_type="image/jpeg")


@api.post("/gallery/add", openapi_extra=BODY)
async def add(
    server: Writer, pictures: SentImages, label: Annotated[str, Query(min_length=1, max_length=MOST_LABEL)]
) -> dict[str, Any]:
    """Add images to the gallery."""
    files = [(picture.name, picture.content) for picture in pictures]
    return await server.answered([], lambda _: server.service.add(files, label))


@api.post("/gallery/remove")
async def remove(server: Writer, named: Named) -> dict[str, Any]:
    """Remove images from the gallery, by their labels or ids."""
    source = server.service.source
    return await server.change(lambda: {"removed": remove_images(source, labels=named.labels, images=named.ids)})


@api.get("/gallery/versions")
async def versions(server: Server) -> dict[str, Any]:
    """Return the versions of the gallery, the oldest first."""
    return {
        "versions": [
            {"version": version.number, "time": version.time.astimezone().isoformat(), "images": version.images}
            for version in (await asyncio.to_thread(GallerySummary.of, server.service.source)).versions
        ]
    }


@api.post("/gallery/restore")
async def restore(server: Writer, wanted: WantedVersion) -> dict[str, Any]:
    """Make an old version of the gallery the newest one."""
    source, model = server.service.source, server.service.snapshot.manifest.model
    return await server.change(lambda: {"images": restore_version(source, wanted.version, model=model)})


@api.post("/review/add")
async def add_reviewed(server: Writer, review: Reviewed) -> dict[str, Any]:
    """Add the images of the review with their labels to the gallery, as a new version."""
    return await server.change(lambda: server.service.add_listed(review.to_add()))


@api.get("/review")
async def review_status(review: Reviewed) -> dict[str, Any]:
    """Return how many labels may be wrong, and what is missing."""
    return await asyncio.to_thread(review.status)


@api.post("/review/question")
async def question(_: Writer, review: Reviewed, wanted: QuestionRequest) -> dict[str, Any]:
    """Return the next question for a reviewer; it is written down before it is shown."""
    return await asyncio.to_thread(review.question, wanted)


@api.post("/review/answer")
async def keep_answer(_: Writer, review: Reviewed, said: AnswerRequest) -> dict[str, Any]:
    """Keep an answer, and reply when the disk has it."""
    return await asyncio.to_thread(review.answer, said)


@api.get("/review/images/{row}", response_class=Response, responses={200: {"content": {"image/jpeg": {}}}})
async def picture(
    server: Server,
    review: Reviewed,
    row: Annotated[int, InPath(ge=0, le=2**53)],
    side: Annotated[int, Query(ge=16, le=640)] = 160,
) -> Response:
    """Return a picture of an image of the review, at most ``side`` pixels wide and high."""
    path = review.path(row)
    return Response(await server.decoded(lambda: thumbnail(path, side=side)), media_type="image/jpeg")


def make_app(service: Service, access: Access) -> FastAPI:
    """Return the application that answers requests on a service, and the page, its documentation and its metrics.

    Every error is answered with a status and ``{"error": MESSAGE}``, and never with a traceback.
    """
    app = FastAPI(title="dmlkit", version=__version__, docs_url=None, redoc_url=None)
    app.state.served = Served(service, access)
    app.include_router(api, dependencies=[] if access.token is None else [Depends(BEARER)])
    app.add_middleware(Guard, access=access)
    app.mount("/page", StaticFiles(directory=str(PAGE)), name="page")
    app.mount("/swagger", StaticFiles(directory=str(SWAGGER)), name="swagger")

    def answer(status: int, message: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
        return JSONResponse({"error": printable(message)}, status, headers)

    def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        if error.errors()[0]["loc"] == ("body",):  # the whole: curl -d sends a form unless it is given another type
            kind = request.headers.get("content-type", "")
            return answer(422, f"Content-Type {kind!r}: expected application/json with an object")
        return answer(422, first_message(error.errors()))

    handlers: dict[type[Exception], Callable[[Request, Any], Response]] = {
        HTTPException: lambda _, error: answer(error.status_code, str(error.detail), error.headers),
        RequestValidationError: invalid,
        BadImageError: lambda _, error: answer(422, str(error)),
        UserError: lambda _, error: answer(409, str(error)),
        ClientDisconnect: lambda _, __: Response(status_code=400),  # which nobody receives
        Exception: lambda _, __: answer(500, "internal error; the server's log has the details"),  # uvicorn logs it
    }
    for kind, handler in handlers.items():
        app.add_exception_handler(kind, handler)

    @app.get("/", include_in_schema=False)
    @app.get("/docs", include_in_schema=False)
    async def page(request: Request) -> FileResponse:
        return FileResponse(str(PAGE / ("index.html" if request.url.path == "/" else "docs.html")))

    @app.get("/healthz")
    async def health() -> dict[str, str]:
        """Return whether the server answers."""
        return {"status": "ok"}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics(server: Server) -> PlainTextResponse:
        """Return counts and times as Prometheus reads them."""
        server.size.set(len(server.service.snapshot.points))
        return PlainTextResponse(generate_latest(server.registry))

    return app


def explained(service: Service, images: Dataset) -> dict[str, Any]:
    """Explain the similarity of two images to the model of a server.

    ``grid``: rows and columns of patches; ``images``: as the model sees them; ``heat``: per image by how much the score
    falls without each patch, row by row; ``pairs``: those that contribute most.
    """
    trained = service.embedder.trained
    if trained.fusion is not None:
        raise UserError("two models embed these images; an explanation needs one: create the gallery with one model")
    with torch.inference_mode(False), torch.enable_grad():
        explanation, seen = explain_images(trained, images, None if service.run is None else RunFolder(service.run))
    return {
        "similarity": explanation.similarity,
        "score": explanation.score,
        "grid": list(explanation.grid),
        "images": [base64.b64encode(ImageSamples().picture(image, SIDE)).decode() for image in seen],
        "heat": explanation.falls,
        "pairs": [{"a": a, "b": b, "contribution": value} for a, b, value in explanation.strongest(JOINED)],
    }
