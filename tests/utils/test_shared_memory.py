"""Values handed over by shared memory: the same values, types and shapes, and no copy."""

import io
import os
import pickle
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from fedshift.core.states import ClientState
from fedshift.utils.execution.shared_memory import SharedMemoryBuffer, pickle_without_tensors


@pytest.fixture
def shelves() -> Iterator[tuple[SharedMemoryBuffer, SharedMemoryBuffer]]:
    """Two ends of one memory, as parent and worker have them."""
    here = SharedMemoryBuffer()
    there = SharedMemoryBuffer(os.dup(here.fd))
    yield here, there
    here.close()
    there.close()


@pytest.fixture
def sent(shelves):
    """What arrives of a value at the other end."""
    here, there = shelves
    return lambda value: there.read(here.write(value))


TENSORS = {
    "float32": torch.randn(3, 5, generator=torch.Generator().manual_seed(0)),
    "float64": torch.tensor([0.1, float("inf"), -0.0, 5e-324], dtype=torch.float64),
    "nan": torch.tensor([float("nan"), 1.0]),
    "bfloat16": torch.tensor([[0.1], [-3.0]], dtype=torch.bfloat16),
    "float16": torch.tensor([0.1, 65504.0], dtype=torch.float16),
    "int64": torch.tensor([2**62 + 1, -1]),
    "int32": torch.tensor([-(2**31)], dtype=torch.int32),
    "uint8": torch.arange(256, dtype=torch.uint8).reshape(4, 4, 16),
    "bool": torch.tensor([True, False, True]),
    "complex": torch.tensor([1 + 2j, -3j]),
    "number": torch.tensor(7),
    "empty": torch.empty(0),
    "hollow": torch.empty(3, 0, 2, dtype=torch.int64),
    "transposed": torch.arange(12.0).reshape(3, 4).t(),
    "strided": torch.arange(20)[::3],
    "expanded": torch.tensor([1.5]).expand(4, 2),
    "conjugated": torch.tensor([1 + 2j]).conj(),
    "channels last": torch.arange(48.0).reshape(2, 3, 2, 4).contiguous(memory_format=torch.channels_last),
}


def bits(tensor):
    """Type, shape and bytes, so that NaN equals itself and -0.0 does not equal 0.0."""
    plain = tensor.detach().contiguous().resolve_conj()
    return tensor.dtype, tuple(tensor.shape), plain.flatten().view(torch.uint8).tolist() if tensor.numel() else []


def test_many_tensors_and_other_things_arrive_together(sent):
    value = {"tensors": TENSORS, "list": [1, "two", (3.0, None)], "type": torch.float64, "empty": {}}
    found = sent(value)
    assert {name: bits(tensor) for name, tensor in found.pop("tensors").items()} == {
        name: bits(tensor) for name, tensor in value.pop("tensors").items()
    }
    assert found == value


def test_a_tensor_that_occurs_twice_stays_one(sent):
    shared = torch.arange(3.0)
    found = sent({"a": shared, "b": [shared], "equal": torch.arange(3.0)})
    assert found["a"] is found["b"][0]
    found["a"][0] = 9
    assert found["equal"][0] == 0


def test_parameters_gradients_and_modules_arrive_as_what_they_are(sent):
    net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    net[0].bias.requires_grad_(False)
    leaf = torch.ones(2, requires_grad=True)
    found, other = sent((net, leaf))
    assert [(name, type(p), p.requires_grad) for name, p in found.named_parameters()] == [
        (name, nn.Parameter, p.requires_grad) for name, p in net.named_parameters()
    ]
    assert {name: bits(t) for name, t in found.state_dict().items()} == {
        n: bits(t) for n, t in net.state_dict().items()
    }
    assert other.requires_grad
    assert bits(other) == bits(leaf)


def test_tied_parameters_stay_tied(sent):
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    net[1].weight = net[0].weight
    found = sent(net)
    assert found[1].weight is found[0].weight


@pytest.mark.parametrize("constant", [torch.channels_last, torch.contiguous_format, torch.strided, torch.float64])
def test_torchs_constants_are_found_in_torch(constant):
    class Finder(pickle.Unpickler):
        def find_class(self, module, name):
            asked.append(module)
            return super().find_class(module, name)

    asked = []
    _, packed = pickle_without_tensors({"it": constant})
    assert Finder(io.BytesIO(packed)).load()["it"] is constant
    assert {module.partition(".")[0] for module in asked} <= {"builtins", "cloudpickle", "torch"}


def test_a_larger_value_after_a_smaller_one_while_that_is_still_looked_at(shelves):
    here, there = shelves
    small, large = torch.arange(4), torch.arange(10, 50_010)
    view = there.read(here.write(small))
    assert torch.equal(view, small)
    other = there.read(here.write(large))
    assert torch.equal(other, large)
    assert torch.equal(view, large[:4])  # the memory is the same, so what is kept must be copied
    assert torch.equal(there.read(here.write(small)), small)
    assert torch.equal(other[4:], large[4:])


def test_no_copy_is_made_until_one_is_asked_for(shelves):
    here, there = shelves
    client = ClientState(personal={"w": torch.zeros(3)}, memory=({"m": torch.zeros(2)},), steps=4)
    layout = here.write(client)
    seen, own = there.read(layout), there.take(layout)
    here.write(ClientState(personal={"w": torch.ones(3)}, memory=({"m": torch.ones(2)},)))
    assert torch.equal(seen.personal["w"], torch.ones(3))
    assert torch.equal(own.personal["w"], torch.zeros(3))
    assert torch.equal(own.memory[0]["m"], torch.zeros(2))
    assert (own.steps, own.optimizer) == (4, {})
    own.personal["w"].fill_(7)
    assert torch.equal(seen.personal["w"], torch.ones(3))


def test_what_lies_on_a_shelf_outlasts_it():
    shelf = SharedMemoryBuffer()
    value = shelf.read(shelf.write(torch.arange(5)))
    shelf.close()
    assert torch.equal(value, torch.arange(5))


def test_only_plain_tensors_are_laid_apart():
    plain, leaf, sparse = torch.ones(2), torch.ones(2, requires_grad=True), torch.eye(2).to_sparse()
    tensors, packed = pickle_without_tensors({"plain": plain, "leaf": leaf, "sparse": sparse})
    assert tensors[0] is plain
    assert all(tensor.layout == torch.strided and not tensor.requires_grad for tensor in tensors)
    assert len(packed) > 0


def test_sparse_tensors_travel_too(sent):
    assert torch.equal(sent(torch.eye(3).to_sparse()).to_dense(), torch.eye(3))


def test_the_memory_is_a_file_without_a_name():
    shelf = SharedMemoryBuffer()
    shelf.write(torch.zeros(1000))
    assert os.fstat(shelf.fd).st_nlink == 0
    assert os.fstat(shelf.fd).st_size >= 4000
    assert not os.get_inheritable(shelf.fd)
    shelf.close()


def test_memory_is_the_systems_own_where_there_is_such(monkeypatch):
    def memory(name):
        asked.append(name)
        return os.open(os.devnull, os.O_RDONLY)

    asked = []
    monkeypatch.setattr(os, "memfd_create", memory, raising=False)
    monkeypatch.setattr("tempfile.TemporaryFile", None)  # a directory such as /dev/shm may have room for little
    SharedMemoryBuffer().close()
    assert asked == ["fedshift"]


def test_without_memory_files_it_is_a_temporary_one(monkeypatch, tmp_path):
    monkeypatch.delattr(os, "memfd_create", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    shelf = SharedMemoryBuffer()
    assert torch.equal(shelf.read(shelf.write(torch.arange(5))), torch.arange(5))
    assert list(tmp_path.iterdir()) == []
    shelf.close()
