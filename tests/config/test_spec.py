"""Settings: TOML and flags say the same, flags win, and every wrong setting is one message that names it."""

import dataclasses
import inspect
import tomllib
from pathlib import Path

import pytest

from fedshift.cli import app as program
from fedshift.config.settings_file import format_settings, to_toml
from fedshift.config.spec import CompareSpec, RunSpec
from fedshift.experiments.python_settings import make_python_experiment
from fedshift.utils.errors import UsageError

OTHER = {
    "data": "some/where", "domains": "ann,bob", "samples": 20, "validation": 0.25, "image_size": 16, "classes": 4,
    "allow_single_class": True, "root": "/data", "split": "iid(clients=3),repeat()", "test_fraction": 0.3,
    "normalize": "client", "on_data_error": "warn", "client_column": "hospital", "target": "outcome",
    "task": "multilabel",
    "split_column": "part", "ignore_columns": "visit,id", "groups": "patient",
    "missing": "refuse", "scaling": "none", "window": "-160,240",
    "spacing": "1,1,3", "patch": "16,16,8",
    "loss": "focal(gamma=1.0)", "augment": "flip()",
    "metric": "auc", "metrics": "brier",
    "model": "digit-cnn-bn", "rounds": 7, "epochs": 2, "batches": 3, "steps": 4, "batch_size": 0,
    "optimizer": "adamw(keep=True)", "lr": 1e-05,
    "schedule": "step(every=3, gamma=0.5)", "participation": 0.5, "seeds": "5..7",
    "weights": "own.safetensors", "weights_skip_classifier": True, "adapter": "lora(rank=4)",
    "newcomers": "cleo", "unseen": "average",
    "engine": "other", "workers": 3, "precision": "bfloat16", "device": "cuda:1", "threads": 3,
    "checkpoint_every": 4, "evaluate_every": 2, "moments": "loaded,trained", "select": "best", "target_metric": 0.9,
    "patience": 3, "min_delta": 0.01, "statistics": "running",
    "operating_point": "sensitivity>=0.9",
    "log": "tensorboard,wandb", "pictures": False,
}  # fmt: skip
"""A value for every setting that both commands have, other than its default."""
RUN = {**OTHER, "method": 'fedbn+fedprox(mu=0.1), "x"'}
COMPARE = {**OTHER, "methods": "fedavg,fedbn+fedprox(mu=0.1)", "compare_with": "fedavg", "margin": 0.02}


@pytest.fixture
def resolved(cli, monkeypatch):
    """Call the program and return the settings it would have run, or the outcome of its refusal."""
    given = []
    monkeypatch.setattr(
        program, "run_experiment", lambda spec, command, place, profile: given.append((spec, place.out, place.resume))
    )

    def call(*arguments):
        given.clear()
        outcome = cli(*arguments)
        return given[0] if given else outcome

    return call


def flags(settings):
    found = []
    for name, value in settings.items():
        flag = f"--{name.replace('_', '-')}"
        found += [flag] if value is True else [f"--no-{name}"] if value is False else [flag, str(value)]
    return found


def test_the_examples_here_change_every_setting():
    for spec, values in ((RunSpec, RUN), (CompareSpec, COMPARE)):
        fields = {field.name: field.default for field in dataclasses.fields(spec)}
        del fields["plan"]  # it becomes the settings that it holds
        assert fields.keys() == values.keys()
        assert [name for name, default in fields.items() if values[name] == default] == []


@pytest.mark.parametrize(("command", "spec", "values"), [("run", RunSpec, RUN), ("compare", CompareSpec, COMPARE)])
def test_toml_and_flags_say_the_same(resolved, tmp_path, command, spec, values):
    file = tmp_path / "settings.toml"
    file.write_text(to_toml(values))
    wanted = spec(**values)
    assert resolved(command, "--config", file) == (wanted, None, None)
    assert resolved(command, *flags(values)) == (wanted, None, None)


def test_what_a_run_writes_down_is_what_it_was_asked(resolved, tmp_path):
    spec = RunSpec(**RUN)
    assert tomllib.loads(to_toml(dataclasses.asdict(spec))) == RUN
    (tmp_path / "config.toml").write_text(format_settings(dataclasses.asdict(RunSpec()), tmp_path))
    assert resolved("run", "--resume", tmp_path) == (RunSpec(), None, tmp_path)


def test_flags_win_over_toml_one_by_one(resolved, tmp_path):
    file = tmp_path / "settings.toml"
    file.write_text("lr = 0.5\nrounds = 3\nallow_single_class = true\n")
    spec, _, _ = resolved("run", "--rounds", 9, "--config", file)
    assert (spec.lr, spec.rounds, spec.allow_single_class) == (0.5, 9, True)


def test_lists_and_dashes_may_be_written_in_toml(resolved, tmp_path):
    file = tmp_path / "settings.toml"
    file.write_text(
        'methods = ["fedavg", "fedprox(mu=0.1)"]\ndomains = ["ann", "bob"]\nbatch-size = 8\nout = "there"\n'
    )
    spec, out, _ = resolved("compare", "--config", file)
    assert spec == CompareSpec(methods="fedavg,fedprox(mu=0.1)", domains="ann,bob", batch_size=8)
    assert out == Path("there")


def test_the_settings_of_a_resumed_run_are_those_it_was_begun_with(resolved, tmp_path):
    (tmp_path / "config.toml").write_text(format_settings({"lr": 0.5, "rounds": 3}, tmp_path))
    assert resolved("run", "--resume", tmp_path) == (RunSpec(lr=0.5, rounds=3), None, tmp_path)
    assert resolved("run", f"--resume={tmp_path}", "--rounds=5") == (RunSpec(lr=0.5, rounds=5), None, tmp_path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("lrr = 1", "unknown setting 'lrr': did you mean 'lr'? allowed are adapter, allow_single_class,"),
        ("batchsize = 1", "unknown setting 'batchsize': did you mean 'batch_size'?"),
        ("[training]\nlr = 1", "'training' is a table; write settings at the top, key = value, without [tables]"),
        ("resume = 'there'", "unknown setting 'resume'"),
        ("spec = 1", "unknown setting 'spec'"),
        ("lr = \n", "is not valid TOML: Invalid value (at line 1, column 6). Write lines such as"),
        ('root = "C:\\users"', 'lr = 0.01 or model = "name"; in quotes, write / for each \\'),
        ("lr = 1\nlr = 2", "is not valid TOML: Cannot overwrite a value"),
        ("batch_size = 1\nbatch-size = 2", "has 'batch_size' twice, with a dash and with an underscore: write it once"),
        ("methods = ['fedavg']", "has 'methods': use it with `fedshift compare`"),
        ("lr = 'fast'", "--lr fast: should be a valid number"),
        ("lr = [1, 2]", "--lr 1,2: should be a valid number"),
        ("rounds = 1.5", "--rounds 1.5: should be a valid integer"),
        ("rounds = true", "--rounds True: should be a valid integer"),
        ("allow_single_class = 3", "--allow-single-class 3: should be a valid boolean"),
        ("select = 'first'", "--select first: should be 'last' or 'best'"),
        ("lr = -1", "--lr -1: should be greater than or equal to 0"),
        ("lr = {a = 1}", "'lr' is a table; write settings at the top"),
    ],
)
def test_a_wrong_settings_file_is_one_message(resolved, tmp_path, text, said):
    file = tmp_path / "settings.toml"
    file.write_text(text)
    outcome = resolved("run", "--config", file)
    assert outcome.code == 2
    assert outcome.err.startswith("fedshift: ")
    assert outcome.err.count("\n") == 1
    assert said in outcome.err


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
def test_a_settings_file_as_windows_saves_it(resolved, tmp_path, encoding):
    file = tmp_path / "settings.toml"
    file.write_bytes("lr = 0.5\r\nrounds = 3\r\n".encode(encoding))
    assert resolved("run", "--config", file)[0] == RunSpec(lr=0.5, rounds=3)


def test_a_settings_file_that_is_no_text_is_refused(resolved, tmp_path):
    file = tmp_path / "settings.toml"
    for content, told in (
        (b"\xff\xfe\x00", "line 1, is not in UTF-16"),
        (b"lr = 1\n# \xe9", "line 2, is not in UTF-8"),
    ):
        file.write_bytes(content)
        assert told in resolved("run", "--config", file).err
    assert "no settings file at" in resolved("run", "--config", tmp_path).err
    assert "no settings file at gone.toml: give the path" in resolved("run", "--config", "gone.toml").err
    assert "no run to resume at gone/config.toml" in resolved("run", "--resume", "gone").err


BAD = {
    "data": "no/where", "root": "elsewhere", "domains": "zoe", "split": "iid(client=3)", "samples": 0, "validation": 1,
    "test_fraction": 0, "classes": 0, "allow_single_class": "maybe", "image_size": 0, "normalize": "whole",
    "on_data_error": "stop", "client_column": "site", "task": "classify", "target": "y", "split_column": "part",
    "ignore_columns": "visit", "groups": "nobody", "missing": "drop", "scaling": "all", "window": "240,-160",
    "spacing": "0", "patch": "0", "plan": "no.json",
    "rounds": 0, "participation": 1.5, "engine": "fast",
    "workers": 0, "precision": "float8", "device": "tpu", "unseen": "none", "evaluate_every": 0, "metric": "f2",
    "metrics": "f2", "checkpoint_every": "often",
    "select": "bets", "target_metric": 0, "patience": 0, "min_delta": -0.1, "statistics": "batch",
    "model": "small-cn", "weights": "none.pt", "weights_skip_classifier": True, "adapter": "lore",
    "loss": "focl", "epochs": 0, "batches": 0, "steps": 0, "lr": -1, "log": "paper", "augment": "flp()",
    "batch_size": -1, "optimizer": "adam", "schedule": "cosin", "newcomers": "zoe", "seeds": "3..a", "threads": 0,
    "moments": "later", "methods": "fedbm", "compare_with": "fedprox", "margin": -1, "operating_point": "recall>=2",
    "pictures": "maybe",
}  # fmt: skip
"""A value for every setting that is refused."""


@pytest.mark.sampled(24)
@pytest.mark.parametrize("field", dataclasses.fields(CompareSpec), ids=lambda field: field.name)
def test_a_bad_value_of_any_setting_is_refused_wherever_it_is_given(field, cli, tiny_folder, tmp_path):
    given = {"methods": "fedavg", "data": str(tiny_folder)} | {field.name: BAD[field.name]}
    with pytest.raises(UsageError) as refused:
        make_python_experiment(given)
    assert field.name in refused.value.settings, str(refused.value)
    (tmp_path / "own.toml").write_text(to_toml(given))
    for words in (flags(given), ["--config", tmp_path / "own.toml"]):
        outcome = cli("compare", *words, "--out", "out")
        assert (outcome.code, outcome.err.count("\n"), "defect" in outcome.err) == (2, 1, False), outcome.err
        assert not Path("out").exists()


def test_a_list_of_one_seed_in_toml_is_that_seed(resolved, tmp_path):
    (tmp_path / "own.toml").write_text("seeds = [7]\n")
    assert resolved("compare", "--config", tmp_path / "own.toml")[0].seeds == "7,"


def test_a_single_runs_settings_are_not_for_compare(resolved, tmp_path):
    (tmp_path / "config.toml").write_text(format_settings({"method": "fedbn"}, tmp_path))
    outcome = resolved("compare", "--resume", tmp_path)
    assert outcome.code == 2
    assert "has 'method': use it with `fedshift run`" in outcome.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--lr", "-1", "--validation", "2"], "--lr -1: should be greater than or equal to 0"),
        (["--lrr", "1"], 'Unknown option: --lrr. Did you mean --lr?'),
        (["--no-allow-single-class"], "Unknown option: --no-allow-single-class. Did you mean --allow-single-class?"),
        (["--methods", "fedavg"], "Unknown option: --methods. Did you mean --method?"),
        (["--lr"], "parameter --lr requires an argument"),
        (["fedavg"], "'fedavg' belongs to no flag: write --flag value, and lists with commas"),
        (["--domains", "ann", "bob"], "'bob' belongs to no flag"),
        (["--lr", "1", "--lr", "2"], "--lr specified multiple times"),
    ],
)  # fmt: skip
def test_a_wrong_flag_is_one_message(resolved, arguments, said):
    outcome = resolved("run", *arguments)
    assert outcome.code == 2
    assert outcome.err.startswith("fedshift: ")
    assert outcome.err.count("\n") == 1
    assert said in outcome.err


@pytest.mark.parametrize("spec", [RunSpec, CompareSpec])
def test_every_setting_is_described_where_it_stands(spec):
    source = "".join(inspect.getsource(base) for base in spec.__mro__[:-1])
    for field in dataclasses.fields(spec):
        line = next(line for line in source.splitlines() if line.strip().startswith(f"{field.name}:"))
        assert source.split(line)[1].lstrip().startswith('"""'), field.name


@pytest.mark.parametrize(("command", "spec"), [("run", RunSpec), ("compare", CompareSpec)])
def test_help_names_every_flag_and_its_default(cli, command, spec):
    outcome = cli(command, "--help-all")
    assert outcome.code == 0
    text = " ".join(outcome.out.replace("│", " ").split())
    for field in dataclasses.fields(spec):
        assert f"--{field.name.replace('_', '-')} " in text
        if field.default not in (None, False):
            assert f"[default: {field.default}]" in text
