"""Samples with several inputs at several sites: the results of one process, and sites that differ are named."""

from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from torch import nn

from fedshift.config.spec import RunSpec
from fedshift.data.assembly import read_folder
from fedshift.flower.server.registry import ClientRegistry, SiteDescription
from fedshift.flower.site.site import Site
from fedshift.utils.errors import FedshiftError
from tests.flower.sites import SMALLEST, Heard, SiteGrid, coordinator, same_as_in_process
from tests.flower.test_registry import SOUND

INPUTS = [{"name": "ids", "shape": [5], "kind": "integers"}, {"name": "age", "shape": [], "kind": "floats"}]


class Both(nn.Module):
    def __init__(self, shapes, classes):
        super().__init__()
        assert shapes == {"ids": (5,), "age": ()}
        self.embedding, self.norm, self.head = nn.Embedding(9, 4), nn.BatchNorm1d(4), nn.Linear(5, classes)

    def forward(self, ids, age):
        return self.head(torch.cat([self.norm(self.embedding(ids).mean(1)), age[:, None]], dim=1))


@pytest.mark.usefixtures("machine")
def test_sites_give_the_results_of_one_process_bit_for_bit(tmp_path):
    place = tmp_path / "data"
    place.mkdir()
    for seed, (name, count) in enumerate({"north": 9, "south": 6}.items()):
        rng, arrays = np.random.default_rng(seed), {}
        for split in ("train", "test"):
            arrays[f"x_{split}.ids"] = rng.integers(0, 9, (count, 5))
            arrays[f"x_{split}.age"], arrays[f"y_{split}"] = rng.normal(size=count), np.arange(count) % 2
        np.savez(place / f"{name}.npz", **arrays)
    code = f"{__name__}:Both"
    spec = RunSpec(data=str(place), method="fedbn", model=code, rounds=2, batch_size=4)
    sites = {
        number: Site(str(file), file.stem, tmp_path / "sites" / file.stem, code=frozenset({code}), policy=SMALLEST)
        for number, file in enumerate(sorted(place.iterdir()), 1)
    }
    coordinator(spec, SiteGrid(sites), tmp_path / "run", Heard()).run()
    same_as_in_process(spec, tmp_path / "run", tmp_path / "sites", tmp_path / "reference")
    data = read_folder(place)
    assert list(map(asdict, data.inputs)) == [{**each, "shape": tuple(each["shape"])} for each in INPUTS]


def describe(name, inputs):
    return SiteDescription.of({**SOUND, "name": name, "shape": [6], "dtype": "float32", "inputs": inputs})


def test_sites_whose_inputs_differ_are_named():
    one = describe("north", INPUTS)
    made = ClientRegistry().add_clients([one, replace(one, name="south")]).to_federation(None)
    assert made.inputs == one.inputs
    assert "ids [N, 5] (integers)" in made.fingerprint
    others = {
        "'north': the inputs 'ids', 'age', and site 'east': 'age', 'ids'": INPUTS[::-1],
        r"the input age \[N\] \(floats\), and site 'east': age \[N\] \(integers\)": [
            INPUTS[0], {**INPUTS[1], "kind": "integers"}
        ],
        "'east': samples are one array, and site 'north': they have the inputs 'ids', 'age'": [],
    }  # fmt: skip
    for said, inputs in others.items():
        with pytest.raises(FedshiftError, match=said):
            ClientRegistry().add_clients([one, describe("east", inputs)]).to_federation(None)


@pytest.mark.parametrize(
    "inputs",
    [INPUTS[:1], [INPUTS[0], INPUTS[0]], [{**INPUTS[0], "shape": [-5]}, INPUTS[1]], [{**INPUTS[0], "kind": "x"}]],
)
def test_inputs_that_cannot_be_are_refused(inputs):
    with pytest.raises(FedshiftError, match=r"site 'east' reports samples of shape \(6,\) with|malformed"):
        describe("east", inputs)
