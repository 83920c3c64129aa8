"""A fake accelerator: its tensors report the device ``fakegpu:0`` and are computed on the processor.

Operations on tensors of two devices raise, as with CUDA. Kernels, copies between devices (``to device``, ``to host``)
and synchronizations are counted in :data:`COUNTS`, the latter two also by source line in :data:`LINES`. The device is
registered for the whole process, and inference mode, which its tensors do not support, becomes ``torch.no_grad``; so
tests run this file as a program:

``python -m tests.engines.fake_gpu "METHOD;METHOD" ENGINE`` trains each method for three rounds on the processor and on
the device, and prints a line of JSON for each: the largest relative difference of the server's entries after training
in float64, and what the last round counted, with two and with four steps of each client.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "fakegpu"
DEVICE = torch.device("cpu")
COUNTS: Counter[str] = Counter()
LINES: Counter[str] = Counter()
_aten = torch.ops.aten
INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
"""Operations that move indices to the device of the indexed tensor."""
WAITING = {
    "aten::_local_scalar_dense", "aten::_unique2", "aten::bincount", "aten::equal", "aten::is_nonzero",
    "aten::masked_select", "aten::nonzero", "aten::repeat_interleave", "aten::unique_consecutive", "aten::unique_dim",
}  # fmt: skip
"""Operations whose result, or its shape, the processor has to wait for."""
ALLOCATIONS = {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided"}


class FakeTensor(Tensor):
    """A tensor on the device; ``host`` holds its values."""

    host: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, host: Tensor, requires_grad: bool = False) -> FakeTensor:
        made: FakeTensor = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            host.size(),
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device=torch.device(NAME, 0),
            requires_grad=requires_grad,
        )
        made.host = host
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    def untyped_storage(self) -> Any:
        return self.host.untyped_storage()

    @property
    def data(self) -> FakeTensor:
        return FakeTensor(self.host)

    @data.setter
    def data(self, value: FakeTensor) -> None:
        self.host = value.host

    def tolist(self) -> Any:
        count("to host")
        return self.host.tolist()

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(f"can't convert {NAME}:0 device type tensor to numpy: use Tensor.cpu()")

    __array__ = numpy

    def new_tensor(self, data: Any, dtype: torch.dtype | None = None, device: Any = None, **kwargs: Any) -> Tensor:
        return torch.tensor(data, dtype=dtype or self.dtype, device=device or self.device, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> FakeTensor:
        memo[id(self)] = made = FakeTensor(self.host.clone(), self.requires_grad)
        return made

    def __repr__(self, **kwargs: Any) -> str:
        return f"FakeTensor{tuple(self.shape)}"


def count(kind: str) -> None:
    """Count an event, and the line of the package that caused it."""
    COUNTS[kind] += 1
    frame = sys._getframe(1)
    while frame.f_back is not None and "/src/fedshift/" not in frame.f_code.co_filename:
        frame = frame.f_back
    LINES[f"{kind}: {frame.f_code.co_filename.rpartition('/src/fedshift/')[2]}:{frame.f_lineno}"] += 1


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation on the values, count it, and return its result on the device that torch would return it on."""
    name, leaves = func._schema.name, tree_leaves((args, kwargs))
    ours = [leaf for leaf in leaves if isinstance(leaf, FakeTensor)]
    others = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not isinstance(leaf, FakeTensor)]
    wanted = kwargs.get("device")
    wanted = None if wanted is None else torch.device(wanted).type
    if name == "aten::copy_":
        return copy(func, *args, **kwargs)
    if name == "aten::_to_copy":
        there = NAME if wanted is None and ours else wanted
        crosses = (there == NAME) != bool(ours)
        made = on_host(func, args, {**kwargs, **({"device": "cpu"} if wanted else {})})
        count(("to device" if there == NAME else "to host") if crosses else "kernels")
        return FakeTensor(made) if there == NAME else made
    indices: list[Tensor] = []
    if name in INDEXING:
        indices = [leaf for leaf in tree_leaves(args[1]) if isinstance(leaf, Tensor)]
        if indices and not isinstance(args[0], FakeTensor):
            raise RuntimeError("indices should be on the same device as the indexed tensor (cpu)")
        for index in indices:
            if not isinstance(index, FakeTensor):
                count("to device")
            if index.dtype == torch.bool:
                count("waits")
    if ours and any(each.dim() and all(each is not index for index in indices) for each in others):
        raise RuntimeError(f"Expected all tensors to be on the same device, but found {NAME}:0 and cpu: {func}")
    made = on_host(func, args, {**kwargs, **({"device": "cpu"} if wanted else {})})
    if ours and name in WAITING:
        count("waits")
    if name == "aten::_local_scalar_dense" or not (ours if wanted is None else wanted == NAME):
        return made
    aliases = [each.alias_info for each in func._schema.returns]
    if name not in ALLOCATIONS and not any(each is not None and not each.is_write for each in aliases):
        for _ in range(len(args[0]) if name.startswith("aten::_foreach_") and not are_alike(args) else 1):
            count("float64 kernels" if ours and ours[0].dtype == torch.float64 else "kernels")
    made = tree_map(lambda each: FakeTensor(each) if isinstance(each, Tensor) else each, made)
    return replace_written(func, args, kwargs, made) if ours else made


def are_alike(args: Any) -> bool:
    """Return whether tensors in the same place of each list are laid out alike, so that torch joins their kernels."""
    places = zip(*(each for each in args if isinstance(each, list | tuple)), strict=True)
    return all(len({(each.shape, each.stride(), each.dtype) for each in place}) == 1 for place in places)


def on_host(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return the result of an operation on the values of its arguments."""
    args, kwargs = tree_map(lambda leaf: leaf.host if isinstance(leaf, FakeTensor) else leaf, (args, kwargs))
    with torch._C._DisableTorchDispatch():  # type: ignore[attr-defined]
        return func(*args, **kwargs)


def copy(func: Any, into: Tensor, source: Tensor, *rest: Any) -> Tensor:
    """Copy values in place, and count it."""
    on_host(func, (into, source, *rest), {})
    there, here = isinstance(into, FakeTensor), isinstance(source, FakeTensor)
    count("kernels" if there and here else "to device" if there else "to host")
    return into


def replace_written(func: Any, args: Any, kwargs: dict[str, Any], made: Any) -> Any:
    """Return results, where those written in place are the arguments themselves."""
    written = {}
    for place, each in enumerate(func._schema.arguments):
        if each.alias_info is not None and each.alias_info.is_write:
            given = args[place] if place < len(args) else kwargs.get(each.name)
            written[frozenset(each.alias_info.before_set)] = given
    results = made if isinstance(made, tuple | list) else (made,)
    kinds = [each.alias_info for each in func._schema.returns]
    if len(kinds) != len(results):
        return made
    chosen = [
        written.get(frozenset(kind.before_set), result) if kind is not None and kind.is_write else result
        for kind, result in zip(kinds, results, strict=True)
    ]
    return type(made)(chosen) if isinstance(made, tuple | list) else chosen[0]


def register() -> None:
    """Register the device with torch."""
    global DEVICE
    _setup_privateuseone_for_python_backend(NAME)
    DEVICE = torch.device(NAME, 0)
    torch.inference_mode = lambda mode=True: torch.no_grad()  # type: ignore[assignment,misc]
    register.fallback = torch.library.Library("_", "IMPL")  # type: ignore[attr-defined]
    register.fallback.fallback(lambda op, *args, **kwargs: run(op, args, kwargs), "PrivateUse1")  # type: ignore[attr-defined]
    register.factories = torch.library.Library("aten", "IMPL")  # type: ignore[attr-defined]
    for name, operation in (
        ("empty.memory_format", _aten.empty.memory_format),
        ("empty_strided", _aten.empty_strided.default),
    ):

        def make(*args: Any, operation: Any = operation, **kwargs: Any) -> Any:
            return run(operation, args, kwargs)

        register.factories.impl(name, make, "PrivateUse1")  # type: ignore[attr-defined]
    plain, arange = torch.tensor, torch.arange

    def make_tensor(*args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        made: Tensor = plain(*args, **kwargs)
        return made if device is None else made.to(device)

    def make_range(*args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        """Return the range; torch would make an empty tensor and resize it, which a wrapper cannot."""
        made: Tensor = arange(*args, **kwargs)
        if device is None or torch.device(device).type != NAME:
            return made if device is None else made.to(device)
        before = COUNTS.copy(), LINES.copy()
        made = made.to(device)
        COUNTS.clear()
        LINES.clear()
        COUNTS.update(before[0])
        LINES.update(before[1])
        count("kernels")  # a device makes it without a copy
        return made

    torch.tensor, torch.arange = make_tensor, make_range


def measure(method: Any, engine: str) -> dict[str, Any]:
    """Return the largest difference from the processor's entries after training, and the counts of a round."""
    from fedshift.core.work import Work
    from tests.laws.course import ROUNDS, make_trial, unequal

    def train(device: torch.device, sizes: dict[str, int] | None = None, **given: Any) -> Any:
        trial = make_trial(
            method, engine, data=unequal(sizes).to(device), device=str(device), rounds=9, evaluate_every=9, **given
        )
        for _ in range(ROUNDS - 1):
            trial.advance()
        COUNTS.clear()
        LINES.clear()
        trial.advance()
        return trial

    here, there = train(torch.device("cpu")), train(DEVICE)
    there.evaluate()
    gaps = [
        float((value - there.server.shared[name].cpu()).abs().max() / value.abs().max().clamp(min=1e-9))
        for name, value in here.server.shared.items()
        if value.is_floating_point()
    ]
    counted = {}
    for steps in (2, 4):
        train(DEVICE, {"a": 32, "b": 32, "c": 32}, work=Work(batch_size=8, steps=steps))
        counted[steps] = {**COUNTS, "lines": dict(LINES)}
    return {"gap": max(gaps, default=0.0), "counts": counted}


def main() -> None:
    """Print a line for each method."""
    from fedshift.methods import METHODS
    from fedshift.utils.errors import UsageError

    register()
    engine = sys.argv[2]
    for text in sys.argv[1].split(";"):
        (method,) = METHODS.parse_all(text)
        try:
            found = measure(method, engine)
        except UsageError as refusal:
            found = {"refused": str(refusal)}
        print(json.dumps({"method": text, "engine": engine, **found}), flush=True)


if __name__ == "__main__":
    main()
