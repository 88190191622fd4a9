"""Preparation of images inside an exported model: to the squares of uint8 that the network takes."""

from typing import Any

import torch
from torch import Tensor, nn

from dmlkit.export.wanted import FLOATS, ModelInput
from dmlkit.transforms.base import Resizing, TransformConfig
from dmlkit.vectors.graphs import traced

OPSET = 18  # ScatterElements with reduction


class FromImages(nn.Module):
    """Model with its preparation: RGB images (B, H, W, 3) uint8 of one size, which may be any, to points (B, D).

    torch resizes, as in the loader; so the pixels are equal to the bit.
    """

    kept: Tensor

    def __init__(self, model: nn.Module, transform: TransformConfig) -> None:
        super().__init__()
        self.model, self.size, self.resizing = model, transform.size, transform.resizing
        self.register_buffer("kept", torch.arange(self.size), persistent=False)  # goes to the device with the model

    def forward(self, images: Tensor) -> Tensor:
        """Resize, cut the center, and embed."""
        planes, side = images.permute(0, 3, 1, 2), self.resizing.side
        height = width = side
        if not self.resizing.square:
            shorter: Any = torch.sym_min(*planes.shape[2:])  # an int, or a symbol while it is traced
            height, width = (side * length // shorter for length in planes.shape[2:])
        resized = nn.functional.interpolate(planes, (height, width), mode=self.resizing.interpolation, antialias=True)
        for dim, length in ((2, height), (3, width)):
            half, odd = (length - self.size) // 2, (length - self.size) % 2
            first = half + odd * (half % 2)  # torchvision's round((length - size) / 2), which rounds halves to even
            # narrow would fix, as a guard, whether it cuts anything off the example
            resized = resized.index_select(dim, self.kept + first)
        return self.model(resized)


def images_program(model: nn.Module, transform: TransformConfig) -> torch.export.ExportedProgram:
    """Return a program of torch that takes images (B, H, W, 3) uint8 of any size, see `traced`."""
    example = torch.zeros(2, transform.size + 3, transform.size + 1, 3, dtype=torch.uint8)
    return traced(FromImages(model, transform), example, "batch", "height", "width")


def as_floats(squares: Tensor, takes: ModelInput) -> Tensor:
    """Return squares (B, 3, S, S) uint8 as float32, normalized by the statistics of `FLOATS`."""
    mean, std = (torch.tensor(colors).view(3, 1, 1) for colors in FLOATS[takes])
    return (squares / 255 - mean) / std


def prepend_preparation(program: Any, transform: TransformConfig, takes: ModelInput) -> None:
    """Change an ONNX program of squares (B, 3, S, S) uint8 into one of other images.

    They are images (B, H, W, 3) uint8 of any size, or squares in float32, see `as_floats`. Since the program's first
    step makes float32 of bytes, it gets the pixels of the latter in 0..255 without rounding: bytes inside a graph are
    more than some engines have.

    ONNX's own Resize rounds other pixels than torch: up to 2.5 % of them by 1 of 255, which changes coordinates of
    EfficientNet-Lite0's embeddings by up to 0.004. Here the resizing is two products of integers that equal torch's.
    """
    import onnx
    from onnxscript import ir

    size = transform.size
    text = _scaling(size, takes) if takes in FLOATS else _program(size, transform.resizing)
    preparation = ir.from_proto(onnx.parser.parse_model(text))
    images, squares = preparation.graph.inputs.pop(), preparation.graph.outputs.pop()
    nodes, graph = list(preparation.graph), program.graph
    preparation.graph.remove(nodes)
    if takes in FLOATS:  # a reordering of colors before the first step has a result of the same type
        for value in [output for node in graph for output in node.outputs if output.dtype == ir.DataType.UINT8]:
            value.type = value.shape = None
    ir.convenience.replace_all_uses_with([graph.inputs[0]], [squares])
    graph.insert_before(graph[0], nodes)
    graph.inputs[0] = images


def _scaling(size: int, takes: ModelInput) -> str:
    """Return the program that undoes `as_floats`, without rounding."""
    mean, std = (", ".join(f"{255 * value:.9g}" for value in colors) for colors in FLOATS[takes])
    shape = f"[batch, 3, {size}, {size}]"
    return f"""<ir_version: 9, opset_import: ["" : {OPSET}]>
scaling (float{shape} images) => (float{shape} squares) {{
    p_mean = Constant<value = float[3, 1, 1] {{{mean}}}>()
    p_std = Constant<value = float[3, 1, 1] {{{std}}}>()
    p_scaled = Mul(images, p_std)
    squares = Add(p_scaled, p_mean)
}}"""


class Lines:
    """Lines of an ONNX program as text. Each call adds one, unless it is there, and returns the name of its result."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}  # by what is computed

    def __call__(self, operator: str, *inputs: str, **attributes: object) -> str:
        values = ", ".join(f"{name} = {value}" for name, value in attributes.items())
        text = f"{operator}{values and f'<{values}>'}({', '.join(inputs)})"
        return self.names.setdefault(text, f"p_{len(self.names)}")

    def constant(self, kind: str, *values: float) -> str:
        """Return the name of a constant; ``kind`` is its type, e.g. ``int64``, or ``int64[2]`` for a vector."""
        return self("Constant", value=f"{kind} {{{', '.join(map(str, values))}}}")

    def __str__(self) -> str:
        return "\n".join(f"    {name} = {text}" for text, name in self.names.items())


def _program(size: int, resizing: Resizing) -> str:
    """Return the preparation as text of an ONNX program; columns first, as torch and Pillow do."""
    p = Lines()
    shape = p("Shape", "images")
    height, width = (p("Gather", shape, p.constant("int64", axis)) for axis in (1, 2))
    shorter = p("Min", height, width)
    (top, bottom, *rows), (left, right, *columns) = (
        _weights(p, length, shorter, size, resizing) for length in (height, width)
    )
    first, end = p("Concat", top, left, axis=0), p("Concat", bottom, right, axis=0)
    cut = p("Slice", "images", first, end, p.constant("int64[2]", 1, 2))
    planes, no_shift, shift = p("Transpose", cut, perm="[0, 3, 1, 2]"), p.constant("uint8", 0), p.constant("uint8", 128)
    high, low = (p("Transpose", weights, perm="[1, 0]") for weights in columns[:2])
    sums = p("MatMulInteger", planes, high, no_shift, shift), p("MatMulInteger", planes, low)
    narrow = _rounded(p, *sums, columns[2])
    sums = p("MatMulInteger", rows[0], narrow, shift), p("MatMulInteger", rows[1], narrow)
    squares = _rounded(p, *sums, rows[2])
    return f"""<ir_version: 9, opset_import: ["" : {OPSET}]>
preparation (uint8[batch, height, width, 3] images) => (uint8[batch, 3, {size}, {size}] squares) {{
{p}
    squares = Identity({squares})
}}"""


BYTE, INTEGER, WHOLE, DOUBLE = 2, 6, 7, 11  # uint8, int32, int64 and float64 in ONNX


def _weights(p: Lines, length: str, shorter: str, size: int, resizing: Resizing) -> tuple[str, str, str, str, str]:
    """Compute the weights (S, room) of one axis, of the pixels that the square depends on.

    The weights of new pixel x are those of the resizing, as integers w 2^p. p is the largest precision with which
    all fit into 16 bits, so that they and their sums equal torch's. They are split into bytes, w = 256 (high - 128)
    + low, because onnxruntime multiplies bytes exactly, and faster than floats.

    Returns:
        The first pixel and the end of these pixels; ``high`` and ``low``; and 2^p.
    """
    zero, one, two = (p.constant("int64", value) for value in (0, 1, 2))
    zeros, ones, sizes = (p.constant("int64[1]", value) for value in (0, 1, size))
    none, half, unit, twice = (p.constant("double", value) for value in (0.0, 0.5, 1.0, 2.0))
    is_cubic, resized = resizing.interpolation == "bicubic", p.constant("int64", resizing.side)
    if not resizing.square:
        resized = p("Div", p("Mul", resized, length), shorter)
    free = p("Sub", resized, p.constant("int64", size))
    half_free = p("Div", free, two)
    first = p("Add", half_free, p("Mul", p("Mod", free, two), p("Mod", half_free, two)))
    scale = p("Div", p("Cast", length, to=DOUBLE), p("Cast", resized, to=DOUBLE))
    stretch = p("Max", scale, unit)
    reach = p("Mul", stretch, twice if is_cubic else unit)
    new = p("Cast", p("Range", zero, resized, one), to=DOUBLE)
    center = p("Unsqueeze", p("Mul", p("Add", new, half), scale), ones)
    start = p("Max", p("Cast", p("Add", p("Sub", center, reach), half), to=WHOLE), zero)
    kernel_size = p("Add", p("Mul", p("Cast", p("Ceil", reach), to=WHOLE), two), one)
    pixel = p("Add", start, p("Range", zero, kernel_size, one))
    offset = p("Add", p("Sub", p("Cast", pixel, to=DOUBLE), center), half)
    distance = p("Abs", p("Mul", offset, p("Div", unit, stretch)))
    curve = _keys(p, distance) if is_cubic else p("Max", p("Sub", unit, distance), none)
    part = p("Where", p("Less", pixel, length), curve, none)
    weight = p("Div", part, p("ReduceSum", part, ones))
    powers = p("Pow", twice, p.constant("double[22]", *map(float, range(1, 23))))
    largest = p("Floor", p("Add", p("Mul", p("ReduceMax", weight, keepdims=0), powers), half))
    fits = p("Cast", p("Less", largest, p.constant("double", 32768.0)), to=DOUBLE)
    power = p("Pow", twice, p("ReduceSum", fits, keepdims=0))
    rounding = p("Where", p("Less", weight, none), p.constant("double", -0.5), half)
    fixed = p("Cast", p("Add", p("Mul", weight, power), rounding), to=INTEGER)
    begin = p("Unsqueeze", first, zeros)
    integers, positions = (p("Slice", whole, begin, p("Add", begin, sizes), zeros) for whole in (fixed, pixel))
    begin = p("Unsqueeze", p("ReduceMin", positions, keepdims=0), zeros)
    end = p("Min", p("Add", p("ReduceMax", positions, keepdims=0), ones), p("Unsqueeze", length, zeros))
    room = p("Sub", end, begin)
    empty = p("ConstantOfShape", p("Concat", sizes, room, axis=0), value="int32[1] {0}")
    positions = p("Min", p("Sub", positions, begin), p("Sub", room, ones))
    matrix = p("ScatterElements", empty, positions, integers, axis=1, reduction='"add"')
    positive, byte = p("Add", matrix, p.constant("int32", 32768)), p.constant("int32", 256)
    high, low = (p("Cast", p(operator, positive, byte), to=BYTE) for operator in ("Div", "Mod"))
    return begin, end, high, low, power


def _keys(p: Lines, distance: str) -> str:
    """Compute the cubic curve of Keys with a = -0.5 at distances."""
    two = p.constant("double", 2.0)
    near = p("Sub", p("Mul", p.constant("double", 1.5), distance), p.constant("double", 2.5))
    near = p("Add", p("Mul", near, p("Mul", distance, distance)), p.constant("double", 1.0))
    far = p("Add", p("Mul", p.constant("double", -0.5), distance), p.constant("double", 2.5))
    far = p("Add", p("Mul", p("Sub", p("Mul", far, distance), p.constant("double", 4.0)), distance), two)
    far = p("Where", p("Less", distance, two), far, p.constant("double", 0.0))
    return p("Where", p("Less", distance, p.constant("double", 1.0)), near, far)


def _rounded(p: Lines, high: str, low: str, power: str) -> str:
    """Add the products of the bytes of the weights, and round to pixels 0..255."""
    total, unit = p("Add", p("Mul", high, p.constant("int32", 256)), low), p("Cast", power, to=INTEGER)
    added = p("Add", total, p("Div", unit, p.constant("int32", 2)))
    pixels = p("Div", p("Max", added, p.constant("int32", 0)), unit)
    return p("Cast", p("Min", pixels, p.constant("int32", 255)), to=BYTE)
