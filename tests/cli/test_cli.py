"""The program for a user: clear messages and exit codes, Ctrl-C, a full disk, help."""

import contextlib
import re
import signal
import subprocess
import sys
import tomllib
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

from fedshift import __version__
from fedshift.config.given_settings import read_help
from fedshift.config.settings_file import format_settings
from fedshift.config.spec import CompareSpec
from fedshift.engines import sequential
from fedshift.results.checkpoint import load_checkpoint

CHECKPOINT = "trials/fedbn-seed0/checkpoint.safetensors"


# Help


@pytest.mark.slow
def test_help_and_lists_import_nothing_heavy():
    asked = [["--help"], ["run", "--help"], ["compare", "-h"], ["--version"], ["list"]]
    code = (
        "import sys, contextlib\nfrom fedshift.cli.app import main\n"
        f"for arguments in {asked}:\n"
        "    with contextlib.suppress(SystemExit): main(arguments)\n"
        "heavy = {'torch', 'pandas', 'matplotlib', 'sklearn', 'scipy', 'numpy', 'jinja2'} & sys.modules.keys()\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("Usage: fedshift") == 3
    assert __version__ in done.stdout
    assert "fedbn" in done.stdout


def test_the_program_is_installed_and_runs_as_a_module():
    done = subprocess.run([sys.executable, "-m", "fedshift", "rnu"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith('fedshift: Unknown command "rnu". Did you mean "run"?')


# A run


def test_a_run_prints_tables_and_leaves_a_report(cli, tiny_folder, tmp_path):
    outcome = cli("compare", "--data", tiny_folder, "--methods", "fedavg,fedbn", "--rounds", 2, "--out", "results")
    assert (outcome.code, outcome.err) == (0, "")
    first, *_ = outcome.out.splitlines()
    assert first == "results: fedavg, fedbn on tiny (3 clients, 76 training samples, 3 classes), 2 rounds, 1 seed"
    for said in ("fedavg seed 0 round 1/2: loss ", "fedbn seed 0 round 2/2: loss ", "macro", "worst client", "Page: "):
        assert said in outcome.out
    assert outcome.out.count("note: client 'cid': the last batch would hold one sample, over which") == 1
    for name in ("report.html", "tables/accuracy.csv", "tables/accuracy.tex", CHECKPOINT):
        assert (tmp_path / "results" / name).stat().st_size > 0


def find_images(folder):
    """Names of the files with pixels of samples: an array, inside a page or figure, or a drawing of them."""
    for path in folder.rglob("*"):
        if path.suffix == ".npz":
            with np.load(path) as packed:
                held = any(array.ndim > 2 and array.dtype == np.uint8 for array in packed.values())
        else:
            held = path.is_file() and b"data:image" in path.read_bytes()
        if held or re.match(r"(samples|maps-).*(png|pdf)", path.name):
            yield str(path.relative_to(folder))


@pytest.mark.slow
def test_without_pictures_a_run_holds_no_pixel_of_a_sample_and_pages_say_whose_they_show(
    cli, tiny_folder, tmp_path, monkeypatch, vector_only
):
    monkeypatch.setattr("fedshift.report.page.make_panels", lambda _: [])
    line = "This page holds pictures of test samples of ann, bob, cid."
    asked = ("--data", tiny_folder, "--methods", "fedavg,fedbn", "--rounds", 1)
    assert cli("compare", *asked, "--no-pictures", "--out", "results/bare").code == 0
    assert cli("features", "results/bare").code == 0
    assert [*find_images(tmp_path / "results/bare")] == []
    assert cli("compare", *asked, "--out", "results/full").code == 0
    worst = (f"trials/{method}-seed0/worst-cases.npz" for method in ("fedavg", "fedbn"))
    shown = {*worst, "samples.npz", "report.html"}
    assert {*find_images(tmp_path / "results/full")} == shown
    assert line in (tmp_path / "results/full/report.html").read_text()
    assert cli("report", "results/full", "--no-pictures").code == 0
    assert {*find_images(tmp_path / "results/full")} == shown - {"report.html"}
    assert cli("report", "results/full", "--figures").code == 0
    drawn = {f"figures/samples.{kind}" for kind in ("svg", "png", "pdf")}
    assert {*find_images(tmp_path / "results/full")} == shown | drawn
    assert cli("compare", "--resume", "results/full", "--no-pictures").code == 0
    assert [*find_images(tmp_path / "results/full")] == []


@pytest.mark.slow
@pytest.mark.parametrize("command", ["compare", "sweep"])
def test_a_quiet_run_prints_its_directory_and_its_tables_alone(cli, undrawn, monkeypatch, tiny_folder, command):
    monkeypatch.setattr("fedshift.report.sweep_report.sweep_figures", lambda _: {})
    over = ["--over", "lr=0.1,0.2"] if command == "sweep" else []
    outcome = cli(command, "--data", tiny_folder, "--rounds", 1, *over, "--quiet", "--out", "results")
    assert (outcome.code, outcome.err) == (0, "")
    first, *_ = outcome.out.splitlines()
    assert first.startswith("results: ")
    assert " in percent" in outcome.out
    assert "Samples to train" not in outcome.out
    assert "round 1/1" not in outcome.out
    assert "note: " not in outcome.out


def test_a_report_is_made_again_from_the_records(cli, undrawn, monkeypatch, tiny_folder):
    with monkeypatch.context() as patched:
        patched.setattr("fedshift.report.publication.publish_summary", lambda *_, **__: None)
        cli("run", "--data", tiny_folder, "--rounds", 1, "--out", "results")
    outcome = cli("report", "results")
    assert (outcome.code, outcome.err) == (0, "")
    assert "macro" in outcome.out
    assert "Page: results/report.html" in outcome.out


@pytest.mark.slow
def test_without_a_name_runs_get_directories_of_their_own(cli, unpublished, tiny_folder, tmp_path):
    for _ in range(2):
        assert cli("run", "--data", tiny_folder, "--rounds", 1).code == 0
    found = sorted((tmp_path / "runs").iterdir())
    assert len(found) == 2
    assert all((run / CHECKPOINT).exists() for run in found)


@pytest.mark.slow
def test_the_settings_that_a_run_writes_down_reproduce_it(cli, unpublished, tiny_folder, tmp_path, assert_same):
    asked = (
        "--data", tiny_folder, "--method", "fedbn+fedprox(mu=0.3)", "--rounds", 3, "--batch-size", 8, "--lr", "0.03",
        "--optimizer", "sgd(momentum=0.5, keep=True)", "--schedule", "cosine(floor=0.1)", "--domains", "cid,ann",
        "--samples", 20, "--validation", 0.2, "--select", "best", "--participation", 0.5, "--seeds", "3,",
        "--evaluate-every", 2,
    )  # fmt: skip
    assert cli("run", *asked, "--out", "one").code == 0
    assert cli("run", "--config", "one/config.toml", "--out", "two").code == 0
    assert_same(tmp_path / "one", tmp_path / "two")
    assert (tmp_path / "one/config.toml").read_text() == (tmp_path / "two/config.toml").read_text()
    assert tomllib.loads((tmp_path / "one/config.toml").read_text())["schedule"] == "cosine(floor=0.1)"


@pytest.mark.slow
def test_validation_accuracy_is_printed_and_written_where_data_are_held_out(cli, undrawn, tiny_folder, tmp_path):
    asked = ("--data", tiny_folder, "--methods", "fedavg,fedbn", "--rounds", 1)
    held_out = cli("compare", *asked, "--validation", 0.25, "--out", "held-out")
    macro = pd.read_csv(tmp_path / "held-out/tables/validation.csv", index_col=0).loc["macro"]
    shown = ", ".join(f"{name} {100 * macro[f'{name} mean']:.2f}" for name in ("fedavg", "fedbn"))
    assert f"Validation, macro: {shown}." in held_out.out
    assert "Validation" not in cli("compare", *asked, "--out", "none").out
    assert not (tmp_path / "none/tables/validation.csv").exists()


def test_a_method_and_a_model_of_ones_own_are_found_where_the_program_is_started(
    cli, unpublished, monkeypatch, tiny_folder, tmp_path
):
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    (tmp_path / "beside_the_program.py").write_text(
        "from torch import nn\nfrom fedshift import fedavg\n"
        "def method(*, strength): return fedavg()\n"
        "def model(shape, classes): return nn.Sequential(nn.Flatten(), nn.Linear(192, classes))\n"
    )
    own = ("--method", "beside_the_program:method(strength=2)", "--model", "beside_the_program:model")
    outcome = cli("run", "--data", tiny_folder, *own, "--rounds", 1)
    assert (outcome.code, outcome.err) == (0, "")
    assert "beside_the_program:method(strength=2) seed 0 round 1/1" in outcome.out


# Ctrl-C


@pytest.fixture
def interrupt(monkeypatch):
    """Press Ctrl-C as the given local steps begin, counted over the whole run."""

    def at(*steps):
        count = iter(range(1, 10**6))

        def step_(*given):
            for _ in range(steps.count(next(count))):
                signal.raise_signal(signal.SIGINT)
            return real_step(*given)

        real_step = sequential.client_step_
        monkeypatch.setattr(sequential, "client_step_", step_)

    return at


def test_one_ctrl_c_finishes_the_round_reports_and_says_how_to_go_on(
    cli, undrawn, interrupt, monkeypatch, tiny_folder, tmp_path, assert_same
):
    settings = ("run", "--data", tiny_folder, "--batch-size", 8, "--rounds", 5, "--evaluate-every", 1)
    real, handler = sequential.client_step_, signal.getsignal(signal.SIGINT)
    interrupt(13)
    outcome = cli(*settings, "--out", "stopped run")
    assert (outcome.code, outcome.err) == (130, "")
    assert "Stopping after this round; press Ctrl-C again to stop at once." in outcome.out
    assert "round 2/5" in outcome.out
    assert "round 3/5" not in outcome.out
    last = outcome.out.splitlines()[-1]
    assert last == "Stopped. Completed work is saved; continue with: fedshift run --resume 'stopped run'"
    assert (tmp_path / "stopped run/report.html").exists()
    assert load_checkpoint(tmp_path / "stopped run" / CHECKPOINT)[1]["round"] == 2
    assert signal.getsignal(signal.SIGINT) is handler
    monkeypatch.setattr(sequential, "client_step_", real)
    monkeypatch.setattr("fedshift.report.publication.publish_summary", lambda *_, **__: None)
    assert cli("run", "--resume", "stopped run").code == 0
    assert cli(*settings, "--out", "whole").code == 0
    assert_same(tmp_path / "whole", tmp_path / "stopped run")


@pytest.mark.slow
def test_two_ctrl_c_stop_at_once(cli, interrupt, monkeypatch, tiny_folder, tmp_path, assert_same):
    settings = ("run", "--data", tiny_folder, "--batch-size", 8, "--rounds", 4)
    real = sequential.client_step_
    interrupt(13, 15)
    outcome = cli(*settings, "--out", "stopped")
    assert (outcome.code, outcome.err) == (130, "")
    assert "Page:" not in outcome.out
    assert outcome.out.splitlines()[-1].endswith("continue with: fedshift run --resume stopped")
    assert load_checkpoint(tmp_path / "stopped" / CHECKPOINT)[1]["round"] == 1
    monkeypatch.setattr(sequential, "client_step_", real)
    monkeypatch.setattr("fedshift.report.publication.publish_summary", lambda *_, **__: None)
    assert cli("run", "--resume", "stopped").code == 0
    assert cli(*settings, "--out", "whole").code == 0
    assert_same(tmp_path / "whole", tmp_path / "stopped")


# Looking


def test_inspect_says_what_data_hold_and_what_a_method_does_on_them(cli, tiny_folder, tmp_path):
    outcome = cli("inspect", "--data", tiny_folder)
    assert (outcome.code, outcome.err) == (0, "")
    for said in ("tiny: 3 clients", "3 x 8 x 8 uint8", "Training samples of each class: 0 26, 1 26, 2 24"):
        assert said in outcome.out
    assert "fedbn" not in outcome.out
    found = cli("inspect", "--data", tiny_folder, "--method", "fedavg", "--domains", "ann,bob").out
    assert "tiny: 2 clients" in found
    assert "fedavg on small-cnn, (3, 8, 8) -> 3" in found
    for name in ("north", "south"):
        (tmp_path / "tables").mkdir(exist_ok=True)
        (tmp_path / "tables" / f"{name}.csv").write_text("age,kind,ill\n" + "61,a,no\n52,b,yes\n" * 9)
    found = cli("inspect", "--data", "tables", "--target", "ill").out
    assert "Columns: age (number); kind (a, b)" in found
    assert "Training samples of each class: no " in found
    for words, said in (
        (("--data", tiny_folder, "--shape", "1,8,8"), "data have a shape already; leave one of them out"),
        (("--target", "ill"), "settings of reading data belong to --data: give it, or leave them out"),
        (("--data", "nowhere"), "unknown data 'nowhere'"),
    ):
        outcome = cli("inspect", *words)
        assert outcome.code == 2
        assert said in outcome.err


def test_inspect_shows_every_entry_and_what_travels(cli):
    outcome = cli("inspect", "--method", "fedbn", "--model", "small-cnn", "--shape", "1,8,8", "--classes", 2)
    assert outcome.code == 0
    rows = {words[0]: words for words in map(str.split, outcome.out.splitlines()) if words}
    assert rows["bn1.running_mean"][-4:] == ["-", "-", "yes", "-"]
    assert rows["conv1.weight"][-4:] == ["yes", "yes", "-", "yes"]
    assert "no global model" in outcome.out


def test_help_shows_what_matters_and_help_all_everything(cli):
    brief, whole = cli("compare", "--help").out, cli("compare", "--help-all").out
    fields = {f"--{name.replace('_', '-')}" for name in read_help(CompareSpec)}
    assert {flag for flag in fields if re.search(rf"{flag}\b(?!-)", whole)} == fields
    flags = {line.split()[1] for line in brief.splitlines() if line.startswith("│ --")}
    assert flags < fields | {"--config", "--out", "--resume"}
    assert len(flags) < 15
    assert "--help-all" in brief
    assert cli("compare", "--help").out == brief
    assert "--target " in cli("data", "check", "--help").out


def test_list_names_all_there_is(cli):
    outcome = cli("list")
    assert outcome.code == 0
    for name in ("fedavg", "fedbn", "small-cnn", "digit-cnn-dropout", "digits"):
        assert f"{name} " in outcome.out
    assert "digits " not in cli("list", "methods").out
    metrics = cli("list", "metrics").out
    for name in ("top_k(k=5)", "brier", "hausdorff95 (95 % Hausdorff", "package.module:function", "c_index"):
        assert name in " ".join(metrics.split())


def test_inspect_shows_what_travels_with_an_adapter(cli, monkeypatch):
    def inject(config, module):
        for name, layer in list(module.named_modules()):
            if name and re.fullmatch(config.target_modules, name):
                layer.lora_A = torch.nn.Linear(layer.in_features, config.r, bias=False)

    peft = ModuleType("peft")
    peft.__spec__ = ModuleSpec("peft", None)
    peft.LoraConfig, peft.inject_adapter_in_model = SimpleNamespace, inject
    monkeypatch.setitem(sys.modules, "peft", peft)
    out = cli(
        "inspect", "--model", "synthetic-mlp", "--shape", "10", "--method", "fedavg", "--adapter", "lora(rank=2)"
    ).out
    assert "with lora(rank=2, targets='linear')" in out
    assert "lora_A.weight" in out
    assert "Fixed at every client, and neither sent nor stored: " in out
    assert "unknown adapter 'lara'" in cli("inspect", "--adapter", "lara").err


def test_a_report_of_a_run_without_rounds_says_so(cli, tiny_folder):
    with contextlib.suppress(SystemExit):
        cli("run", "--data", tiny_folder, "--lr", 1e29, "--batch-size", 8, "--out", "out")
    outcome = cli("report", "out")
    assert (outcome.code, outcome.err) == (0, "")
    assert "No round was evaluated yet, so there is nothing to report." in outcome.out


@pytest.mark.parametrize("where", ["empty", "other", "begun"])
def test_a_report_of_what_no_command_wrote_is_refused(cli, tmp_path, where):
    for folder, file in (("empty", None), ("other", "results/a.txt"), ("begun", "config.toml")):
        (tmp_path / folder / "results").mkdir(parents=True)
        if file:
            (tmp_path / folder / file).write_text(format_settings({}, tmp_path / folder))
    outcome = cli("report", where)
    assert (outcome.code, outcome.out) == (2, "")
    assert f"{where} holds no run: give a directory that `fedshift run`, `compare`, `sweep`, `advise` or" in outcome.err


def test_a_report_names_settings_that_are_damaged(cli, tmp_path):
    (tmp_path / "config.toml").write_text("over = [")
    outcome = cli("report", ".")
    assert (outcome.code, "config.toml was edited or is damaged (" in outcome.err) == (1, True)


@pytest.mark.slow
def test_a_profile_says_where_the_time_went_and_how_near_to_the_peak_training_came(cli, unpublished, tiny_folder):
    said = " ".join(cli("run", "--data", tiny_folder, "--rounds", 2, "--profile").out.split())
    for part in ("forward and backward", "update", "data", "aggregation", "evaluation", "checkpoint"):
        assert f"{part} " in said
    assert "GFLOP/s that one thread reaches here at best." in said
    assert "Where" not in cli("run", "--data", tiny_folder, "--rounds", 1).out


def test_an_engine_that_does_not_fit_is_refused_before_anything_starts(cli, tiny_folder, tmp_path):
    outcome = cli(
        "run", "--data", tiny_folder, "--method", "fedavg", "--batch-size", 8, "--engine", "identity", "--out", "never"
    )
    assert outcome.code == 2
    assert "the identity engine needs exactly one step per client and round" in outcome.err
    assert not (tmp_path / "never").exists()
