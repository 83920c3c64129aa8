"""Five real digit domains, where FEDSHIFT_DATA names the directory that holds them; elsewhere nothing is tested."""

import os
from pathlib import Path

import pytest

import fedshift

DOMAINS = ["mnist", "usps", "mnistm", "svhn_subset", "chars74k_fnt"]
DATA = Path(os.environ.get("FEDSHIFT_DATA", ""))

if all((DATA / f"{name}.npz").is_file() for name in DOMAINS):

    def test_gray_and_color_domains_of_different_sizes_become_one_federation():
        raw = fedshift.read_folder(DATA, DOMAINS)
        assert [tuple(client.train.x.shape[1:]) for client in raw.clients] == [
            (1, 28, 28), (1, 16, 16), (3, 32, 32), (3, 32, 32), (1, 28, 28),
        ]  # fmt: skip
        data = raw.fit_images().check()
        assert data.sample_shape == (3, 28, 28)
        assert (data.names, data.classes) == (tuple(DOMAINS), 10)
        assert [len(client.train) for client in data.clients] == [7438, 7291, 7438, 554, 7438]
        # Resizing and repeating gray keep what an image shows: means stay within one level of 255.
        for before, after in zip(raw.clients, data.clients, strict=True):
            assert abs(float(before.train.x.double().mean()) - float(after.train.x.double().mean())) < 1

    @pytest.mark.slow
    def test_a_comparison_runs_on_them(undrawn):
        data = fedshift.read_folder(DATA, DOMAINS).fit_images(8).limit_samples(64)
        result = fedshift.compare([fedshift.fedavg(), fedshift.fedbn()], data=data, rounds=1, lr=0.05)
        table = result.table()
        assert list(table.index[:5]) == DOMAINS
        assert table.xs("mean", axis=1, level="statistic").notna().all(axis=None)
        assert {row["samples"] for _, row in result.summary.rows.query("split == 'test'").iterrows()} == {
            10000, 2007, 4000, 486, 2722,
        }  # fmt: skip
