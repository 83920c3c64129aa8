"""Quality check: every planted fault is found, and nothing is found in data without one."""

import json
import math
import re
from collections import Counter
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from scipy.stats import binomtest

from fedshift.data.assembly import federation, read_folder
from fedshift.data.checks.duplicates import find_duplicates
from fedshift.data.checks.faults import judge_names
from fedshift.data.checks.quality import check_data, examine, find_faults
from fedshift.data.checks.survey import survey_splits
from fedshift.data.columns import Column
from fedshift.data.digits import digits
from fedshift.data.federation import Federation
from fedshift.data.nuclei import nuclei
from fedshift.data.partition import iid
from fedshift.data.samples import Samples
from fedshift.data.usual_values import find_outlying
from fedshift.tasks import Regression, Survival

X, Y, X_TEST, Y_TEST = range(4)


def make_clients(draw):
    """Clients ann and bob: 40 training and 30 test samples each that ``draw`` makes, of classes 0 and 1 in turn."""
    rng = np.random.default_rng(0)
    return {name: [part for n in (40, 30) for part in (draw(rng, n), np.arange(n) % 2)] for name in ("ann", "bob")}


@pytest.fixture
def arrays():
    """Images, none equal."""
    return make_clients(lambda rng, count: rng.integers(0, 256, (count, 3, 6, 6)).astype(np.uint8))


@pytest.fixture
def vectors():
    """The same clients with 40 features, normal with mean 0 and standard deviation 1."""
    return make_clients(lambda rng, count: rng.normal(size=(count, 40)).astype(np.float32))


def read(path, target="y", task=None, **sites):
    """Return the federation of a table for each site."""
    for site, rows in sites.items():
        rows.to_csv(path / f"{site}.csv", index=False)
    return read_folder(path, target=target, task=task)


def found(data, **fields):
    """Return the findings by kind, in order; each kind is found at most once."""
    data = data if isinstance(data, Federation) else federation(data, **fields)
    findings = examine(data).findings
    kinds = {finding.kind: finding for finding in findings}
    assert len(kinds) == len(findings)
    return kinds


def test_data_without_fault_give_no_finding(arrays, vectors):
    for data in (digits(), federation(arrays), federation(vectors)):
        assert examine(data).findings == ()


def test_a_test_image_in_training_data_is_an_error_that_says_where(arrays):
    arrays["ann"][X][7] = arrays["ann"][X_TEST][5]
    arrays["ann"][Y][7] = arrays["ann"][Y_TEST][5]
    arrays["bob"][X][3] = arrays["ann"][X_TEST][4]
    arrays["bob"][Y][3] = arrays["ann"][Y_TEST][4]
    kinds = found(arrays)
    assert list(kinds) == ["leakage"]
    leak = kinds["leakage"]
    assert (leak.severity, leak.samples, leak.clients) == ("error", 2, ("ann",))
    assert "ann (test) 2 of 30" in leak.text
    assert [" = ".join(places) for places in leak.examples] == [
        "ann test row 5 (label 1) = ann train row 7 (label 1)", "ann test row 4 (label 0) = bob train row 3 (label 0)",
    ]  # fmt: skip


def test_equal_images_of_a_directory_are_named_by_their_files(tmp_path):
    rng = np.random.default_rng(0)
    for number in range(4):
        for client in ("ann", "bob"):
            for part in ("train", "test"):
                file = tmp_path / client / part / f"class-{number % 2}" / f"{number}.png"
                file.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(rng.integers(0, 256, (8, 8), dtype=np.uint8)).save(file)
    copied = tmp_path / "ann" / "train" / "class-1" / "copy.png"
    copied.write_bytes((tmp_path / "bob" / "test" / "class-1" / "3.png").read_bytes())
    data = read_folder(tmp_path)
    for each in (data, data.fit_images(16)):
        leak = examine(each).findings[0]
        assert leak.examples == (("bob/test/class-1/3.png (test)", "ann/train/class-1/copy.png (train)"),)
    assert examine(iid(clients=2)(data)).findings[0].examples[0][0].startswith("client-")


def test_rows_with_few_numbers_may_be_equal_by_chance(vectors):
    def leaking(columns):
        few = {
            name: [part[:, :columns] if part.ndim == 2 else part for part in parts] for name, parts in vectors.items()
        }
        few["ann"][X] = few["ann"][X].copy()
        few["ann"][X][0] = few["ann"][X_TEST][0]
        return found(few)["leakage"]

    assert [leaking(columns).severity for columns in (32, 31)] == ["error", "warning"]
    assert "by chance" in leaking(31).fix
    assert "by chance" not in leaking(32).fix


@pytest.mark.parametrize("copied", [False, True])
def test_a_test_set_that_clients_share_is_no_copy(arrays, copied):
    data = federation(arrays)
    test, everything = data.clients[0].test, torch.arange(30)
    x = [test.x.clone() if copied else test.x for _ in data.clients]
    clients = tuple(
        replace(client, test=Samples(x=own, y=test.y, rows=everything.clone()))
        for client, own in zip(data.clients, x, strict=True)
    )
    kinds = found(replace(data, clients=clients))
    assert list(kinds) == ["common-set"]
    assert (kinds["common-set"].severity, kinds["common-set"].clients) == ("note", ("ann", "bob"))
    leaking = replace(clients[1], train=clients[1].train.replace(x=torch.cat([test.x[:1], clients[1].train.x[1:]])))
    assert found(replace(data, clients=(clients[0], leaking)))["leakage"].samples == 1


def test_copies_agree_with_a_search_of_all_pairs():
    rng = np.random.default_rng(1)
    parts = {
        name: [array for n in counts for array in (rng.integers(0, 2, (n, 1, 2, 2)), rng.integers(0, 2, n))]
        for name, counts in {"a": (13, 9), "b": (21, 9)}.items()
    }
    data = federation(parts, classes=2).hold_out(0.3)
    places = [
        (client.name, name, row, split.x[row].numpy().tobytes(), int(split.y[row]))
        for client in data.clients for name, split in client.splits.items() for row in range(len(split))
        if len(split.x[row].unique()) > 1
    ]  # fmt: skip

    def counted(holds):
        return sum(any(holds(one, other) for other in places if other is not one) for one in places)

    kinds = found(data)
    assert kinds["leakage"].samples == counted(lambda a, b: a[3] == b[3] and a[1] == "test" and b[1] != "test")
    assert kinds["leakage-validation"].samples == counted(
        lambda a, b: a[3] == b[3] and (a[1], b[1]) == ("validation", "train")
    )
    assert kinds["repeats"].samples == counted(lambda a, b: a[3] == b[3] and a[:2] == b[:2] and b[2] < a[2])
    assert kinds["shared"].samples == counted(lambda a, b: a[3] == b[3] and a[1] == b[1] and a[0] != b[0])
    assert kinds["conflict"].samples == sum(
        len({other[4] for other in places if other[3] == one[3]}) > 1 for one in places
    )
    groups = Counter(place[3] for place in places)
    sizes = find_duplicates(survey_splits(data)).groupby("group").size()
    assert sorted(sizes) == sorted(count for count in groups.values() if count > 1)


def test_images_of_one_color_are_no_copies(arrays):
    arrays["ann"][X][:2], arrays["bob"][X_TEST][:3] = 255, np.array([9, 8, 7], np.uint8)[:, None, None]
    kinds = found(arrays)
    assert list(kinds) == ["blank"]
    assert (kinds["blank"].samples, kinds["blank"].severity) == (5, "warning")
    assert "ann (train) 2 of 40, bob (test) 3 of 30" in kinds["blank"].text


def test_values_that_are_no_numbers_are_an_error_and_stay_out_of_the_statistics(vectors):
    vectors["ann"][X][5, 3], vectors["ann"][X][9, 0], vectors["bob"][X_TEST][2, 2] = np.nan, np.inf, -np.inf
    kinds = found(vectors)
    assert list(kinds) == ["not-finite"]
    assert (kinds["not-finite"].severity, kinds["not-finite"].samples) == ("error", 3)
    assert [row for (row,) in kinds["not-finite"].examples] == ["ann train row 5 (label 1)", "bob test row 2 (label 0)"]
    json.dumps(examine(federation(vectors)).as_dict(), allow_nan=False)
    vectors["ann"][X][:] = np.nan
    assert "not-finite" in found(vectors)


def test_findings_on_a_table_name_its_columns(vectors):
    kinds = ("ward", "east", "west", "north")
    columns = (*(Column(name=f"lab {k}") for k in range(37)), Column(name=kinds[0], categories=kinds[1:]))
    for arrays in vectors.values():
        arrays[X][:, [3, 38]] = 2.5
    vectors["bob"][X][:, 7], vectors["bob"][X][:, 6] = 1.0, 1000 * vectors["bob"][X][:, 6]
    vectors["ann"][X_TEST][4, 2], vectors["ann"][X_TEST][5, 9] = -20_000, np.nan
    kinds = found(replace(federation(vectors), columns=columns))
    texts = {kind: finding.text for kind, finding in kinds.items()}
    assert (kinds["constant"].severity, kinds["constant-at-client"].severity) == ("warning", "note")
    assert "columns 'lab 3', 'ward' = 'west' (2 of 40)" in texts["constant"]
    assert "bob columns 'lab 7' (1 of 40)" in texts["constant-at-client"]
    assert "ann (test) -20,000 in 'lab 2'" in texts["large"]
    assert "columns 'lab 6' (1 of 40): bob has" in texts["units"]
    assert texts["units"].endswith("('lab 6').")
    assert "infinite values in columns 'lab 9' (1 of 40): ann (test) 1 of 30" in texts["not-finite"]


def test_features_that_are_not_scaled_are_found(vectors):
    vectors["ann"][X_TEST][3, 2] = -10_000
    assert found(vectors) == {}
    vectors["bob"][X][:, 6] *= 1000
    (units,) = found(vectors).values()
    wide, narrow = (vectors[name][X][:, 6].std() for name in ("bob", "ann"))
    assert f"columns 6 (1 of 40): bob has {wide:.3g} and ann has {narrow:.3g}" in units.text
    for samples, more in ((10, {"units"}), (9, {"no-verdict"})):
        few = {name: [part[:samples] for part in parts] for name, parts in vectors.items()}
        assert found(few).keys() == {"small-test"} | more


def test_classes_missing_where_they_are_needed_are_found(arrays):
    arrays["ann"][Y][:] = np.arange(40) % 3
    arrays["ann"][Y_TEST][:2], arrays["bob"][Y_TEST][:2] = 4, 2
    kinds = found(arrays, classes=7)
    assert {kind: (finding.severity, finding.clients) for kind, finding in kinds.items()} == {
        "unlearned-class": ("warning", ("ann",)),
        "untrained-class": ("warning", ("bob",)),
        "absent-class": ("note", ()),
        "missing-class": ("note", ("bob",)),
    }
    assert kinds["unlearned-class"].text.endswith("ann 4.")
    assert kinds["untrained-class"].text.endswith("bob 2.")
    assert kinds["absent-class"].text.endswith("3, 5, 6.")
    named = replace(federation(arrays, classes=5), class_names=("ant", "bee", "cat", "dog", "elk"))
    assert found(named)["missing-class"].text.endswith("bob cat.")


def test_a_shared_test_set_may_hold_classes_that_a_client_lacks(arrays):
    arrays["ann"][Y][:], arrays["bob"][X_TEST], arrays["bob"][Y_TEST] = 0, arrays["ann"][X_TEST], arrays["ann"][Y_TEST]
    assert list(found(arrays)) == ["common-set", "missing-class"]


@pytest.mark.parametrize("count", [2, 8, 28])
def test_small_test_data_are_said_with_wilsons_interval(arrays, count):
    arrays["bob"] = [*arrays["bob"][:2], *(part[:count] for part in arrays["bob"][2:])]
    low, high = binomtest(count // 2, count).proportion_ci(method="wilson")
    assert f"bob {count} (50 % ± {50 * (high - low):.0f})" in found(arrays)["small-test"].text


def test_findings_come_worst_first_and_pass_through_json(arrays):
    arrays["ann"][X][7] = arrays["ann"][X_TEST][5]
    arrays["bob"][Y][:] = 1
    quality = examine(federation(arrays, classes=3))
    severities = [finding.severity for finding in quality.findings]
    assert list(dict.fromkeys(severities)) == ["error", "warning", "note"]
    assert [(each["client"], each["samples"], each["shape"]) for each in quality.splits[:3]] == [
        ("ann", 40, (3, 6, 6)), ("ann", 30, (3, 6, 6)), ("bob", 40, (3, 6, 6)),
    ]  # fmt: skip
    written = json.loads(json.dumps(quality.as_dict(), allow_nan=False))
    assert written["findings"][0]["examples"][0][0] == "ann test row 5 (label 1)"


@pytest.mark.parametrize("kind", ["arrays", "vectors"])
def test_statistics_taken_in_chunks_are_those_of_the_whole(kind, request, monkeypatch):
    data = federation(request.getfixturevalue(kind))
    part = data.clients[0].train.take(torch.from_numpy(np.random.default_rng(2).permutation(40)[:37]))
    monkeypatch.setattr("fedshift.data.checks.survey.NUMBERS_AT_ONCE", 5 * math.prod(part.shape))
    client = replace(data.clients[0], train=part)
    got = survey_splits(replace(data, clients=(client,)))[0]
    x = part.x.numpy().astype(np.float64)
    axes = tuple(axis for axis in range(x.ndim) if axis != 1)
    for name, value in (("low", x.min(axes)), ("high", x.max(axes)), ("mean", x.mean(axes)), ("std", x.std(axes))):
        np.testing.assert_allclose(getattr(got, name), value, rtol=1e-12, atol=1e-12)
    assert (got.labels == part.y.numpy()).all()
    assert len(np.unique(got.digests, axis=0)) == 37


def test_alike_classes_and_categories_are_found(tiny):
    columns = (Column(name="ward", categories=("h\u00fcndin", "hu\u0308ndin", "x")),)
    classes, categories = judge_names(replace(tiny, class_names=("yes", "no", "Yes "), columns=columns))
    assert (classes.severity, categories.severity) == ("error", "warning")
    assert classes.text.endswith(" or codes of characters: 'yes' and 'Yes '.")
    assert categories.text.startswith("Categories of 'ward' have names that differ only in case, ")
    assert categories.text.endswith(r"'h\xfcndin' and 'hu\u0308ndin'.")


def test_a_patient_in_two_tables_is_found_though_each_site_scales_its_own(tmp_path):
    draw = np.random.default_rng(0)
    north, south = (
        pd.DataFrame(draw.normal(mean, 1 + mean, (40, 40))).add_prefix("c").assign(y=np.arange(40) % 2)
        for mean in (0, 5)
    )
    north.iloc[::3, 2] = np.nan  # filled by another median at each site
    kinds = found(read(tmp_path, north=north, south=pd.concat([south, north[:10]])))
    assert kinds["leakage"].severity == "error"
    assert kinds["leakage"].samples + kinds["shared"].samples / 2 == 10


def test_a_verdict_is_not_kept_where_only_a_unit_changed(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDSHIFT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "sites").mkdir()
    rows = pd.DataFrame(np.random.default_rng(0).normal(5, 1, (40, 40))).add_prefix("c").assign(y=np.arange(40) % 2)
    errors = {}
    for factor in (1024, 1):  # powers of 2 scale without rounding
        other = rows.assign(**{name: rows[name] * factor for name in rows if name != "y"})
        data = read(tmp_path / "sites", north=rows, south=other)
        errors[factor] = data.fingerprint, find_faults(data)[0]
    assert errors[1024][0] != errors[1][0]
    assert (len(errors[1024][1]), len(errors[1][1])) == (0, 1)


def test_copies_in_a_table_of_few_numbers_are_said_when_a_run_starts(tmp_path):
    draw = np.random.default_rng(0)
    north, south = (pd.DataFrame(draw.normal(size=(40, 3))).add_prefix("c").assign(y=np.arange(40) % 2) for _ in "ab")
    for rows, count in ((north, 0), (pd.concat([north, north]), 1)):
        told = check_data(read(tmp_path, north=rows, south=south), "refuse").notices
        assert sum(each.startswith("Test samples are also in training") for each in told) == count


def test_patients_of_one_age_are_no_copies_if_their_times_differ(tmp_path):
    rows = pd.DataFrame({"age": np.arange(40) % 5, "days": np.arange(40) + 1, "died": np.arange(40) // 2 % 2})
    for copies in (0, 10):
        rows.loc[40 - copies :] = rows.loc[: copies - 1].to_numpy()
        kinds = found(read(tmp_path, "days,died", Survival(), north=rows[::2], south=rows[1::2]))
        assert sum(kinds[kind].samples for kind in ("leakage", "repeats") if kind in kinds) == copies


def test_numbers_that_mean_something_else_at_one_site_are_found(tmp_path):
    draw, kinds = np.random.default_rng(0), ("far", "target-units", "constant-target")

    def check(cell=None, factor=1.0):
        north, south = (
            pd.DataFrame({"age": draw.normal(60, 10, 60).round(), "crp": draw.lognormal(1, 1.2, 60)}) for _ in "ab"
        )
        for rows in (north, south):
            rows["kg"] = rows["age"] / 3 + draw.normal(50, 5, 60)
        south["kg"] *= factor
        if cell:
            south.loc[4, cell[0]] = cell[1]
        given = found(read(tmp_path, "kg", Regression(), north=north, south=south))
        return {kind: given[kind].text for kind in kinds if kind in given}

    assert check() == {}
    for name, value in (("age", -999), ("age", 999), ("crp", 9999), ("kg", 1e6), ("crp", -99)):
        where = f", {tmp_path / 'south.csv'}, data row 5" if name != "kg" else ""
        text = f"Values far from all others of their column: south {name!r} {value:g} (1 of 60{where})."
        assert check((name, value))["far"] == text
    assert check(("age", 99)) == {}
    assert check(factor=1000.0)["target-units"].startswith("Targets differ in scale: 'kg' has interquartile ranges of ")
    assert check(factor=0.0) == {"constant-target": "The same target in all samples of a client: south 'kg' = 0."}


def test_a_value_that_flattens_its_column_is_found_and_told_when_a_run_starts(tmp_path):
    draw = np.random.default_rng(0)
    for column in (draw.normal(60, 10, 200), np.ones(200)):
        rows = pd.DataFrame({"dose": column.astype(float), "a": draw.normal(size=200), "y": np.arange(200) % 2})
        other = rows.assign(dose=rows["dose"].where(rows.index != 17, 1e38))
        data = read(tmp_path, north=rows, south=other)
        (told,) = (each for each in check_data(data, "warn").notices if each.startswith("Values"))
        place = f"{tmp_path / 'south.csv'}, data row 18"
        assert told.startswith(f"Values far from all others of their column: south 'dose' 1e+38 (1 of 200, {place}). ")
        assert found(data)["far"].text in told


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ([0] * 99 + [1], []), ([0] * 99 + [250], []), ([0, 5] * 30 + [1000] * 20, []), ([3] * 5 + [1e38], []),
        ([0, 1, 2] * 30 + [999] * 9, ["999 (9 of 99)"]), ([0, 1] * 60 + [1000], ["1000 (1 of 121)"]),
        ([np.nan] * 40 + list(range(20)) + [-1e6], ["-1e+06 (1 of 61)"]),
    ],
)  # fmt: skip
def test_values_are_far_from_others_that_are_few_levels_only_if_rare_or_a_code(values, told):
    assert [text for text, _ in find_outlying(np.array(values, np.float32))] == told


@pytest.mark.parametrize("classes", [2, 3])
def test_a_column_that_is_known_with_the_outcome_alone_is_found(tmp_path, classes):
    sites = {}
    for site, draw in (("north", np.random.default_rng(0)), ("south", np.random.default_rng(1))):
        y = draw.integers(0, classes, 120)
        rows = pd.DataFrame({"y": y, "age": draw.normal(60 + 5 * y, 10), "sex": draw.choice(["f", "m"], 120)})
        rows["outcome_code"] = np.array([7, 3, 5])[y]
        rows["ward"] = np.array(["surgery", "heart", "eye"])[np.where(draw.random(120) < 0.005, 0, y)]
        rows["serial"] = y.argsort(kind="stable").argsort() + 1000
        rows["slide"] = [f"s{n % 40}" for n in range(120)]
        sites[site] = rows.assign(lab=draw.normal(60 + 3 * y, 1))
    data = read(tmp_path, **sites)
    told = found(data)["leak"].text
    named = [name for name in ("outcome_code", "ward", "serial", "age", "sex", "slide") if repr(name) in told]
    assert named == ["outcome_code", "ward", "serial"]
    assert any(line.startswith(told) for line in check_data(data, "refuse").notices)
    kept = read_folder(tmp_path, target="y", ignore_columns="outcome_code,ward,serial,lab")
    assert "leak" not in found(kept)
    names = {site: [f"{site} {number}" for number in range(25)] for site in sites}
    frames = {site: pd.DataFrame({"y": np.arange(25) % classes, "name": own}) for site, own in names.items()}
    assert "leak" not in found(read(tmp_path, **frames))


@pytest.mark.parametrize("per_site", [True, False])
def test_a_column_that_numbers_the_rows_is_found(tmp_path, per_site):
    draw = np.random.default_rng(0)
    place = draw.permutation(200) + 1
    rows = pd.DataFrame({"y": draw.integers(0, 2, 200), "age": draw.integers(20, 90, 200), "serial": place})
    rows["lab"] = draw.choice(100_000, 200, replace=False)
    if per_site:
        rows["serial"] = np.resize(np.arange(100), 200)
    text = found(read(tmp_path, north=rows[:100], south=rows[100:]))["row-number"].text
    assert text == "Columns that seem to number the rows are features: 'serial'."


def test_a_column_that_orders_a_numeric_target_is_found(tmp_path):
    sites = {}
    for site, draw in (("north", np.random.default_rng(0)), ("south", np.random.default_rng(1))):
        kg, age, taller = draw.normal(75, 10, 80), draw.normal(60, 10, 80), draw.normal(100, 5, 80)
        sites[site] = pd.DataFrame({"kg": kg, "age": age, "pounds": (2.2046 * kg).round(1), "height": kg + taller})
    text = found(read(tmp_path, "kg", Regression(), **sites))["leak"].text
    assert re.fullmatch(r".*the target: 'pounds' \(rank correlation with 'kg' of (0\.99\d\d|1\.0000)\)\.", text)


@pytest.mark.parametrize(("scaling", "severity"), [("client", "note"), ("none", "warning")])
def test_a_column_in_another_unit_at_one_site_is_found(tmp_path, scaling, severity):
    for number, site in enumerate(("north", "south", "west")):
        draw = np.random.default_rng(number)
        rows = pd.DataFrame({"glucose": draw.normal(5.4, 1.2, 60), "age": draw.normal(60 + 5 * number, 10, 60)})
        if site == "west":
            rows["glucose"] *= 18
        rows.assign(y=np.arange(60) % 2).to_csv(tmp_path / f"{site}.csv", index=False)
    finding = found(read_folder(tmp_path, target="y", scaling=scaling))["apart"]
    assert (finding.severity, finding.clients) == (severity, ("west",))
    assert re.match(
        r"Values far from all other clients': west column 'glucose': about 1\d times larger: ", finding.text
    )
    assert ("alone changes nothing" in finding.fix) == (scaling == "client")


def test_images_on_another_scale_at_one_site_are_found(arrays):
    arrays["bob"][X] //= 64
    finding = found(arrays)["apart"]
    assert (finding.clients, "bob channel 0: about" in finding.text) == (("bob",), True)


def test_sites_that_number_classes_from_0_and_from_1_are_found(tmp_path):
    n = np.arange(60)
    frames = [pd.DataFrame({"a": n + start / 8, "study_id": n, "y": start % 2 + n % 2}) for start in range(3)]
    kinds = found(read(tmp_path, north=frames[0], south=frames[1], west=frames[2]))
    assert "missing-class" not in kinds
    assert kinds["numbering"].text == "Classes seem to be numbered in two ways: north, west from 0 and south from 1."
    assert kinds["group-column"].text.endswith("features: 'study_id'.")
    assert "numbering" not in found(read_folder(tmp_path, ["north", "west"], target="y"))


def test_inverted_masks_and_swapped_classes_are_found_and_real_masks_are_not():
    real = nuclei()
    assert "swapped-masks" not in found(real)
    for name in real.names[:2]:
        clients = tuple(
            each.with_splits({k: split.replace(y=1 - split.y) for k, split in each.splits.items()})
            if each.name == name else each for each in real.clients
        )  # fmt: skip
        finding = found(replace(real, clients=clients))["swapped-masks"]
        assert finding.clients == (name,)
        assert f" at {name}, but " in finding.text
    draw = np.random.default_rng(0)
    x, shares = draw.integers(0, 256, (8, 10, 10)).astype(np.uint8), (0.75, 0.22, 0.03)
    masks = [draw.choice(3, (8, 10, 10), p=shares).astype(np.uint8) for _ in range(3)]
    masks[1] = np.array([0, 2, 1], np.uint8)[masks[1]]
    text = found(federation({name: (x, y, x, y) for name, y in zip("abc", masks, strict=True)}))["swapped-masks"].text
    assert re.match(
        r"Masks seem to swap the classes 1 and 2: class 2 covers 2\d\.\d% at b, but [234]\.\d% at a, ", text
    )


def test_masks_without_foreground_are_noted_and_pixels_counted():
    x = np.random.default_rng(0).integers(0, 256, (6, 8, 8)).astype(np.uint8)
    masks = np.zeros((6, 8, 8), np.uint8)
    masks[:, 2:4, 2:4] = 1
    masks[4], masks[4, 0] = 0, 255
    quality = examine(federation({"ann": (x[:5], masks[:5], x[5:], masks[5:])}))
    assert [part["per_class"] for part in quality.splits] == [(5 * 64 - 8 - 4 * 4, 4 * 4), (60, 4)]
    note, _ = quality.findings
    assert (note.kind, note.severity, note.samples) == ("empty-mask", "note", 1)
    assert note.text == "Masks of background only: ann (train) 1 of 5."
    assert note.examples[0][0] == "ann train row 4"


def test_groups_on_two_sides_are_found_at_one_client_and_across_clients(arrays):
    data = federation(arrays)
    numbers = {"ann": (range(40), range(100, 130)), "bob": (range(200, 240), [*range(300, 328), 5, 5])}

    def group(shift=0):
        clients = []
        for client in data.clients:
            train, test = map(torch.tensor, map(list, numbers[client.name]))
            owners = {"train": train, "test": test + shift}
            splits = {n: Samples(x=s.x, y=s.y, group=owners[n]) for n, s in client.splits.items()}
            clients.append(client.with_splits(splits))
        return replace(data, clients=tuple(clients))

    across = found(group())["groups"]
    assert (across.severity, across.samples, across.clients) == ("error", 2, ("bob",))
    assert across.text == "Groups with test samples also have train samples, at any client: 1 of 29 of bob."
    assert found(group(-100))["groups"].text.endswith("30 of 30 of ann, 28 of 29 of bob.")
    assert "groups" in found(iid(clients=2, test="same")(group()))
