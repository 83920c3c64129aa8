"""A coordinator holds few answers at a time, however many have come: large ones are fetched one after another."""

import pytest

from fedshift.flower import nodes
from tests.flower.sites import Heard, SiteGrid, coordinator, same_as_in_process, sites_of, spec_for


class Watched(SiteGrid):
    """``most``: the most answers with arrays that were fetched at a time."""

    most = 0

    def pull_messages(self, message_ids):
        replies = super().pull_messages(message_ids)
        self.most = max(self.most, sum(bool(reply.content.array_records) for reply in replies))
        return replies


@pytest.mark.parametrize(("together", "most"), [(1, 1), (2**26, 3)])
def test_large_answers_are_fetched_one_at_a_time(together, most, tmp_path, machine, monkeypatch):
    monkeypatch.setattr(nodes, "TOGETHER", together)
    spec = spec_for("fedavg", rounds=1)
    grid = Watched(sites_of(spec, tmp_path))
    assert coordinator(spec, grid, tmp_path / "served", Heard()).run()
    assert grid.most == most
    same_as_in_process(spec, tmp_path / "served", tmp_path, tmp_path / "reference")
