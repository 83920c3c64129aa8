"""Allocator: freed memory is kept inside the outermost block, even after errors, and no result depends on it."""

import gc

import pytest
import torch
from torch import nn

from fedshift.utils import allocator
from fedshift.utils.allocator import GROWN, MMAP_THRESHOLD, TRIM_THRESHOLD, keep_freed_memory

KEPT = [("mallopt", MMAP_THRESHOLD, 2**30), ("mallopt", TRIM_THRESHOLD, 2**31 - 1)]
GIVEN_BACK = [
    ("mallopt", MMAP_THRESHOLD, GROWN),
    ("mallopt", TRIM_THRESHOLD, 2 * GROWN),
    ("malloc_trim", 0),
]


@pytest.fixture
def calls(monkeypatch):
    """Record calls of the C library, with no other holder of memory."""
    made = []
    monkeypatch.setattr(allocator, "_call", lambda function, *arguments: made.append((function, *arguments)))
    monkeypatch.setattr(allocator, "_holders", 0)
    return made


def test_the_outermost_of_nested_blocks_decides(calls):
    with keep_freed_memory():
        assert calls == KEPT
        with keep_freed_memory(), keep_freed_memory():
            pass
        assert calls == KEPT
    assert calls == KEPT + GIVEN_BACK
    with keep_freed_memory():
        pass
    assert calls == 2 * (KEPT + GIVEN_BACK)


def test_memory_is_given_back_after_an_exception(calls):
    with keep_freed_memory():
        with pytest.raises(KeyError), keep_freed_memory():
            raise KeyError
        assert calls == KEPT
    with pytest.raises(KeyError), keep_freed_memory():
        raise KeyError
    assert calls == 2 * (KEPT + GIVEN_BACK)


@pytest.mark.parametrize("frozen", [0, 10])
def test_objects_from_before_are_not_collected_inside_unless_the_program_sees_to_it(monkeypatch, calls, frozen):
    asked = []
    monkeypatch.setattr(gc, "get_freeze_count", lambda: frozen)
    for name in ("freeze", "unfreeze"):
        monkeypatch.setattr(gc, name, lambda name=name: asked.append(name))
    with keep_freed_memory():
        with keep_freed_memory():
            pass
        assert asked == ([] if frozen else ["freeze"])
    assert asked == ([] if frozen else ["freeze", "unfreeze"])


def missing(_):
    raise OSError("no such library")


def unnamed(_):
    raise TypeError("a name is needed")


@pytest.mark.parametrize("library", [missing, unnamed, lambda _: object()], ids=["none", "unnamed", "another"])
def test_elsewhere_than_under_glibc_nothing_is_done(monkeypatch, library):
    asked = []
    monkeypatch.setattr(allocator, "_holders", 0)
    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda name: asked.append(name) or library(name))
    with keep_freed_memory():
        assert asked == [None] * len(KEPT)
    assert asked == [None] * len(KEPT + GIVEN_BACK)


def trained():
    """Parameters and losses of two steps, whose tensors are above and below glibc's first threshold."""
    drawn = torch.Generator().manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(2048, 64))
    for parameter in net.parameters():
        parameter.data = torch.randn(parameter.shape, generator=drawn) / 8
    x, y = torch.randn(16, 3, 16, 16, generator=drawn), torch.arange(16)
    sgd, losses = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), []
    for _ in range(2):
        loss = nn.functional.cross_entropy(net(x), y)
        sgd.zero_grad()
        loss.backward()
        sgd.step()
        losses.append(loss.detach())
    return [*losses, *(tensor.clone() for tensor in net.state_dict().values())]


def test_no_bit_of_a_training_step_changes():
    before = trained()
    with keep_freed_memory():
        inside = trained()
        again = trained()
    for found in (inside, again, trained()):
        assert all(torch.equal(one, other) for one, other in zip(before, found, strict=True))
