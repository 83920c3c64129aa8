"""How messages are fetched: large answers one after another, and what is still on its way without long waits."""

from threading import Lock
from types import SimpleNamespace

from flwr.supercore.inflatable import inflatable_utils

from fedshift.flower.transport.programs import poll_quickly
from tests.flower.sites import Heard, SiteGrid, coordinator, same_as_in_process, sites_of, spec_for


class Watched(SiteGrid):
    """``most``: the most answers with arrays that were fetched at a time."""

    most = 0

    def pull_messages(self, message_ids):
        replies = super().pull_messages(message_ids)
        self.most = max(self.most, sum(bool(reply.content.array_records) for reply in replies))
        return replies


def test_answers_are_fetched_one_at_a_time(tmp_path, machine):
    spec = spec_for("fedavg", rounds=1)
    grid = Watched(sites_of(spec, tmp_path))
    assert coordinator(spec, grid, tmp_path / "served", Heard()).run()
    assert grid.most == 1
    same_as_in_process(spec, tmp_path / "served", tmp_path, tmp_path / "reference")


def test_what_is_on_its_way_is_looked_for_soon_and_then_less_often(monkeypatch):
    for function in (inflatable_utils.pull_objects, inflatable_utils.pull_and_inflate_object_from_tree):
        monkeypatch.setitem(function.__kwdefaults__, "initial_backoff", 1)
    poll_quickly()
    waits = []
    event = SimpleNamespace(is_set=lambda: False, set=lambda: None, wait=waits.append)
    monkeypatch.setattr(inflatable_utils, "threading", SimpleNamespace(Lock=Lock, Event=lambda: event))
    found = iter([None, None, b"here"])

    def pull(which):
        if (content := next(found)) is None:
            raise inflatable_utils.ObjectUnavailableError(which)
        return content

    assert inflatable_utils.pull_objects(["one"], pull) == {"one": b"here"}
    assert waits[0] < 0.1
    assert waits[1] > waits[0]
