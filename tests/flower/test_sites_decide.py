"""A site's decisions hold between real processes: consent at a terminal, limits over restarts, and a signed ledger."""

import os
import pty

import pytest

from tests.flower.processes import machines, until
from tests.flower.sites import spec_for
from tests.flower.test_deployment import files  # noqa: F401 - a fixture

pytestmark = pytest.mark.slow


def test_a_site_is_asked_first_and_sends_no_more_than_it_allows(tmp_path, files, cli):  # noqa: F811
    spec = spec_for(data=files, domains="pen,photo", samples=None, image_size=None, rounds=1, evaluate_every=1)
    (tmp_path / "once.toml").write_text("[limits]\nleast_steps = 1\nuploads = 1\n")
    with machines(tmp_path, spec) as two:
        coordinator = two.serve("--min-clients", 2)
        photo = two.join("photo")
        terminal, two.stdin = pty.openpty()
        pen = two.join("pen", "--confirm", policy="once.toml")
        pen.says("Tell the coordinator this? [y/N]")
        coordinator.says("photo is connected")
        assert "pen is connected" not in coordinator.said
        os.write(terminal, b"y\n")
        coordinator.says("pen is connected")
        pen.says("Take part in it? [y/N]")
        assert not two.rounds_done
        os.write(terminal, b"y\n")
        assert coordinator.ends() == 0, coordinator.said
        assert [pen.ends(), photo.ends()] == [0, 0]
        # another experiment: the site is asked again, and its data have no upload left
        two.served = tmp_path / "renamed"
        coordinator = two.serve("--min-clients", 2)
        two.join("photo")
        pen = two.join("pen", policy="once.toml")
        pen.says("this site's policy allows 1 uploads of its data in all, and 1 were sent (uploads)")
        assert coordinator.ends() == 1
        assert not two.rounds_done
    keys, record = tmp_path / "tls" / "nodes", tmp_path / "served" / "machines" / "ledgers.jsonl"
    done = cli("ledger", tmp_path / "pen", "--key", keys / "pen.pub", "--anchors", record)
    assert done.code == 0, done.err
    assert "lines and agreed: disclosed to the coordinator: name 'pen'" in done.out
    assert "The coordinator's record confirms " in done.out
    assert "1 uploads, " in done.out


def test_an_upload_of_one_sample_does_not_leave_a_site_without_a_policy(tmp_path, files, cli):  # noqa: F811
    own = {"data": files, "domains": "pen,photo", "samples": None, "image_size": None}
    spec = spec_for("fedavg", model="fnn2", rounds=1, batch_size=1, batches=1, **own)
    with machines(tmp_path, spec) as two:
        coordinator = two.serve("--min-clients", 2)
        sites = [two.join(name, policy=None) for name in two.names]
        said = "an upload would use 1 different samples, and this site's policy asks for 16 (least_samples)"
        for site in sites:
            site.says(said)
        until(lambda: coordinator.code is not None, "the end of", coordinator)
        assert coordinator.said.count(said) >= 2
        assert not two.rounds_done
    assert "trained" not in cli("ledger", tmp_path / "pen").out
