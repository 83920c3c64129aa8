"""Selection by module type, composition, and refusal of what matches nothing."""

import pytest
import torch
from torch import nn

from fedshift.core.selection import (  # fmt: skip
    Scope,
    batch_norm,
    buffers,
    entries,
    everything,
    last_layers,
    name_matches,
    norm_layers,
    norm_statistics,
    nothing,
    of_type,
    parse_selection,
)
from fedshift.utils.errors import UsageError


class Net(nn.Module):
    """Names that mislead: a BatchNorm called ``downsample.1``, a Linear called ``subnet``, tied and hidden entries."""

    def __init__(self):
        super().__init__()
        self.subnet = nn.Linear(4, 4)
        self.downsample = nn.Sequential(nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4))
        self.norm = nn.LayerNorm(4)
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.subnet.weight
        self.register_buffer("scratch", torch.zeros(1), persistent=False)
        self.register_buffer("table", torch.ones(2))


FOUND = entries(Net())


def test_entries_are_those_of_the_state_dict_with_tied_ones_once():
    names = [entry.name for entry in FOUND]
    assert set(names) == set(Net().state_dict()) - {"tied.weight"}
    assert "scratch" not in names
    assert [entry.name for entry in FOUND if entry.is_buffer] == [
        "table", "downsample.1.running_mean", "downsample.1.running_var", "downsample.1.num_batches_tracked",
    ]  # fmt: skip


def test_batch_norm_is_chosen_by_type_not_by_name():
    assert {name.rpartition(".")[0] for name in batch_norm.names(FOUND)} == {"downsample.1"}
    assert {name.rpartition(".")[0] for name in norm_layers.names(FOUND)} == {"downsample.1", "norm"}
    assert norm_statistics.names(FOUND) == batch_norm.names(FOUND) & buffers.names(FOUND)


def test_synchronized_batch_norm_and_subclasses_are_batch_norm():
    class Own(nn.BatchNorm2d):
        pass

    net = nn.Sequential(nn.SyncBatchNorm(3), Own(3), nn.GroupNorm(1, 3))
    assert {name[0] for name in batch_norm.names(entries(net))} == {"0", "1"}


def test_selections_compose():
    everyone, normal, subnet = everything.names(FOUND), batch_norm.names(FOUND), name_matches("subnet.*")
    assert (batch_norm | subnet).names(FOUND) == normal | {"subnet.weight", "subnet.bias"}
    assert (batch_norm & buffers).names(FOUND) < normal
    assert (~batch_norm).names(FOUND) == everyone - normal
    assert (~(batch_norm & buffers)).names(FOUND) == everyone - norm_statistics.names(FOUND)
    assert (everything & ~batch_norm & ~subnet).names(FOUND) == everyone - normal - {"subnet.weight", "subnet.bias"}
    assert nothing.names(FOUND) == frozenset()


def test_scope_without_keeps_entries_out_of_both_directions():
    scope = Scope(send=~name_matches("table")).keep_on_client(batch_norm)
    assert scope.load.names(FOUND) == everything.names(FOUND) - batch_norm.names(FOUND)
    assert scope.send.names(FOUND) == everything.names(FOUND) - batch_norm.names(FOUND) - {"table"}


def test_text_says_how_a_selection_is_written():
    assert repr(everything & ~(batch_norm & buffers)) == "everything & ~(batch_norm & buffers)"
    assert repr(of_type(nn.Linear) | name_matches("a.*")) == "(of_type(Linear) | 'a.*')"


def test_statistics_that_do_not_exist_cannot_be_kept_although_there_are_other_buffers():
    net = nn.Sequential(nn.BatchNorm1d(4, track_running_stats=False), Net())
    assert norm_statistics.names(entries(net))
    del net[1].downsample[1]
    with pytest.raises(UsageError, match="norm_statistics matches no entry"):
        Scope().keep_on_client(norm_statistics).load.names(entries(net))
    with pytest.raises(UsageError, match="cannot be kept on the client, because another part leaves it out"):
        Scope(load=nothing).keep_on_client(batch_norm).load.names(entries(net))


@pytest.mark.parametrize(
    "selection", [name_matches("subnett.weight"), ~name_matches("subnett.weight"), everything & of_type(nn.Conv2d)]
)
def test_a_part_that_matches_nothing_is_refused_with_what_there_is(selection):
    with pytest.raises(UsageError, match="matches no entry") as refused:
        selection.names(FOUND)
    assert "BatchNorm1d" in str(refused.value)
    if "subnett" in selection.text:
        assert "subnet.weight" in str(refused.value)


def test_the_last_layers_are_those_registered_last_with_their_parameters():
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
    found = entries(net)
    assert last_layers(1).names(found) == {"3.weight", "3.bias"}
    assert last_layers(2).names(found) == last_layers(1).names(found) | {
        name for name in net.state_dict() if name.startswith("1.")
    }
    assert last_layers(9).names(found) == set(net.state_dict())
    with pytest.raises(UsageError, match="the last 0 layers"):
        last_layers(0)


def test_a_written_selection_is_a_known_name_or_a_pattern_and_bars_join():
    assert parse_selection("batch_norm|subnet.*").names(FOUND) == (batch_norm | name_matches("subnet.*")).names(FOUND)
    assert parse_selection(" last ").names(FOUND) == last_layers(1).names(FOUND)
    assert parse_selection("batch_norm_affine").names(FOUND) == batch_norm.names(FOUND) - norm_statistics.names(FOUND)
    with pytest.raises(UsageError, match=r"'hed\.\*' matches no entry"):
        parse_selection("hed.*").names(FOUND)
    with pytest.raises(UsageError, match=r"selection '\|a': write batch_norm, "):
        parse_selection("|a")


def test_what_is_taken_away_twice_is_refused_by_name():
    twice = Scope().keep_on_client(batch_norm).keep_on_client(norm_statistics)
    for scope in (twice, Scope().keep_on_client(norm_statistics).keep_on_client(batch_norm)):
        with pytest.raises(UsageError, match="norm_statistics is kept on the client twice, also by batch_norm"):
            scope.load.names(FOUND)
    overlapping = Scope()
    for pattern in ("table", "subnet.*"):
        overlapping = overlapping.keep_on_client(batch_norm | name_matches(pattern))
    assert overlapping.load.names(FOUND) == {"norm.weight", "norm.bias", "downsample.0.weight", "tied.bias"}
