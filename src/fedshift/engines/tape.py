"""Tapes: the flat list of tensor operations that a function runs, recorded once per shape and run many times.

``torch.vmap`` and autograd select operations in Python at every step, which takes longer than the operations of a small
network. A tape stores the selected operations as the source of a Python function. It runs the same operations on the
same values, so that results have the same bits, except for products that are returned as factors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

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


class _Slot(int):
    """The number of a tensor on a tape."""


@dataclass(frozen=True)
class _Operation:
    """A call: ``leaves`` are its arguments, with the tape's tensors as slots; ``spec`` is their structure."""

    function: Any
    leaves: list[Any]
    spec: Any
    outputs: tuple[_Slot | None, ...]
    single: bool

    @property
    def read(self) -> set[int]:
        return {leaf for leaf in self.leaves if isinstance(leaf, _Slot)}


class _Recorder(TorchDispatchMode):
    """Records operations below autograd and ``torch.vmap``."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kept: list[Tensor] = list(inputs)  # keeps tensors alive, so that their ids stay unique
        self.slots = {id(tensor): _Slot(number) for number, tensor in enumerate(inputs)}
        self.operations: list[_Operation] = []
        self.written: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        known = [self.slots.get(id(leaf), leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        single = isinstance(result, Tensor)
        results = [result] if single else list(result) if isinstance(result, list | tuple) else None
        if results is None:
            if any(isinstance(leaf, _Slot) for leaf in known):
                raise Untraceable(f"{func} of a tensor returns a Python value")
            return result
        self._record_writes(func, args)
        outputs = tuple(self._number(each) if isinstance(each, Tensor) else None for each in results)
        self.operations.append(_Operation(func, known, spec, outputs, single))
        return result

    def _number(self, tensor: Tensor) -> _Slot:
        if id(tensor) not in self.slots:
            self.slots[id(tensor)] = _Slot(len(self.kept))
            self.kept.append(tensor)
        return self.slots[id(tensor)]

    def _record_writes(self, func: Any, args: Sequence[Any]) -> None:
        arguments = func._schema.arguments
        places = [n for n, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write]
        for place in (*places, *WRITES.get(func, ())):
            if place < len(args) and isinstance(args[place], Tensor):
                self.written.add(args[place].untyped_storage().data_ptr())


class Tape:
    """The operations of ``function`` on ``inputs``, for inputs of the same shapes, dtypes and strides.

    Args:
        function: Maps tensors to tensors; other tensors that it reads become constants.
        inputs: Arguments for recording.
        factored: Returns, after recording, how many results may be :class:`Factors`, from the first.

    ``operations``: the names of the operations, in order.

    Raises:
        Untraceable: The function reads values of its arguments.

    """

    def __init__(
        self,
        function: Callable[..., Sequence[Tensor]],
        inputs: Sequence[Tensor],
        *,
        factored: Callable[[], int] = lambda: 0,
    ) -> None:
        with _Recorder(inputs) as recorder:
            results = function(*inputs)
        self._results: list[Any] = [recorder.slots.get(id(tensor), tensor) for tensor in results]
        operations = _drop_copies(recorder, self._results)
        makers = {slot: number for number, each in enumerate(operations) for slot in each.outputs if slot is not None}
        for place in range(factored()):
            self._results[place] = _find_factors(operations, makers, recorder.kept, self._results[place])
        operations = _drop_unread(operations, self._results)
        self.operations = [str(each.function) for each in operations]
        self._run = _compile(operations, self._results, len(inputs))

    def __call__(self, *inputs: Tensor) -> list[Any]:
        """Return the function's results: tensors, or :class:`Factors`."""
        results: list[Any] = self._run(*inputs)
        return results


@dataclass(frozen=True)
class _Transposed:
    """A tensor with its last two dimensions swapped."""

    slot: _Slot


def _drop_copies(recorder: _Recorder, results: list[Any]) -> list[_Operation]:
    """Remove no-ops and constant operations; rename ``results`` in place."""
    names: dict[int, Any] = {}
    returned = [recorder.kept[slot] for slot in results if isinstance(slot, _Slot)]
    changing = recorder.written | {tensor.untyped_storage().data_ptr() for tensor in returned}

    def rename(leaf: Any) -> Any:
        return names.get(leaf, leaf) if isinstance(leaf, _Slot) else leaf

    kept = []
    for each in recorder.operations:
        leaves = [rename(leaf) for leaf in each.leaves]
        if each.single and isinstance(leaves[0], _Slot) and _is_no_op(recorder, each, leaves):
            names[each.outputs[0]] = leaves[0]  # type: ignore[index]
        elif each.single and _is_constant(recorder, each, leaves, changing):
            names[each.outputs[0]] = recorder.kept[each.outputs[0]]  # type: ignore[index]
        else:
            kept.append(_Operation(each.function, leaves, each.spec, each.outputs, each.single))
    results[:] = map(rename, results)
    return kept


def _is_no_op(recorder: _Recorder, operation: _Operation, leaves: list[Any]) -> bool:
    if operation.function in SAME_MEMORY:
        return True
    assert operation.outputs[0] is not None
    before, after = recorder.kept[leaves[0]], recorder.kept[operation.outputs[0]]
    if operation.function in RESHAPES:
        return (before.shape, before.stride()) == (after.shape, after.stride())
    if operation.function is _aten.mul.Scalar and leaves[1] == 1 and before.dtype == after.dtype:
        return not recorder.written & {tensor.untyped_storage().data_ptr() for tensor in (before, after)}
    return False


def _is_constant(recorder: _Recorder, operation: _Operation, leaves: list[Any], changing: set[int]) -> bool:
    """Return whether an operation always returns the same small tensor, outside of memory that is ``changing``."""
    (slot,) = operation.outputs
    if slot is None or any(isinstance(leaf, _Slot) for leaf in leaves):
        return False
    output = recorder.kept[slot]
    random = torch.Tag.nondeterministic_seeded in operation.function.tags
    return output.numel() <= FOLDED and not random and output.untyped_storage().data_ptr() not in changing


def _find_factors(operations: list[_Operation], makers: dict[_Slot, int], kept: list[Tensor], result: Any) -> Any:
    """Return the factors of a result that is a (possibly transposed) batched product; otherwise the result."""
    slot, transposed = result, False
    while isinstance(slot, _Slot) and slot in makers:
        maker = operations[makers[slot]]
        if maker.function is _aten.bmm.default:
            left, right = maker.leaves
            if transposed:
                return Factors(_Transposed(right), _Transposed(left))  # type: ignore[arg-type]
            return Factors(left, right)
        swaps = maker.function is _aten.transpose.int and sorted(d % 3 for d in maker.leaves[1:3]) == [1, 2]
        swaps = swaps or (maker.function is _aten.permute.default and maker.leaves[1:] == [0, 2, 1])
        if not swaps or kept[slot].ndim != 3:
            break
        transposed, slot = not transposed, maker.leaves[0]
    return result


def _slots_of(result: Any) -> set[int]:
    if isinstance(result, Factors):
        return _slots_of(result.left) | _slots_of(result.right)
    return {result.slot} if isinstance(result, _Transposed) else {result} if isinstance(result, _Slot) else set()


def _drop_unread(operations: list[_Operation], results: list[Any]) -> list[_Operation]:
    """Return the operations that a result needs, or that write to memory."""
    needed: set[int] = set().union(*map(_slots_of, results))
    kept = []
    for each in reversed(operations):
        if each.function._schema.is_mutable or needed & {slot for slot in each.outputs if slot is not None}:
            needed |= each.read
            kept.append(each)
    return kept[::-1]


def _compile(operations: list[_Operation], results: list[Any], inputs: int) -> Callable[..., list[Any]]:
    """Compile the operations to a Python function, which deletes each tensor after its last use."""
    constants: dict[str, Any] = {}

    def write(value: Any) -> str:
        if isinstance(value, _Slot):
            return f"t{value:d}"
        if isinstance(value, _Transposed):
            return f"{write(value.slot)}.transpose(1, 2)"
        if isinstance(value, Factors):
            return f"{write(Factors)}({write(value.left)}, {write(value.right)})"
        constants[f"c{len(constants)}"] = value
        return f"c{len(constants) - 1}"

    lines = [f"return [{', '.join(map(write, results))}]"]
    alive: set[int] = set().union(*map(_slots_of, results))
    for each in reversed(operations):
        touched = each.read | {slot for slot in each.outputs if slot is not None}
        lines += [f"del t{slot:d}" for slot in sorted(touched - alive)]
        alive |= touched
        args, kwargs = tree_unflatten(list(map(write, each.leaves)), each.spec)
        arguments = [*map(_nest, args), *(f"{name}={_nest(value)}" for name, value in kwargs.items())]
        targets = ", ".join("_" if slot is None else write(slot) for slot in each.outputs)
        function = getattr(each.function, "_op", each.function)  # the function that the operator calls
        lines.append(f"{targets if each.single else f'[{targets}]'} = {write(function)}({', '.join(arguments)})")
    head = f"def run({', '.join(f't{number}' for number in range(inputs))}):"
    exec(compile("\n    ".join([head, *reversed(lines)]), "<tape>", "exec"), constants)
    run: Callable[..., list[Any]] = constants["run"]
    return run


def _nest(argument: Any) -> str:
    """Return the source of an argument: a name, or a list of names."""
    return argument if isinstance(argument, str) else f"[{', '.join(map(_nest, argument))}]"
