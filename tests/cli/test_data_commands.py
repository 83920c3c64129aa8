"""The data commands: list, check, show and diagnose before anything trains."""

import json
import re
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from markupsafe import escape
from PIL import Image
from rich.console import Console

from fedshift.console import terminal
from fedshift.console.terminal import show_loading


@pytest.fixture
def photos(tmp_path):
    """Two clients with folders of images of two sizes and classes, one of which cannot be read."""
    rng = np.random.default_rng(0)
    for client, size in (("north", 12), ("south", 16)):
        for label in ("cat", "dog"):
            folder = tmp_path / "photos" / client / label
            folder.mkdir(parents=True)
            for number in range(10):
                Image.fromarray(rng.integers(0, 256, (size, size, 3), dtype=np.uint8)).save(folder / f"{number}.png")
    (tmp_path / "photos/north/cat/3.png").write_bytes(b"no image")
    return tmp_path / "photos"


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDSHIFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")


def test_the_list_says_what_is_here(cli, tmp_path):
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (20, 28, 28), dtype=np.uint8)
    np.savez(
        tmp_path / "mnist.npz", x_train=images, y_train=np.arange(20) % 10, x_test=images, y_test=np.arange(20) % 10
    )
    done = cli("data", "list", "--root", tmp_path)
    assert done.code == 0
    rows = {line.split()[0]: line for line in done.out.splitlines() if line[:1].strip()}
    assert rows["mnist"].split()[1] == "yes"
    assert rows["usps"].split()[1] == "no"
    assert rows["gaussians"].split()[1] == "made"
    said = " ".join(done.out.split())
    assert "License: CC BY-NC-SA 3.0." in said
    assert "Source: Di Martino et al. 2014" in said
    assert "(or fedshift data fetch mnist)" in said


def test_a_benchmark_that_is_not_known_is_not_fetched(cli):
    done = cli("data", "fetch", "mnits")
    assert (done.code, "did you mean 'mnist'" in done.err) == (2, True)


def test_the_check_names_what_is_wrong_and_exits_with_one(cli, tiny_folder, rewrite, tmp_path):
    assert cli("data", "check", tiny_folder).code == 0
    with np.load(tiny_folder / "bob.npz") as packed:
        x, y = packed["x_train"], packed["y_train"]
    rewrite("bob", x_test=x[:5], y_test=y[:5])
    done = cli("data", "check", tiny_folder, "--json", tmp_path / "found.json")
    assert done.code == 1
    assert "bob" in done.out
    leaks = [
        found for found in json.loads((tmp_path / "found.json").read_text())["findings"] if found["kind"] == "leakage"
    ]
    assert [found["samples"] for found in leaks] == [5]


def test_the_check_goes_on_without_broken_images_and_names_them(cli, photos):
    done = cli("data", "check", photos, "--image-size", 16, "--json", "found.json")
    said = " ".join(done.out.split())
    assert done.code == 1
    assert "north/cat/3.png" in said
    assert "Training would refuse these data" in said
    facts = json.loads(Path("found.json").read_text())
    assert "--on-data-error warn" in facts["refusal"]
    assert any("3.png" in notice for notice in facts["notices"])
    refused = cli("compare", "--data", photos, "--image-size", 16)
    assert (refused.code, "--on-data-error warn" in refused.err) == (2, True)


@pytest.mark.slow
def test_images_of_several_sizes_are_shown_but_trained_on_only_at_a_size_that_is_given(cli, photos, tmp_path):
    shown = cli("data", "show", photos, "--on-data-error", "warn", "--out", tmp_path / "pictures")
    assert shown.code == 0, shown.err
    assert {file.name for file in (tmp_path / "pictures").iterdir()} == {
        f"{name}.{suffix}" for name in ("samples", "classes") for suffix in ("png", "svg", "pdf")
    }
    refused = cli("run", "--data", photos, "--on-data-error", "warn")
    assert (refused.code, "--image-size" in refused.err) == (2, True)


@pytest.mark.slow
def test_a_split_is_drawn_and_saved(cli, tmp_path, monkeypatch, vector_only):
    drawn = ("--split", "dirichlet(clients=6, alpha=0.3)", "--image-size", 8)
    done = cli("data", "show", "digits", *drawn, "--out", tmp_path / "pictures")
    assert done.code == 0, done.err
    assert "client-5" in done.out
    assert "a network is given pixels in [0, 1] minus 0.5 over 0.5 (FedBN, arXiv:2102.07623" in done.out
    assert (tmp_path / "pictures/split.csv").read_text().startswith("client,split,domain,source,row\n")
    monkeypatch.setattr("fedshift.diagnosis.overview.draw_overview", lambda *_, **__: [])
    kept = ("--split", f"saved(path='{tmp_path}/pictures/split.csv')", "--image-size", 8)
    again = cli("data", "show", "digits", *kept, "--out", tmp_path / "pictures")
    assert again.out.splitlines()[:8] == done.out.splitlines()[:8]


@pytest.mark.slow
def test_a_diagnosis_is_printed_and_has_a_page_of_its_table_pictures_and_command(cli, tmp_path):
    asked = ("diagnose", "digits", "--permutations", 99, "--samples", 60, "--out", tmp_path / "new" / "page")
    done = cli(*asked)
    assert done.code == 0, done.err
    page, found = ((tmp_path / "new" / "page" / name).read_text() for name in ("diagnosis.html", "found.json"))
    rows = re.findall(r'<tr><th scope="row"><span>(.*?)</span></th>(.*?)</tr>', page)
    cells = {name: re.findall(r"<td>(.*?)</td>", rest) for name, rest in rows}
    shifts = {each["sites"]: each for each in json.loads(found)["shifts"] if each["shift"] == "feature shift"}
    assert shifts.keys() == cells.keys()
    one = shifts["pen and photo"]
    assert cells["pen and photo"][2] == f"{one['value']:.2f} ({one['low']:.2f} to {one['high']:.2f})"
    command = next(line for line in done.out.splitlines() if line.startswith("fedshift sweep"))
    assert "fedbn" in command
    assert f'<pre class="command">{escape(command)}</pre>' in page
    assert page.count("<svg ") == 2
    assert "<script" not in page
    assert not re.search(r'(?:src|href)="(?!#|data:)', page)
    assert "This page holds pictures of training samples of pen, photo, print, faded, worn." in page
    assert cli(*asked, "--json", tmp_path / "found.json").code == 0
    assert (tmp_path / "found.json").read_text() == found
    assert (tmp_path / "new" / "page" / "diagnosis.html").read_bytes() == page.encode()
    assert cli(*asked, "--no-pictures").code == 0
    bare = (tmp_path / "new" / "page" / "diagnosis.html").read_text()
    assert [text in bare for text in ("data:image", "holds pictures", "<svg ")] == [False, False, True]


def test_a_page_of_a_diagnosis_is_not_begun_where_a_file_is(cli, tmp_path):
    (tmp_path / "taken").write_text("")
    done = cli("diagnose", "digits", "--out", tmp_path / "taken")
    assert (done.code, "taken is a file: choose another directory" in done.err) == (2, True)


@pytest.mark.parametrize("command", [("data", "check"), ("data", "show"), ("diagnose",)])
def test_data_that_do_not_exist_are_refused(cli, command):
    done = cli(*command, "no/such/place")
    assert (done.code, "there is no" in done.err) == (2, True)


def test_a_benchmark_is_fetched_to_where_root_says(cli, tmp_path, monkeypatch):
    asked = []

    def download(name, card, root, *, progress):
        asked.append((name, card.title, root))
        return [root / name / "one.gz", root / name / "two.gz"]

    monkeypatch.setattr("fedshift.data.downloads.fetch", download)
    done = cli("data", "fetch", "mnist", "--root", tmp_path / "kept")
    assert asked == [("mnist", "MNIST", tmp_path / "kept")]
    assert done.out.split() == [str(tmp_path / "kept" / "mnist" / name) for name in ("one.gz", "two.gz")]


@pytest.mark.slow
def test_the_suggested_command_repeats_what_was_asked_for(cli, tiny_folder):
    done = cli("diagnose", tiny_folder, "--permutations", 99, "--split", "iid(clients=3)", "--classes", 3)
    spoken = next(line for line in done.out.splitlines() if line.startswith("fedshift sweep"))
    assert f"--data {tiny_folder} --split 'iid(clients=3)' --classes 3 --methods fedavg" in spoken


def test_on_a_terminal_loading_is_a_bar():
    console = Console(force_terminal=True, width=100, file=StringIO())
    with show_loading(console) as progress:
        progress("images of north", 3, 12)
        progress("images of north", 12, 12)
    assert "images of north" in console.file.getvalue()
    assert "12/12" in console.file.getvalue()


@pytest.mark.slow
def test_many_clients_are_summed_up_on_the_terminal_and_kept_in_tables(cli, undrawn, tmp_path):
    split = ("--split=iid(clients=60)", "--image-size", 8)
    done = cli("run", "--method", "fedbn", "--rounds", 1, *split, "--participation", 5, "--out", tmp_path / "run")
    assert done.code == 0, done.err
    table = done.out[done.out.index("Test accuracy") :]
    assert "client-01" not in table.split("Each client is in")[0]
    assert len(re.findall("not measured at the reported round", table)) == 1
    assert "and 45 more: not measured" in " ".join(table.split())
    assert "client-59" in (tmp_path / "run/tables/accuracy.csv").read_text()


@pytest.mark.slow
def test_images_of_several_sizes_are_diagnosed_and_the_command_gives_a_size(cli, photos):
    done = cli("diagnose", photos, "--on-data-error", "warn", "--permutations", 99)
    assert done.code == 0, done.err
    assert "images of several sizes are resized to 64 x 64 pixels" in done.out
    spoken = next(line for line in done.out.splitlines() if line.startswith("fedshift sweep"))
    assert f"--data {photos} --image-size 64 --on-data-error warn" in spoken


def test_scaling_that_takes_a_shift_away_is_said_and_can_be_left_out(cli, tmp_path):
    rng = np.random.default_rng(0)
    lines = [f"{site},{rng.normal(site == 'far') * 3},{k % 2}" for site in ("near", "far") for k in range(120)]
    (tmp_path / "stays.csv").write_text("\n".join(["site,age,outcome", *lines]))
    asked = ("diagnose", tmp_path / "stays.csv", "--client-column", "site", "--target", "outcome", "--permutations", 99)
    scaled, raw = (" ".join(cli(*asked, *more).out.split()) for more in ((), ("--scaling", "none")))
    assert "--scaling none shows them" in scaled
    assert "Feature shift is not found" in scaled
    assert "--scaling none shows them" not in raw
    assert "Feature shift: from features" in raw


def test_the_check_fails_where_training_refuses_and_passes_with_the_flags_that_training_needs(cli, photos):
    flags = ("--on-data-error", "warn", "--image-size", 16)
    assert cli("data", "check", photos, *flags[:2]).code == 1  # of two sizes
    assert cli("data", "check", photos, *flags).code == 0
    assert cli("data", "show", photos, *flags, "--out", photos / "north/cat/1.png").code == 2


@pytest.mark.slow
def test_no_validation_is_suggested_where_there_is_some(cli, tiny_folder, rewrite):
    with np.load(tiny_folder / "bob.npz") as packed:
        x, y = packed["x_train"], packed["y_train"]
    rewrite("bob", x_val=x[:4], y_val=y[:4])
    done = cli("diagnose", tiny_folder, "--permutations", 99)
    spoken = next(line for line in done.out.splitlines() if line.startswith("fedshift sweep"))
    assert "--validation" not in spoken


@pytest.mark.slow
def test_what_decoding_adds_to_the_cache_is_said_once_and_can_be_cleared(cli, photos, tmp_path, monkeypatch):
    images = tmp_path / "cache" / "images"
    monkeypatch.setattr(terminal, "ANNOUNCED", 1)
    first = cli("data", "check", photos)
    held = sum(path.stat().st_size for path in images.rglob("*.*"))
    kept = f"{held / 1000:.3g} kB"
    said = [line for line in first.out.splitlines() if line.startswith("Decoded images are kept")]
    assert said == [
        f"Decoded images are kept for the next time: {kept} in {images}, in all {kept} of at most 20 GB "
        "(FEDSHIFT_CACHE_LIMIT); `fedshift data cache --clear` removes them."
    ]
    assert "Decoded images" not in cli("data", "check", photos).out
    assert cli("data", "cache").out == f"{images}: {kept} of at most 20 GB (FEDSHIFT_CACHE_LIMIT)\n"
    cleared = cli("data", "cache", "--clear").out
    assert cleared == f"{images}: {kept} of at most 20 GB (FEDSHIFT_CACHE_LIMIT), now 0 B\n"
    assert list(images.iterdir()) == []
    monkeypatch.setenv("FEDSHIFT_CACHE_LIMIT", "inf")
    assert cli("data", "cache").out == f"{images}: 0 B without a limit (FEDSHIFT_CACHE_LIMIT)\n"
    monkeypatch.setenv("FEDSHIFT_CACHE_LIMIT", "none")
    assert "FEDSHIFT_CACHE_LIMIT=none: give gigabytes" in cli("data", "check", photos).err
