"""Fed-TCGA-BRCA: FLamby's numbers of patients, and files of its layout."""

import os
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fedshift.data.datasets.tcga_brca import tcga_brca
from fedshift.tasks import Survival
from fedshift.utils.errors import UsageError

DATA = Path(os.environ.get("FEDSHIFT_DATA", ""))
PRESENT = os.environ.get("FEDSHIFT_DATA") and (DATA / "fed_tcga_brca").is_dir()


@pytest.mark.skipif(not PRESENT, reason="FEDSHIFT_DATA has no fed_tcga_brca")
def test_the_files_have_the_patients_that_flamby_states():
    data = tcga_brca(DATA)
    sizes = [len(client.train) + len(client.test) for client in data.clients]
    assert sizes == [311, 196, 206, 162, 162, 51]  # arXiv:2210.04620, table 1
    assert data.task == Survival()
    assert data.sample_shape == (39,)
    for client in data.clients:
        data.task.check_targets(client.train.y, (39,), 1, client.name)


def write_files(folder, features=39):
    folder.mkdir()
    names = [f"p{number}" for number in range(24)]
    table = pd.DataFrame(np.arange(24 * features, dtype=float).reshape(24, -1)).assign(E=1, T=range(1, 25))
    table.insert(0, "pid", names)
    table.to_csv(folder / "brca.csv", index=False)
    folds = [f"{part}_{region}" for region in range(6) for part in ("train", "train", "test")] + [""] * 6
    pd.DataFrame({"pid": names, "fold": "", "fold2": folds}).to_csv(folder / "train_test_split.csv", index=False)


def test_patients_belong_to_the_region_and_fold_of_the_file(tmp_path):
    write_files(tmp_path / "fed_tcga_brca")
    data = tcga_brca(tmp_path)
    assert data.names == ("northeast", "south", "west", "midwest", "europe", "canada")
    assert data.client("south").train.y.tolist() == [[4, 1], [5, 1]]
    assert data.client("canada").test.y.tolist() == [[18, 1]]
    write_files(tmp_path / "tcga-brca", features=3)
    with pytest.raises(UsageError, match="has 3 features, expected were 39"):
        tcga_brca(tmp_path)
