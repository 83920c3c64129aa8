"""States on the wire: bit for bit in every type, readable by Flower; whatever does not fit is refused by name."""

import fedshift.flower  # noqa: F401  isort: skip

import re
from io import BytesIO

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord
from torch import nn

from fedshift import SGD, fedbn, scaffold
from fedshift.core.kernel import client_final, init_client, init_server, load_state
from fedshift.core.preparation import prepare
from fedshift.flower import messages
from fedshift.flower.messages import RefusedMessage, check_state, check_update, digest_records, from_record, to_record
from fedshift.utils.state import join_states

TYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool, torch.uint8, torch.int8, torch.int16,
    torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64,
)  # fmt: skip


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist() if tensor.numel() else []


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (5,), (2, 3, 4, 2)], ids=str)
def test_every_type_and_shape_comes_back_bit_for_bit(dtype, shape):
    size = int(np.prod(shape))
    raw = torch.arange(7, 7 + size * dtype.itemsize) % (2 if dtype == torch.bool else 256)
    tensor = raw.to(torch.uint8).view(dtype).reshape(shape)
    record = to_record({"x": tensor})
    back = from_record(record)["x"]
    assert (back.dtype, back.shape) == (dtype, tensor.shape)
    assert bits(back) == bits(tensor)
    if dtype != torch.bfloat16:
        read = record.to_torch_state_dict()["x"]
        assert (read.dtype, read.shape) == (dtype, tensor.shape)
        assert bits(read) == bits(tensor)


def test_layout_does_not_matter_memory_is_owned_and_other_flower_code_is_read():
    x = torch.randn(2, 3, 4, 5)
    for laid in (x.contiguous(memory_format=torch.channels_last), x.transpose(0, 3).contiguous().transpose(0, 3)):
        record = to_record({"x": laid})
        assert record["x"].data == to_record({"x": x})["x"].data
    back = from_record(record)["x"]
    back.zero_()
    assert torch.equal(from_record(record)["x"], x)
    for tensor in (x[0, 0], x[0, 0].t()):  # in either order of memory
        assert torch.equal(from_record(ArrayRecord({"w": Array(tensor.numpy())}))["w"], tensor)


NUMPY, RAW = messages.NUMPY, messages.RAW
GOOD = to_record({"w": torch.ones(2, 3)})["w"]


PICKLED = BytesIO()
np.save(PICKLED, np.array([print], dtype=object), allow_pickle=True)


@pytest.mark.parametrize(
    ("array", "why"),
    [
        (Array("float32", (2, 4), NUMPY, GOOD.data), "declared as float32 of shape .2, 4., but its bytes are float32"),
        (Array("float64", (2, 3), NUMPY, GOOD.data), "declared as float64"),
        (Array("float32", (2, 3), NUMPY, GOOD.data[:-1]), "takes 24 bytes, but has 23"),
        (Array("float32", (2, 3), NUMPY, GOOD.data + b"x"), "takes 24 bytes, but has 25"),
        (Array("float32", (2, 3), NUMPY, b"PK\x03\x04"), "not in NumPy's format"),
        (Array("float32", (1,), NUMPY, PICKLED.getvalue()), "declared as float32"),
        (Array("float32", (2, 3), "pickle", GOOD.data), "'float32' in 'pickle', which is not read"),
        (Array("object", (2, 3), NUMPY, GOOD.data), "'object' in 'numpy.ndarray', which is not read"),
        (Array("bfloat16", (3,), RAW, bytes(7)), "takes 6 bytes, but has 7"),
        (Array("bfloat16", (-1, -3), RAW, bytes(6)), "takes 6 bytes, but has 6"),
        (Array("bfloat16", (0, 10**30), RAW, b""), "cannot be read"),
        (Array("bfloat16", (10**30,), RAW, b""), "bytes, but has 0"),
        (Array("bool", (3,), NUMPY, to_record({"b": torch.ones(3).bool()})["b"].data[:-1] + b"\x02"), "neither 0 nor"),
    ],
)
def test_arrays_that_lie_about_themselves_and_types_that_cannot_travel_are_refused(array, why):
    with pytest.raises(RefusedMessage, match=why):
        from_record(ArrayRecord({"w": array}))
    with pytest.raises(RefusedMessage, match="complex64"):
        to_record({"w": torch.ones(2, dtype=torch.complex64)})


def test_states_that_do_not_fit_are_refused_by_entry():
    like = {"w": torch.ones(2)}
    check_state({"w": torch.zeros(2)}, like, "the upload")
    for found, why in (
        ({}, "the upload lacks entry 'w'"),
        (like | {"v": torch.ones(1)}, "has an entry 'v', which does not belong"),
        ({"w": torch.ones(3)}, r"has shape \(3,\) in place of \(2,\)"),
        ({"w": torch.ones(2).double()}, "has type torch.float64 in place of torch.float32"),
        ({"w": torch.tensor([1.0, torch.nan])}, "holds NaN or infinity"),
        ({"w": torch.tensor([1.0, -torch.inf])}, "holds NaN or infinity"),
    ):
        with pytest.raises(RefusedMessage, match=why):
            check_state(found, like, "the upload")


def test_axes_that_are_free_may_have_any_length_but_none_and_no_others():
    like, free = {"w": torch.ones(2, 1, 3)}, {"w": (1,)}
    check_state({"w": torch.ones(2, 5, 3)}, like, "the memory", free)
    for shape in ((2, 0, 3), (3, 5, 3), (2, 5, 4), (2, 5), (2, 5, 3, 1)):
        with pytest.raises(RefusedMessage, match=re.escape(f"has shape {shape} in place of (2, any, 3)")):
            check_state({"w": torch.ones(shape)}, like, "the memory", free)
    check_state({"w": torch.ones(2, 0, 3)}, {"w": torch.ones(2, 0, 3)}, "the memory", free)  # none at the start
    with pytest.raises(RefusedMessage, match=re.escape("in place of (2, 1, 3)")):
        check_state({"w": torch.ones(2, 5, 3)}, like, "the memory")


@pytest.fixture(scope="module")
def plan():
    return prepare(fedbn(scaffold()), nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), optimizer=SGD(lr=0.1))


def test_an_upload_of_the_kernel_passes_in_the_servers_order_and_others_are_refused(plan):
    update = client_final(plan, load_state(plan, init_client(plan), init_server(plan)))[1]
    server, memory = init_server(plan), join_states(plan.rule_names, update.memory)
    taken = check_update(plan, server, dict(reversed(update.shared.items())), memory, 12, 3, memory, most=12)
    assert list(taken.shared) == list(server.shared) == ["0.weight", "0.bias"]
    assert (taken.weight, taken.steps, taken.memory) == (12.0, 3, update.memory)
    name = min(memory)
    lacking, broken = memory.keys() - {name}, memory | {name: memory[name] * torch.nan}
    for shared, sent, steps, like, why in (
        (server.shared, memory, 5, memory, "5 local steps on 4 samples"),
        (server.shared, {key: memory[key] for key in lacking}, 1, memory, f"rule memory lacks entry '{name}'"),
        (server.shared, broken, 1, None, f"'{name}' of the upload's rule memory holds NaN"),
        (server.shared | {"1.weight": torch.ones(3)}, memory, 1, None, r"'1\.weight', which does not belong there"),
    ):
        with pytest.raises(RefusedMessage, match=why):
            check_update(plan, server, shared, sent, 4, steps, like)
    for weight in (0, -1, 0.5, 13, 1e30, 10**400, float("nan"), float("inf")):
        with pytest.raises(RefusedMessage, match="number of samples, whole and from 1 to 12"):
            check_update(plan, server, server.shared, {}, weight, 1, most=12)


def test_a_digest_covers_names_types_shapes_and_bytes_of_all_records():
    x = torch.arange(6.0)
    records = [
        {"a": {"x": x}}, {"b": {"x": x}}, {"a": {"y": x}}, {"a": {"x": x.reshape(2, 3)}}, {"a": {"x": -x}},
        {"a": {"x": x.view(torch.int32)}}, {"a": {"x": x}, "b": {}}, {"a": {"x": x, "y": x}},
        {"a": {"x": x}, "b": {"y": x}},
    ]  # fmt: skip
    digests = [digest_records({key: to_record(state) for key, state in each.items()}) for each in records]
    assert len(set(digests)) == len(records)
    assert digests[0] == digest_records({"a": to_record({"x": x.clone()})})
    both = {"x": x, "w": x + 1}  # a checkpoint of the coordinator has another order
    assert digest_records({"a": to_record(both)}) == digest_records({"a": to_record(dict(reversed(both.items())))})
