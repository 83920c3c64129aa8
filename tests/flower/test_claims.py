"""A site that claims more samples than it has gets no more than its share, takes no memory, and is named."""

from dataclasses import replace

import pytest

from fedshift.flower.server.claims import judge_claims
from fedshift.flower.server.registry import ClientRegistry, SiteDescription
from fedshift.flower.transport.arrays import from_record, to_record
from fedshift.results.checkpoint import load_checkpoint
from tests.flower.sites import Heard, SiteGrid, coordinator, sites_of, spec_for
from tests.flower.test_registry import SOUND

NETWORK, WEIGHT = "tests.flower.gated:network", "1.weight"
CLAIMED, BATCH, PHOTO = 400_000, 32, 2


@pytest.mark.parametrize(("max_share", "share"), [(0.5, 1 / 2), (0.25, 1 / 3), (1.0, CLAIMED / (CLAIMED + 48))])
def test_a_site_that_claims_many_samples_does_not_decide_alone(max_share, share, tmp_path, machine):
    spec = spec_for("fedavg", model=NETWORK, rounds=1, evaluate_every=1, samples=24, batch_size=BATCH)
    grid, heard = SiteGrid(sites_of(spec, tmp_path, code=frozenset({NETWORK}))), Heard()

    def tamper(node, question, answer):
        if question.kind == "describe" and node == PHOTO:
            samples = {**answer.facts["samples"], "train": CLAIMED}
            return replace(answer, facts={**answer.facts, "samples": samples})
        if question.kind != "train":
            return answer
        value = 1000.0 if node == PHOTO else 0.0
        state = {name: tensor.fill_(value) if name == WEIGHT else tensor
                 for name, tensor in from_record(answer.arrays["shared"]).items()}  # fmt: skip
        facts = answer.facts | ({"weight": float(CLAIMED), "steps": CLAIMED // BATCH} if node == PHOTO else {})
        return replace(answer, facts=facts, arrays={**answer.arrays, "shared": to_record(state)})

    grid.tamper = tamper
    assert coordinator(spec, grid, tmp_path / "run", heard, update_bound=0, max_share=max_share).run()
    assert [done.participants for done in heard.rounds] == [("pen", "photo", "print")]
    (place,) = (tmp_path / "run" / "trials").iterdir()
    found = load_checkpoint(place / "checkpoint.safetensors")[0][f"server/shared/{WEIGHT}"]
    assert found.unique().tolist() == pytest.approx([1000 * share])
    (named,) = [text for text in heard.notices if "claims" in text]
    assert named.startswith("photo claims 400000 training samples, 99.9880% of all; the others' median is 24.")
    assert named.endswith("Ask the site whether that is correct")
    assert ("--max-share" in named) == (max_share < 1)


def test_a_claim_takes_no_memory_of_the_coordinator():
    described = [
        SiteDescription.of({**SOUND, "name": name, "labels": None, "samples": {"train": number, "test": number}})
        for name, number in (("a", 24), ("b", 24), ("c", 10**8))
    ]
    data = ClientRegistry(clients=tuple(described)).to_federation(None)
    splits = [split for client in data.clients for split in client.splits.values()]
    held = sum(part.untyped_storage().nbytes() for each in splits for part in (each.y, each.rows, each.store))
    assert sum(map(len, splits)) > 10**8
    assert held < 10**5


def test_claims_that_are_usual_are_not_named():
    assert not [*judge_claims({"a": 100, "b": 120, "c": 130}, 0.5)]
    assert not [*judge_claims({"a": 1}, 0.5)]
    assert not [*judge_claims({"a": 1, "b": 90}, 0.5)]
    (bounded,) = judge_claims({"a": 10, "b": 10, "c": 80}, 0.5)
    assert bounded == (
        "c claims 80 training samples, 80.0000% of all; the others' median is 10. In averages weighted by samples, it "
        "counts as 20 (--max-share)"
    )
    (implausible,) = judge_claims({"a": 1, "b": 101}, 0.5)
    assert implausible == (
        "b claims 101 training samples, 99.0196% of all; the others' median is 1. Ask the site whether that is correct"
    )
