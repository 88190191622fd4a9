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
            # narrow would fix, as a guard, whether it cuts anything off the example
            resized = resized.index_select(dim, self.kept + self._first(length))
        return self.model(resized)

    def _first(self, length: Any) -> Any:
        half, odd = (length - self.size) // 2, (length - self.size) % 2
        return half + odd * (half % 2)  # torchvision's round((length - size) / 2), which rounds halves to even


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


def _program(size: int, resizing: Resizing) -> str:
    """Return the preparation as text of an ONNX program; columns first, as torch and Pillow do."""
    return f"""<ir_version: 9, opset_import: ["" : {OPSET}]>
preparation (uint8[batch, height, width, 3] images) => (uint8[batch, 3, {size}, {size}] squares) {{
    p_shape = Shape(images)
    p_zero = Constant<value = int64 {{0}}>()
    p_zeros = Constant<value = int64[1] {{0}}>()
    p_one = Constant<value = int64 {{1}}>()
    p_ones = Constant<value = int64[1] {{1}}>()
    p_two = Constant<value = int64 {{2}}>()
    p_size = Constant<value = int64 {{{size}}}>()
    p_sizes = Constant<value = int64[1] {{{size}}}>()
    p_side = Constant<value = int64 {{{resizing.side}}}>()
    p_none = Constant<value = double {{0.0}}>()
    p_half = Constant<value = double {{0.5}}>()
    p_minus_half = Constant<value = double {{-0.5}}>()
    p_unit = Constant<value = double {{1.0}}>()
    p_twice = Constant<value = double {{2.0}}>()
    p_exponents = Constant<value = double[22] {{{", ".join(f"{n}.0" for n in range(1, 23))}}}>()
    p_powers = Pow(p_twice, p_exponents)
    p_black = Constant<value = int32 {{0}}>()
    p_white = Constant<value = int32 {{255}}>()
    p_byte = Constant<value = int32 {{256}}>()
    p_limit = Constant<value = double {{32768.0}}>()
    p_middle = Constant<value = int32 {{32768}}>()
    p_no_shift = Constant<value = uint8 {{0}}>()
    p_shift = Constant<value = uint8 {{128}}>()
    p_height = Gather(p_shape, p_one)
    p_width = Gather(p_shape, p_two)
    p_shorter = Min(p_height, p_width)
{_weights("rows", "p_height", resizing)}
{_weights("columns", "p_width", resizing)}
    p_first = Concat<axis = 0>(rows_begin, columns_begin)
    p_end = Concat<axis = 0>(rows_end, columns_end)
    p_axes = Constant<value = int64[2] {{1, 2}}>()
    p_cut = Slice(images, p_first, p_end, p_axes)
    p_planes = Transpose<perm = [0, 3, 1, 2]>(p_cut)
    columns_high_t = Transpose<perm = [1, 0]>(columns_high)
    columns_low_t = Transpose<perm = [1, 0]>(columns_low)
    columns_high_sum = MatMulInteger(p_planes, columns_high_t, p_no_shift, p_shift)
    columns_low_sum = MatMulInteger(p_planes, columns_low_t)
{_rounded("columns", "p_narrow")}
    rows_high_sum = MatMulInteger(rows_high, p_narrow, p_shift)
    rows_low_sum = MatMulInteger(rows_low, p_narrow)
{_rounded("rows", "squares")}
}}"""


def _weights(axis: str, length: str, resizing: Resizing) -> str:
    """Return the lines that compute the weights (S, room) of one axis, of the pixels that the square depends on.

    The weights of new pixel x are those of `resizing_matrix`, as integers w 2^p. p is the largest precision with which
    all fit into 16 bits, so that they and their sums equal torch's. They are split into bytes, w = 256 (high - 128)
    + low, because onnxruntime multiplies bytes exactly, and faster than floats.
    """
    cubic = resizing.interpolation == "bicubic"
    resized = "Identity(p_side)"
    if not resizing.square:
        resized = f"Div({axis}_scaled, p_shorter)"
    triangle = f"""\
    {axis}_falling = Sub(p_unit, {axis}_distance)
    {axis}_curve = Max({axis}_falling, p_none)"""
    keys = f"""\
    {axis}_a = Constant<value = double {{1.5}}>()
    {axis}_b = Constant<value = double {{2.5}}>()
    {axis}_c = Constant<value = double {{4.0}}>()
    {axis}_square = Mul({axis}_distance, {axis}_distance)
    {axis}_near_1 = Mul({axis}_a, {axis}_distance)
    {axis}_near_2 = Sub({axis}_near_1, {axis}_b)
    {axis}_near_3 = Mul({axis}_near_2, {axis}_square)
    {axis}_near = Add({axis}_near_3, p_unit)
    {axis}_far_1 = Mul(p_minus_half, {axis}_distance)
    {axis}_far_2 = Add({axis}_far_1, {axis}_b)
    {axis}_far_3 = Mul({axis}_far_2, {axis}_distance)
    {axis}_far_4 = Sub({axis}_far_3, {axis}_c)
    {axis}_far_5 = Mul({axis}_far_4, {axis}_distance)
    {axis}_far_6 = Add({axis}_far_5, p_twice)
    {axis}_is_near = Less({axis}_distance, p_unit)
    {axis}_is_far = Less({axis}_distance, p_twice)
    {axis}_far = Where({axis}_is_far, {axis}_far_6, p_none)
    {axis}_curve = Where({axis}_is_near, {axis}_near, {axis}_far)"""
    return f"""\
    {axis}_scaled = Mul(p_side, {length})
    {axis}_resized = {resized}
    {axis}_free = Sub({axis}_resized, p_size)
    {axis}_half_free = Div({axis}_free, p_two)
    {axis}_odd = Mod({axis}_free, p_two)
    {axis}_half_odd = Mod({axis}_half_free, p_two)
    {axis}_up = Mul({axis}_odd, {axis}_half_odd)
    {axis}_first = Add({axis}_half_free, {axis}_up)
    {axis}_n = Cast<to = 11>({length})
    {axis}_m = Cast<to = 11>({axis}_resized)
    {axis}_scale = Div({axis}_n, {axis}_m)
    {axis}_stretch = Max({axis}_scale, p_unit)
    {axis}_shrink = Div(p_unit, {axis}_stretch)
    {axis}_reach = Mul({axis}_stretch, {"p_twice" if cubic else "p_unit"})
    {axis}_new = Range(p_zero, {axis}_resized, p_one)
    {axis}_new_d = Cast<to = 11>({axis}_new)
    {axis}_new_middle = Add({axis}_new_d, p_half)
    {axis}_center_1 = Mul({axis}_new_middle, {axis}_scale)
    {axis}_center = Unsqueeze({axis}_center_1, p_ones)
    {axis}_start_1 = Sub({axis}_center, {axis}_reach)
    {axis}_start_2 = Add({axis}_start_1, p_half)
    {axis}_start_3 = Cast<to = 7>({axis}_start_2)
    {axis}_start = Max({axis}_start_3, p_zero)
    {axis}_reach_up = Ceil({axis}_reach)
    {axis}_reach_i = Cast<to = 7>({axis}_reach_up)
    {axis}_taps_1 = Mul({axis}_reach_i, p_two)
    {axis}_taps_2 = Add({axis}_taps_1, p_one)
    {axis}_taps = Range(p_zero, {axis}_taps_2, p_one)
    {axis}_pixel = Add({axis}_start, {axis}_taps)
    {axis}_pixel_d = Cast<to = 11>({axis}_pixel)
    {axis}_offset_1 = Sub({axis}_pixel_d, {axis}_center)
    {axis}_offset_2 = Add({axis}_offset_1, p_half)
    {axis}_offset = Mul({axis}_offset_2, {axis}_shrink)
    {axis}_distance = Abs({axis}_offset)
{keys if cubic else triangle}
    {axis}_inside = Less({axis}_pixel, {length})
    {axis}_part = Where({axis}_inside, {axis}_curve, p_none)
    {axis}_sum = ReduceSum({axis}_part, p_ones)
    {axis}_weight = Div({axis}_part, {axis}_sum)
    {axis}_largest = ReduceMax<keepdims = 0>({axis}_weight)
    {axis}_sizes = Mul({axis}_largest, p_powers)
    {axis}_sizes_up = Add({axis}_sizes, p_half)
    {axis}_sizes_i = Floor({axis}_sizes_up)
    {axis}_fits = Less({axis}_sizes_i, p_limit)
    {axis}_fits_d = Cast<to = 11>({axis}_fits)
    {axis}_precision = ReduceSum<keepdims = 0>({axis}_fits_d)
    {axis}_power = Pow(p_twice, {axis}_precision)
    {axis}_fixed_1 = Mul({axis}_weight, {axis}_power)
    {axis}_negative = Less({axis}_weight, p_none)
    {axis}_round = Where({axis}_negative, p_minus_half, p_half)
    {axis}_fixed_2 = Add({axis}_fixed_1, {axis}_round)
    {axis}_fixed = Cast<to = 6>({axis}_fixed_2)
    {axis}_first_s = Unsqueeze({axis}_first, p_zeros)
    {axis}_last_s = Add({axis}_first_s, p_sizes)
    {axis}_kept = Slice({axis}_fixed, {axis}_first_s, {axis}_last_s, p_zeros)
    {axis}_at = Slice({axis}_pixel, {axis}_first_s, {axis}_last_s, p_zeros)
    {axis}_length_s = Unsqueeze({length}, p_zeros)
    {axis}_begin_1 = ReduceMin<keepdims = 0>({axis}_at)
    {axis}_begin = Unsqueeze({axis}_begin_1, p_zeros)
    {axis}_end_1 = ReduceMax<keepdims = 0>({axis}_at)
    {axis}_end_2 = Add({axis}_end_1, p_ones)
    {axis}_end = Min({axis}_end_2, {axis}_length_s)
    {axis}_room = Sub({axis}_end, {axis}_begin)
    {axis}_shape = Concat<axis = 0>(p_sizes, {axis}_room)
    {axis}_empty = ConstantOfShape<value = int32[1] {{0}}>({axis}_shape)
    {axis}_last = Sub({axis}_room, p_ones)
    {axis}_at_1 = Sub({axis}_at, {axis}_begin)
    {axis}_at_2 = Min({axis}_at_1, {axis}_last)
    {axis}_matrix = ScatterElements<axis = 1, reduction = "add">({axis}_empty, {axis}_at_2, {axis}_kept)
    {axis}_positive = Add({axis}_matrix, p_middle)
    {axis}_high_i = Div({axis}_positive, p_byte)
    {axis}_low_i = Mod({axis}_positive, p_byte)
    {axis}_high = Cast<to = 2>({axis}_high_i)
    {axis}_low = Cast<to = 2>({axis}_low_i)"""


def _rounded(axis: str, result: str) -> str:
    """Return the lines that add the products of the bytes of the weights, and round to pixels 0..255."""
    return f"""\
    {axis}_shifted = Mul({axis}_high_sum, p_byte)
    {axis}_both = Add({axis}_shifted, {axis}_low_sum)
    {axis}_unit = Cast<to = 6>({axis}_power)
    {axis}_two = Cast<to = 6>(p_two)
    {axis}_half = Div({axis}_unit, {axis}_two)
    {axis}_added = Add({axis}_both, {axis}_half)
    {axis}_at_least = Max({axis}_added, p_black)
    {axis}_divided = Div({axis}_at_least, {axis}_unit)
    {axis}_bytes = Min({axis}_divided, p_white)
    {result} = Cast<to = 2>({axis}_bytes)"""
