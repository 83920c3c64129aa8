"""User-facing settings, each defined once: its name, type, default, bounds and help.

Command-line flags, TOML keys, the arguments of :func:`fedshift.compare` and the settings of a trial derive from these
classes. Nothing here imports torch, so that ``fedshift --help`` answers at once.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

from cyclopts import Group, Parameter
from pydantic import BeforeValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass
from pydantic_core import PydanticCustomError

from ..utils.errors import Ref, UsageError
from .catalog import Catalog
from .grid_plan import read_plan
from .seeds import parse_seeds, write_seeds

DATA = Group("Data", sort_key=1)
PREPARING = Group("Preparing data", sort_key=2)
FILES = Group("Reading files", sort_key=3)
MODEL = Group("Model and methods", sort_key=4)
TRAINING = Group("Training", sort_key=5)
COMPUTING = Group("Computing", sort_key=6)
MEASURING = Group("Measuring", sort_key=7)
DIRECTORY = Group("Run directory", sort_key=8)
SWEEPING = Group("Sweep", sort_key=0)
SEARCHING = Group("Search", sort_key=0)


def _join(value: Any) -> Any:
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else value


def _join_numbers(value: Any) -> Any:
    return str(value) if type(value) in (int, float) else _join(value)


def _parse_number(value: Any) -> Any:
    """Convert a numeric text to an integer or, with a decimal point, to a float; return other values unchanged."""
    for kind in (int, float) if isinstance(value, str) else ():
        with suppress(ValueError):
            return kind(value)
    if isinstance(value, str):
        raise PydanticCustomError("number", "should be a valid number")
    return value


def _read_participation(value: Any) -> Any:
    """Convert a text to a number above 0; return a name of :data:`TURNS` unchanged."""
    if value in TURNS:
        return value
    try:
        number = _parse_number(value)
    except PydanticCustomError as error:
        names = " or ".join(TURNS)
        raise PydanticCustomError("participation", "should be a number, {names}", {"names": names}) from error
    if not number > 0:
        raise PydanticCustomError("participation", "should be greater than 0")
    return number


def _read_seeds(value: Any) -> int | str:
    """Return the shortest form of seeds (:mod:`fedshift.config.seeds`)."""
    try:
        return write_seeds(parse_seeds(value))
    except ValueError as error:
        raise PydanticCustomError("seeds", "should be {allowed}", {"allowed": str(error)}) from error


def _join_texts(value: Any) -> Any:
    """Return several texts as one with commas, and several objects as a tuple."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        return value
    several = tuple(value)
    return ",".join(several) if several and all(isinstance(each, str) for each in several) else several


def _read_names(value: Any) -> Any:
    """Return names of clients as one text, unless a name of a list has a sign with a special meaning there."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, Sequence | Set) or not all(isinstance(name, str) for name in value):
        raise PydanticCustomError("names", "should be names of clients, in a list or a text with commas")
    return tuple(value) if any(SIGNS & set(name) for name in value) else ",".join(value) or None


def _split_list(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


Names = Annotated[str, BeforeValidator(_join)]
Lengths = Annotated[str, BeforeValidator(_join_numbers)]
Several = Annotated[Any, BeforeValidator(_join_texts)]
Texts = Annotated[tuple[str, ...], BeforeValidator(_split_list)]
Participation = Annotated[float | int | str, BeforeValidator(_read_participation)]
Positive = Annotated[int, Field(ge=1)]
Seeds = Annotated[int | str, BeforeValidator(_read_seeds)]
SIGNS = frozenset(",*?[]")
"""Characters with a special meaning in lists of client names."""
TURNS = ("ordered", "shuffled")
"""Values of ``participation`` with which a model visits one client after the other."""
AUTO = "auto"
"""Value of a setting that is chosen for the user."""
PYTHON = "python"
"""Table of a TOML file with the settings of a run from Python whose values a file cannot store."""
ESSENTIAL = "essential"
"""Mark of a setting that the help of run, compare, sweep and advise shows; ``--help-all`` also shows the others."""


@dataclasses.dataclass(frozen=True)
class Expression:
    """Mark of a setting that may name users' functions; ``catalog``: what reads and writes it, ``core.loss:LOSSES``.

    Its value is a text, or in Python an object. :class:`~fedshift.config.catalog.Catalog` parses either when the
    experiment is made, so that this module imports no torch.
    """

    catalog: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrialSpec:
    """Settings that a trial uses as written."""

    rounds: Annotated[Positive, ESSENTIAL, Parameter(group=TRAINING)] = 20
    """Communication rounds."""

    participation: Annotated[Participation | None, Parameter(group=TRAINING)] = None
    """Clients that take part in a round: an integer is a number of clients, a number with a decimal point a fraction of
    them; 1 is one client, 1.0 is all. By default all. With ordered or shuffled, it is one client at a time, and all
    take turns: in the order of the tables, or in an order that is redrawn for each cycle (cyclic weight transfer)."""

    engine: Annotated[str, Expression(), Parameter(group=COMPUTING)] = "auto"
    """Engine that runs the clients: sequential, one after another; stacked, side by side in one tensor program (small
    networks); pool, spread over processes (larger ones); ray, over the hosts of a Ray cluster (RAY_ADDRESS; without it
    over processes); identity, all as one big batch (one plain step per round); auto chooses, by a timed step, but never
    ray. Engines agree up to rounding. Or your own subclass of fedshift.engines.engine.Engine, package.module:Class."""

    workers: Annotated[Positive | None, Parameter(group=COMPUTING)] = None
    """Maximum number of processes of the engines pool and ray; by default one per free processor, or one per processor
    of the Ray cluster."""

    precision: Annotated[Literal["float32", "bfloat16", "float16", "float64"], Parameter(group=COMPUTING)] = "float32"
    """Number format of computations. In bfloat16 and float16, torch.autocast decides by layer what is computed in it,
    and parameters, statistics, losses and updates stay float32: faster where the processor supports it, and inexact,
    about three digits; float16 loses gradients below 6e-8. In float64, everything is, in twice the bytes."""

    device: Annotated[str, Parameter(group=COMPUTING)] = "cpu"
    """Torch device: cpu, cuda, cuda:1. Trials side by side (jobs) on cuda are spread over all GPUs of its kind."""

    unseen: Annotated[str, Expression("evaluation.policy:POLICIES"), Parameter(group=MEASURING)] = "skip"
    """Policy for measuring a client that never trained, with a method that keeps state on clients (see `fedshift list
    policies`), such as average, reestimate or tent(steps=3), or your own function, package.module:function; skip does
    not measure it. Methods with one global model measure the client on that model."""

    checkpoint_every: Annotated[Positive | Literal["auto"], Parameter(group=COMPUTING)] = "auto"
    """Rounds between checkpoints, of which a killed run loses at most as many; one that is stopped or fails loses none.
    auto: after every evaluated round, and as often as takes up to 5 % of the time. Results are the same."""

    evaluate_every: Annotated[Positive | None, Parameter(group=MEASURING)] = None
    """Rounds between evaluations; the last is always evaluated. By default about ten evaluations in all."""

    metric: Annotated[Any, Expression("tasks:METRICS"), Parameter(group=MEASURING)] = "auto"
    """Metric of the tables, which also selects the best round, by default the task's first: of classification,
    accuracy, balanced_accuracy (the mean over classes) or auc (area under the ROC curve, one class against the rest);
    of segmentation, dice or iou (of images, or pooled_dice, pooled_iou), accuracy or balanced_accuracy, with --task
    'segmentation(surface=True)' also surface_distance or hausdorff95; of several labels, f1, auc or exact_match; of
    regression, rmse, mae or r2; of survival, c_index. The report page has all of them. On request, of classification
    also f1 (the mean over classes), top_k(k=5), brier, ece (expected calibration error) and average_precision, which
    several labels have too; of any task your own function of outputs and targets,
    package.module:function(lower_is_better=True)."""

    metrics: Annotated[Several | None, Expression("tasks:METRICS"), Parameter(group=MEASURING)] = None
    """Further metrics to count and show, comma-separated: those that metric has on request."""

    select: Annotated[Literal["last", "best"], Parameter(group=MEASURING)] = "last"
    """Round that tables report: the last, or the best on validation data; never the best on test data."""

    statistics: Annotated[Literal["auto", "running", "reestimated"], Parameter(group=MEASURING)] = "auto"
    """BatchNorm statistics of the reported models: running, as training leaves them; reestimated on training data; or
    auto: re-estimated if that changes any client by a point or more (errors: by 1 %) on validation data, or without
    these on training data. One choice for all methods, without test data; the report has both."""

    patience: Annotated[Positive | None, Parameter(group=MEASURING)] = None
    """Evaluations without improvement of the metric on validation data after which a trial (one method with one seed)
    ends, while others continue; by default all run to the last round. Combine it with select=best, and with
    evaluate_every, the rounds between evaluations."""

    min_delta: Annotated[float, Field(ge=0, allow_inf_nan=False), Parameter(group=MEASURING)] = 0.0
    """Smallest improvement that counts for patience, in the metric's unit: 0.01 for 1 %."""

    target_metric: Annotated[float | None, Field(gt=0, allow_inf_nan=False), Parameter(group=MEASURING)] = None
    """Target value of the metric: 0.9 for 90 %; for errors, in their unit. The report shows after how many rounds and
    bytes each method reached it. Only evaluated rounds count, so evaluate every round to find the exact one."""

    operating_point: Annotated[str, Parameter(group=MEASURING)] = "youden"
    """Rule for the threshold of reports on two classes, which each client's validation data set: youden (largest
    sum of sensitivity and specificity), sensitivity>=0.95 or specificity>=0.9 (then the largest of the other). Without
    validation data the score is 0.5."""

    pictures: Annotated[bool, Parameter(group=MEASURING)] = True
    """Keep images of some test samples, and show them on the page. With --no-pictures, no pixel of a sample is written
    into the run directory, and the page can be passed on where images of patients must not be."""


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class DataSpec:
    """Settings for reading data, distributing them among clients, and scaling them."""

    root: Annotated[str | None, Parameter(group=PREPARING)] = None
    """Directory with the files of benchmarks; by default the directory in FEDSHIFT_DATA, or data."""

    domains: Annotated[Any, BeforeValidator(_read_names), Parameter(group=PREPARING)] = None
    """Clients to use, comma-separated, in the order of the tables; 'center-*' chooses by a pattern, '!north' leaves one
    out; by default all."""

    split: Annotated[str | None, ESSENTIAL, Parameter(group=PREPARING)] = None
    """Distribution of the samples among clients, one or several steps in turn: iid(clients=10), dirichlet(clients=10,
    alpha=0.3), labels(clients=100, per_client=2), quantity(clients=10), domain_mix(clients=20, mixing=0.1),
    ham_non_iid(), sample(size=743), truncate(),
    repeat(), validation(fraction=0.1) or validation(size=50), only(clients='usps-*') or saved(path='split.csv');
    within='domain' distributes the samples of each client separately."""

    samples: Annotated[Positive | None, Parameter(group=PREPARING)] = None
    """Training samples of each client, drawn once; by default all."""

    validation: Annotated[float, Field(ge=0, lt=1), ESSENTIAL, Parameter(group=PREPARING)] = 0.0
    """Fraction of each client's training samples to hold out for validation."""

    test_fraction: Annotated[float, Field(gt=0, lt=1), Parameter(group=FILES)] = 0.2
    """Fraction of each client's samples for testing, if the files do not define a split."""

    classes: Annotated[Annotated[int, Field(ge=1, le=1_000_000)] | None, Parameter(group=PREPARING)] = None
    """Number of classes; by default one more than the largest training label, which must then not exceed the number of
    samples (or 1000)."""

    allow_single_class: Annotated[bool, Parameter(group=PREPARING, negative=())] = False
    """Accept clients whose training data contain only one class."""

    image_size: Annotated[Positive | None, Parameter(group=PREPARING)] = None
    """Height and width of resized images in pixels; by default 28 if clients' arrays differ in size."""

    patch: Annotated[Lengths | None, Parameter(group=PREPARING)] = None
    """Voxels of the patches that training cuts from images with masks, along columns, rows and slices: 64,64,32, or one
    number for all axes. A third of a batch is centered on a class other than the background. Images keep their sizes,
    which may differ; validation, test and predictions cover them with overlapping windows of this size."""

    plan: Annotated[str | None, Parameter(group=PREPARING)] = None
    """File that `fedshift plan` wrote, whose spacing and patch are used in place of --spacing and --patch."""

    normalize: Annotated[Literal["half", "imagenet", "unit", "client"] | None, Parameter(group=PREPARING)] = None
    """Scaling of images: half (to [-1, 1]), unit (to [0, 1]), imagenet (ImageNet's means and deviations) or client (the
    means and deviations of the client's training images); by default the benchmark's scaling, or half."""

    on_data_error: Annotated[Literal["refuse", "warn", "ignore"] | None, Parameter(group=PREPARING)] = None
    """Treatment of errors that `fedshift data check` finds (copies of test samples in training data, equal samples with
    different labels, one class under two spellings, skipped images, unreadable files): refuse to start; warn in one
    line and continue without such files; or ignore, without checking. By default unreadable files are refused, and
    other errors cause a one-line warning."""

    client_column: Annotated[str | None, Parameter(group=FILES)] = None
    """Column with the client's name, if one table contains all clients."""

    task: Annotated[Any, Expression("tasks:TASKS"), Parameter(group=FILES)] = None
    """Kind of prediction: classification, segmentation (a class for each pixel), multilabel (several labels
    of 0 and 1), regression (numbers), survival (time and event) or your own, package.module:Class. Regression
    standardizes targets by all clients' training data, regression(standardize=False) does not. By default classes, or
    masks where there are some. In Python also a value, or a subclass of fedshift.tasks.Task."""

    target: Annotated[str | None, Parameter(group=FILES)] = None
    """Column of a table with the label; for several labels or numbers, or time and event, comma-separated columns."""

    split_column: Annotated[str | None, Parameter(group=FILES)] = None
    """Column of a table with the values train, validation or test."""

    ignore_columns: Annotated[str | None, Parameter(group=FILES)] = None
    """Columns of a table to leave out, such as dates and identifiers, separated by commas."""

    groups: Annotated[str | None, Parameter(group=FILES)] = None
    """Groups (patients) that are never divided between training, validation and test data or clients: a column of a
    table, a pattern of file names, '{group}_*.png', a .csv file with columns file and group, the name of arrays next to
    x and y (patient for patient_train and patient_test), or an attribute of torch datasets."""

    window: Annotated[str | None, Parameter(group=FILES, allow_leading_hyphen=True)] = None
    """Values LOW,HIGH of medical images that become -1 and 1, clipped beyond, such as -160,240 for soft tissue in
    Hounsfield units; by default the 0.5th and 99.5th percentiles, of each image or of all CT. Of pictures with more
    than 8 bits of gray, by default 0 and what the fewest bits hold."""

    spacing: Annotated[Lengths | None, Parameter(group=FILES)] = None
    """Millimeters between voxels to which medical images are resampled, along columns, rows and slices: 1,1,3, one
    number for all axes, or median, the median along each axis over all clients' training files. By default files keep
    their voxels."""

    missing: Annotated[Literal["impute", "refuse"], Parameter(group=FILES)] = "impute"
    """Treatment of missing values in a table: filled in from the client's own training part, or refused."""

    scaling: Annotated[Literal["client", "none"], Parameter(group=FILES)] = "client"
    """Scaling of a table's numeric columns: by the client's own training part, or none."""

    def __post_init__(self) -> None:
        """Put the settings of a plan in its place; raise :class:`UsageError` if they are given, too."""
        if self.plan is None:
            return
        try:
            settings, _ = read_plan(Path(self.plan))
        except UsageError as error:
            raise error.about("plan") from error
        given = {name: getattr(self, name) for name in settings if getattr(self, name) is not None}
        if given:
            raise UsageError("{} has a spacing and a patch: leave {} out", Ref(plan=self.plan), Ref(**given))
        for name, value in {**settings, "plan": None}.items():
            object.__setattr__(self, name, value)

    @property
    def on_unreadable(self) -> Literal["refuse", "skip"]:
        """Treatment of files that cannot be read."""
        return "skip" if self.on_data_error in ("warn", "ignore") else "refuse"


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class Spec(DataSpec, TrialSpec):
    """All settings of an experiment except its methods."""

    data: Annotated[Any, ESSENTIAL, Parameter(group=DATA)] = "digits"
    """Data to use: the embedded digits, or nuclei (segmentation); a benchmark by name (see `fedshift data list`); or
    your own directory: images in client/class or client/train/class, images in client/images with masks in
    client/masks, one .npz file per client, or CSV or Parquet tables. In Python also a Federation, a dictionary of
    clients as for fedshift.federation, pandas frames or HuggingFace datasets by client, or a single one with
    client_column."""

    model: Annotated[Any, Expression("models:MODELS"), ESSENTIAL, Parameter(group=MODEL)] = "auto"
    """Network by name (see `fedshift list models`), optionally with arguments, unet(width=32), or your own function,
    package.module:function, called with the shape of a sample and the number of classes; if its network returns
    several outputs, take_output(package.module:function, output='logits'). Or a network of an installed library, with
    random weights: timm:resnet18, hf:resnet; or with the library's weights, timm:resnet18(pretrained=True), and images
    scaled as these weights need. auto is unet-small for masks, small-cnn for other images, resnet-1d for signals
    [C, L] and abide-mlp for other samples. In Python also such a function."""

    weights: Annotated[Any, Parameter(group=MODEL)] = None
    """File with the initial weights of every network, in place of random ones: a state dictionary, as .safetensors or
    as torch.save writes it (.pt, .pth, .bin; read without running code). In Python also a dictionary."""

    weights_skip_classifier: Annotated[bool, Parameter(group=MODEL, negative=())] = False
    """Ignore the last layer of --weights, for example for different classes; it starts from random weights."""

    adapter: Annotated[Any, Expression("nn.adapters:ADAPTERS"), Parameter(group=MODEL)] = None
    """Adapters of the network, lora(rank=8, targets='qkv|proj'), made by peft (pip install 'fedshift[lora]'): only
    small layers next to the targets, the last layer and normalization are trained and sent; all other weights are
    frozen. Targets are names of layers or their last parts, joined by |, with * for any text; or linear, or pointwise
    (convolutions of one pixel). In Python also a value."""

    epochs: Annotated[Positive | None, ESSENTIAL, Parameter(group=TRAINING)] = None
    """Passes of each client over its data in a round; 1 unless batches or steps are given."""

    batches: Annotated[Positive | None, Parameter(group=TRAINING)] = None
    """Batches of each client in a round, in place of epochs. A round ends with the pass over the client's data
    (FedMMB's algorithm), so a client with fewer batches than this takes fewer; steps goes on into the next pass."""

    steps: Annotated[Positive | None, Parameter(group=TRAINING)] = None
    """Local steps of each client in a round, in place of epochs: the same number for clients of all sizes, over as many
    passes as they need. The next round continues where the last one ended."""

    lr: Annotated[float, Field(ge=0, allow_inf_nan=False), ESSENTIAL, Parameter(group=TRAINING)] = 0.01
    """Learning rate of the local optimizer."""

    log: Annotated[Names | None, Parameter(group=DIRECTORY)] = None
    """Loggers, comma-separated: tensorboard, mlflow, wandb (pip install 'fedshift[tensorboard]'). They write files in
    the run directory; nothing leaves the machine unless MLFLOW_TRACKING_URI or WANDB_MODE=online is set. none turns
    logging off, also for a resumed run that was begun with loggers."""

    loss: Annotated[Any, Expression("core.loss:LOSSES"), Parameter(group=TRAINING)] = "auto"
    """Training loss, by default the task's: cross_entropy or focal(gamma=2.0), either with weights='balanced', by the
    classes of all training data, weights='inverse_frequency', these times the number of classes, or weights=(1.0, 2.5),
    one per class; for masks also dice and dice_cross_entropy; for several labels binary_cross_entropy or binary_focal;
    for numbers mse, mae or huber(delta=1.0); or your own function of outputs and targets, package.module:function. In
    Python also such a function, a value, or a loss of torch.nn with its arguments."""

    augment: Annotated[Any, Expression("data.augmentation:AUGMENTATIONS"), Parameter(group=TRAINING)] = None
    """Augmentation of training images, one or several of flip(), rotate(degrees=30), crop(padding=4), color_jitter(),
    scale(), shear(), erase(), or fedbn_office(), fedmmb_cifar(), flamby_isic(). In Python also their value, or a
    function of images [B, C, H, W] in [0, 1] and a NumPy generator."""

    batch_size: Annotated[int, Field(ge=0), ESSENTIAL, Parameter(group=TRAINING)] = 32
    """Samples in a batch; 0, in Python also None, puts all of a client's samples into one batch."""

    optimizer: Annotated[Any, Expression("core.optimizer:OPTIMIZERS"), Parameter(group=TRAINING)] = "sgd"
    """Local optimizer: sgd(momentum=0.0, nesterov=False, weight_decay=0.0), with L2 weight decay, or
    adamw(weight_decay=0.01, beta1=0.9, beta2=0.999, eps=1e-08), with decoupled weight decay; keep=True keeps its state
    on the client from round to round instead of resetting it. Or one of torch's, or your own subclass:
    torch.optim:RMSprop(alpha=0.9), package.module:Class(name=value). In Python also a value, fedshift.SGD(lr=0.01), or
    such a class, a functools.partial of it with arguments, or an instance."""

    schedule: Annotated[Any, Expression("core.optimizer:SCHEDULES"), Parameter(group=TRAINING)] = "constant"
    """Schedule of the learning rate over rounds: constant, cosine(floor=0.0), step(every=10, gamma=0.1) or
    exponential(gamma=0.99); one of torch's, stepped once a round, torch.optim.lr_scheduler:StepLR(step_size=5); or your
    own function of the round, counted from 0, that returns a factor on lr, package.module:function. In Python also a
    value, such as fedshift.Cosine(rounds=20), such a function, or a functools.partial of torch's class."""

    newcomers: Annotated[Any, BeforeValidator(_read_names), Parameter(group=TRAINING)] = None
    """Clients, comma-separated, that never take part in training and are only measured; usps-* matches all such
    names. In Python also a list of names."""

    seeds: Annotated[Seeds, ESSENTIAL, Parameter(group=TRAINING)] = 1
    """Number of seeds, 0, 1, ...; or the seeds themselves, 3,4,5 or 3..5, or 7, (with a comma) for a single seed. 3 or
    more give standard deviations and intervals. In Python also a list."""

    threads: Annotated[Positive | None, Parameter(group=COMPUTING)] = None
    """Threads of torch; by default torch's choice. Small networks run faster on one thread, and results are equal bit
    for bit only with the same number of threads."""

    moments: Annotated[Names, Parameter(group=MEASURING)] = "loaded"
    """Moments of an evaluated round when clients' models are measured, comma-separated: loaded (just after
    aggregation; always, for the tables) and trained (just after local work, before aggregation; for a further
    table)."""


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class RunSpec(Spec):
    """One method."""

    method: Annotated[Any, Expression("methods:METHODS"), ESSENTIAL, Parameter(group=MODEL)] = "fedbn"
    """Method (see `fedshift list methods`). It takes arguments, fedprox(mu=0.1), composes, fedbn+fedprox, and may be
    your own function, package.module:function."""


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class CompareSpec(Spec):
    """Several methods."""

    methods: Annotated[Several, Expression("methods:METHODS"), ESSENTIAL, Parameter(group=MODEL)] = "fedavg,fedbn"
    """Methods, comma-separated (see `fedshift list methods`). They take arguments, fedprox(mu=0.1), compose,
    fedbn+fedprox, and may be your own functions, package.module:function. In Python also methods, fedshift.fedbn(), or
    functions that make one, several in a list. With one seed, they share initial weights and the order of samples."""

    compare_with: Annotated[Any, Expression("methods:METHODS"), Parameter(group=MEASURING)] = None
    """The method with which alone the others are compared, such as fedavg; by default all pairs are. It is chosen
    before the run, and recorded: p-values and intervals are corrected for fewer comparisons, and say nothing about
    other pairs."""

    margin: Annotated[Annotated[float, Field(gt=0, allow_inf_nan=False)] | None, Parameter(group=MEASURING)] = None
    """Largest loss of a client against single and FedAvg that would be acceptable, in the metric's unit: 0.02 for 2
    points of Dice. The table of who profits shows where a larger one is excluded. It is chosen before the run, and
    recorded."""


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class SweepSpec(CompareSpec):
    """A comparison for each combination of some settings' values."""

    over: Annotated[Texts, Expression(), ESSENTIAL, Parameter(group=SWEEPING, negative=(), show_default=False)] = ()
    """Setting and its values, once per setting: --over epochs=1,4,16 --over batch_size=10,50,0. Every combination is a
    separate comparison; commas inside brackets do not separate values, and none unsets a setting. In TOML: over =
    ["epochs=1,4,16", "batch_size=10,50,0"]."""


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class AdviseSpec(CompareSpec):
    """A search for the best method on validation data."""

    methods: Annotated[Several, Expression("methods:METHODS"), ESSENTIAL, Parameter(group=MODEL)] = AUTO
    """Methods to try, comma-separated (see `fedshift list methods`); by default the ones that a diagnosis of the data
    favors, and some that are always worth trying."""

    budget: Annotated[float, Field(gt=0, allow_inf_nan=False), ESSENTIAL, Parameter(group=SEARCHING)] = 10.0
    """Minutes for everything, diagnosis and timing included, predicted by timing a round of each method; if they do not
    suffice, fewer rounds than --rounds, fewer learning rates and fewer methods are tried. When they are used, the
    search ends."""

    rates: Annotated[Names, Parameter(group=SEARCHING)] = AUTO
    """Learning rates to try with each method, comma-separated; by default 0.003, 0.01, 0.03, 0.1 and 0.3, with adamw a
    thirtieth of these, and with another optimizer of torch 0.1 to 10 times its default. A method with its own rate,
    fedbn+tuned(lr=0.05), is tried only at that rate."""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Files and directories of a run, what it prints, and how many trials run at a time: no part of the experiment."""

    config: Annotated[Path | None, ESSENTIAL, Parameter(group=DIRECTORY)] = None
    """TOML file with the same names as the flags (image_size = 28); flags on the command line take precedence."""

    code: Annotated[Texts, Parameter(group=DIRECTORY, negative=(), show_default=False)] = ()
    """Your own function, package.module:function, that the file of --config may call; may be given several times.
    Files may come from others, so no other function in them is called; functions in flags need not be listed."""

    callbacks: Annotated[Texts, Expression(), Parameter(group=DIRECTORY, negative=(), show_default=False)] = ()
    """Your own callback, package.module:Class(name=value), a subclass of fedshift.Callback, or package.module:function,
    called with the trial and its round at the end of each; may be given several times. Callbacks can log, save files in
    trial.folder, and stop a trial; they are not part of the settings, so give them again to resume."""

    out: Annotated[Path | None, ESSENTIAL, Parameter(group=DIRECTORY)] = None
    """Directory to write; by default a new one under runs/."""

    resume: Annotated[Path | None, ESSENTIAL, Parameter(group=DIRECTORY)] = None
    """Directory of an interrupted run to continue, bit for bit."""

    quiet: Annotated[bool, Parameter(group=DIRECTORY, negative=())] = False
    """Print only the directory, the tables at the end, and errors; no progress, and no notes, which are on the page."""

    jobs: Annotated[Positive | Literal["auto"], Parameter(group=COMPUTING)] = "auto"
    """Maximum number of trials (one method with one seed each) that run side by side, in processes; results are the
    same bit for bit. auto: one per processor, for trials that leave processors idle, if that saves time; on GPUs, as
    many as fit, at least one on each."""


COMMANDS: Mapping[str, type[Spec]] = {"run": RunSpec, "compare": CompareSpec, "sweep": SweepSpec, "advise": AdviseSpec}
"""Commands that train, with their settings."""


def _find_marked(mark: object) -> Iterator[str]:
    """Yield the names of the settings that bear ``mark``, or a mark of that class."""
    for kind in (*COMMANDS.values(), RunOptions):
        for name, hint in get_type_hints(kind, include_extras=True).items():
            if any(each == mark or (isinstance(mark, type) and isinstance(each, mark)) for each in get_args(hint)[1:]):
                yield name


def find_catalog(kind: type[Spec], name: str) -> Catalog[Any] | None:
    """Return the catalog that reads and writes setting ``name`` of ``kind``, if it has one."""
    marks = (mark for mark in get_args(get_type_hints(kind, include_extras=True)[name]) if isinstance(mark, Expression))
    place = next((mark.catalog for mark in marks), "")
    module, _, catalog = place.partition(":")
    return getattr(importlib.import_module(f"fedshift.{module}"), catalog) if place else None


EXPRESSIONS, SHOWN = frozenset(_find_marked(Expression)), frozenset(_find_marked(ESSENTIAL))
"""Settings that may name users' functions, and those that help shows."""
OF_ONE = {"leave_out": "compare"} | {
    name: command
    for command, kind in reversed(list(COMMANDS.items()))
    for name in {field.name for field in dataclasses.fields(kind)} - {field.name for field in dataclasses.fields(Spec)}
}
"""Settings that only one command has, or that another has under another name."""
