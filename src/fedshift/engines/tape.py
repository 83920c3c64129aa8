"""Tapes: the flat program of tensor operations that a function runs, recorded once per shape as a ``torch.fx`` graph.

``torch.vmap`` and autograd select operations in Python at every step, which takes longer than the operations of a small
network. A tape runs the same operations on the same values, so that results have the same bits, except for products
that are returned as factors. (``make_fx`` records alike, but loads torch's compiler: a second in every process.)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter, getitem
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

_aten = torch.ops.aten
SAME_MEMORY = {_aten.detach.default, _aten.alias.default}
"""Operations that return their argument."""
RESHAPES = {_aten.view.default, _aten._unsafe_view.default, _aten.expand.default, _aten.permute.default}
"""Operations that are no-ops if shape and strides stay the same."""
FOLDED = 2**12
"""Maximum number of values in a constant that a tape stores instead of recomputing it."""
WRITES = {_aten.native_batch_norm.default: (3, 4)}
"""Positions of arguments that an operation writes to without declaring so in its schema."""


class Untraceable(Exception):
    """A function reads values of its arguments in Python, so that it cannot be recorded."""


class Factors(NamedTuple):
    """Two batches of matrices, ``[K, O, B]`` and ``[K, B, I]``, that represent their product ``[K, O, I]``."""

    left: Tensor
    right: Tensor


class Tape:
    """The operations of ``function`` on ``inputs``, for inputs of the same structure, shapes, dtypes and strides.

    Args:
        function: Maps trees of tensors to a tuple of trees; other tensors that it reads become constants.
        inputs: Arguments for recording.
        factored: Whether tensors of the first result may be returned as :class:`Factors`.

    ``operations``: the names of the operations, in order.

    Raises:
        Untraceable: The function reads values of its arguments.

    """

    def __init__(
        self, function: Callable[..., tuple[Any, ...]], inputs: Sequence[Any], *, factored: bool = False
    ) -> None:
        with _Recorder(tree_leaves(inputs)) as recorder:
            results = function(*inputs)
        tensors, self._structure = tree_flatten(results)
        graph, values = recorder.graph, recorder.values
        output = graph.output([recorder.find(tensor) for tensor in tensors])
        _simplify(recorder, set(map(_find_memory, tensors)) | recorder.written)
        nodes, first = list(output.args[0]), len(tree_leaves(results[0])) if factored else 0
        with graph.inserting_before(output):
            nodes[:first] = [_factor(graph, values, node) for node in nodes[:first]]
        output.args = (nodes,)
        graph.eliminate_dead_code()
        self.operations = [str(node.target) for node in graph.nodes if node.op == "call_function"]
        constants = {str(node.target): values[node] for node in graph.nodes if node.op == "get_attr"}
        self._run = _compile(graph, constants)

    def __call__(self, *inputs: Any) -> Any:
        """Return the function's results, with tensors or :class:`Factors`."""
        return tree_unflatten(self._run(*tree_leaves(inputs)), self._structure)


def _compile(graph: Graph, constants: dict[str, Tensor]) -> Callable[..., Sequence[Any]]:
    """Return the graph's program, which calls the operators below ``torch.ops``, whose own call takes as long."""
    names: dict[str, str] = {}
    code = graph.python_code("self")
    source = re.sub(r"torch\.ops(\.\w+){3}", lambda path: names.setdefault(path[0], f"operator_{len(names)}"), code.src)
    operators = {name: attrgetter(path.removeprefix("torch."))(torch)._op for path, name in names.items()}
    scope: dict[str, Any] = {**code.globals, **operators}
    exec(source, scope)
    return partial(scope["forward"], SimpleNamespace(**constants))


class _Recorder(TorchDispatchMode):
    """Records operations below autograd and ``torch.vmap`` as a graph.

    ``values``: the nodes' tensors; ``written``: the addresses of memory that an operation writes to.
    """

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph, self.written = Graph(), set[int]()
        self.values: dict[Node, Tensor] = {}  # keeps tensors alive, so that their ids stay unique
        self._nodes: dict[int, Node] = {}
        for number, tensor in enumerate(inputs):
            self._add(self.graph.placeholder(f"input_{number}"), tensor)

    def _add(self, node: Node, tensor: Tensor) -> None:
        self.values[node], self._nodes[id(tensor)] = tensor, node

    def find(self, tensor: Tensor) -> Node:
        """Return the node of ``tensor``, which is a constant if no operation made it."""
        if id(tensor) not in self._nodes:
            self._add(self.graph.get_attr(f"constant_{len(self.values)}"), tensor)
        return self._nodes[id(tensor)]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not isinstance(result, Tensor | list | tuple):
            if any(id(leaf) in self._nodes for leaf in tree_leaves((args, kwargs))):
                raise Untraceable(f"{func} of a tensor returns a Python value")
            return result
        node = self.graph.call_function(func, *tree_map_only(Tensor, self.find, (args, kwargs or {})))
        if isinstance(result, Tensor):
            self._add(node, result)
        for place, tensor in enumerate(result if not isinstance(result, Tensor) else ()):
            if isinstance(tensor, Tensor):
                self._add(self.graph.call_function(getitem, (node, place)), tensor)
        aliases = [argument.alias_info for argument in func._schema.arguments[: len(args)]]
        places = [place for place, alias in enumerate(aliases) if alias is not None and alias.is_write]
        arguments = tree_leaves([args[place] for place in (*places, *WRITES.get(func, ()))])
        self.written |= {_find_memory(tensor) for tensor in arguments if isinstance(tensor, Tensor)}
        return result


def _find_memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _simplify(recorder: _Recorder, changing: set[int]) -> None:
    """Remove operations that do nothing, and those that make the same small tensor, outside of memory ``changing``."""
    graph, values = recorder.graph, recorder.values
    for node in list(graph.nodes):
        if node.op != "call_function" or node not in values or node.target is getitem:
            continue
        inputs, tensor = node.all_input_nodes, values[node]
        if inputs and _is_no_op(node.target, values[inputs[0]], tensor):
            replacement = inputs[0]
        elif _is_constant(node, tensor) and _find_memory(tensor) not in changing:
            with graph.inserting_before(node):
                replacement = graph.get_attr(f"constant_{len(values)}")
            values[replacement] = tensor
        else:
            continue
        node.replace_all_uses_with(replacement)
        graph.erase_node(node)


def _is_no_op(function: Any, before: Tensor, after: Tensor) -> bool:
    same = (before.shape, before.stride()) == (after.shape, after.stride())
    return function in SAME_MEMORY or (function in RESHAPES and same)


def _is_constant(node: Node, tensor: Tensor) -> bool:
    """Return whether an operation always makes the same small ``tensor``."""
    random = torch.Tag.nondeterministic_seeded in node.target.tags  # type: ignore[union-attr]
    return not random and tensor.numel() <= FOLDED and all(source.op == "get_attr" for source in node.all_input_nodes)


def _factor(graph: Graph, values: dict[Node, Tensor], result: Node) -> Node:
    """Return the factors of a result that is a (possibly transposed) batched product; otherwise the result."""
    node, transposed = result, False
    while values[node].ndim == 3 and _swaps(node):
        node, transposed = node.all_input_nodes[0], not transposed
    if node.target is not _aten.bmm.default:
        return result
    left, right = node.args
    if transposed:
        left, right = (graph.call_function(_aten.transpose.int, (factor, 1, 2)) for factor in (right, left))
    return graph.call_function(Factors, (left, right))


def _swaps(node: Node) -> bool:
    """Return whether an operation swaps the last two of three dimensions."""
    if node.target is _aten.permute.default:
        return node.args[1] == [0, 2, 1]
    return node.target is _aten.transpose.int and {dim % 3 for dim in node.args[1:]} == {1, 2}  # type: ignore[operator]
