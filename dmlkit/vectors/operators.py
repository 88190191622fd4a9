"""Networks as lists of PyTorch's operators, which compute the same to the bit without the library that built them.

The import of timm or torchvision takes 2 s of a processor, because torchvision imports PyTorch's compiler, which an
answer to one photo does not need. A file has the weights, and in its header the operators in their order. Nothing in
it is code: operators are PyTorch's own, and arguments are numbers, texts and names of results.
"""

import json
import operator
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from dmlkit.files.atomic import atomic_write
from dmlkit.vectors.graphs import NotExportableError, traced

HEADER = "operators"
CONSTANTS = torch.dtype, torch.layout, torch.memory_format
SIZES = {f.__name__: f for f in (operator.getitem, operator.add, operator.sub, operator.mul, operator.floordiv)}
"""Functions of Python that compute the shapes of results from the size of a batch."""


def write_operators(network: nn.Module, inputs: Tensor, path: Path) -> None:
    """Write a network in evaluation mode, as it computes a batch of inputs (B, ...); B may differ later."""
    program = traced(network, inputs)
    signature, tensors, steps = program.graph_signature, dict[str, Tensor](), list[Any]()
    named = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    named |= signature.inputs_to_lifted_tensor_constants
    known: Mapping[str, Any] = {**program.constants, **program.state_dict}
    nodes = list(program.graph.nodes)
    last = {used: node.name for node in nodes for used in (operand.name for operand in node.all_input_nodes)}
    input_name, output_name = "", ""
    for node in nodes:
        if node.op == "placeholder" and node.name in named:
            tensors[node.name] = known[named[node.name]].detach().clone(memory_format=torch.contiguous_format)
        elif node.op == "placeholder":
            input_name = node.name
        elif node.op == "output":
            output_name = node.args[0][0].name
        else:
            unused = [name for name, by in last.items() if by == node.name and name not in tensors]
            steps.append([node.name, _name_of(node), _plain(node.args), _plain(node.kwargs), unused])
    strides = {name: known[named[name]].stride() for name in tensors}
    content = json.dumps({"input": input_name, "output": output_name, "strides": strides, "steps": steps})
    with atomic_write(path) as partial:
        save_file(tensors, partial, {HEADER: content})


def read_operators(path: Path) -> Callable[[Tensor], Tensor]:
    """Return the function of a network that `write_operators` has written."""
    with safe_open(path, "pt") as file:
        content: Any = json.loads(file.metadata()[HEADER])
        tensors = {name: file.get_tensor(name) for name in content["strides"]}
    for name, tensor in tensors.items():  # by the layout of a weight PyTorch chooses how it computes a batch of one
        tensors[name] = torch.empty_strided(tensor.shape, content["strides"][name], dtype=tensor.dtype).copy_(tensor)
    steps = [(name, _operator(function), *rest) for name, function, *rest in content["steps"]]

    def compute(inputs: Tensor) -> Tensor:
        results = {**tensors, content["input"]: inputs}
        for name, function, args, kwargs, unused in steps:
            results[name] = function(*_meant(args, results), **_meant(kwargs, results))
            for no_longer_needed in unused:
                del results[no_longer_needed]
        return results[content["output"]]

    return compute


def _name_of(node: Any) -> str:
    name = getattr(node.target, "__name__", "") if node.target in SIZES.values() else str(node.target)
    try:
        if node.op == "call_function" and _operator(name) == node.target:
            return name
    except ValueError:
        pass
    raise NotExportableError(f"{name} is none of PyTorch's operators")


def _operator(name: str) -> Callable[..., Any]:
    """Return a function by its name, e.g. ``aten.relu.default``."""
    space, _, rest = name.partition(".")
    function, _, overload = rest.partition(".")
    if name in SIZES:
        return SIZES[name]
    if space != "aten" or function == "from_file" or not overload:
        raise ValueError(f"{name} is none of PyTorch's operators")
    return getattr(getattr(torch.ops.aten, function), overload)


def _plain(value: Any) -> Any:
    """Return an argument as JSON holds it."""
    if isinstance(value, torch.fx.Node):
        return {"result": value.name}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {"arguments": {name: _plain(item) for name, item in value.items()}}
    if isinstance(value, CONSTANTS):
        return {"constant": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise NotExportableError(f"an argument is a {type(value).__name__}")


def _meant(value: Any, results: Mapping[str, Any]) -> Any:
    """Return an argument from what `_plain` has made of it, given the results that it may name."""
    if isinstance(value, list):
        return [_meant(item, results) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    match kind:
        case "result":
            return results[content]
        case "arguments":
            return {name: _meant(item, results) for name, item in content.items()}
        case "device":
            return torch.device(content)
        case _:
            return getattr(torch, content)
