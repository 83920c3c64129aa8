"""Prints how well a curious server reconstructs an image from one upload, by what each method sends.

python examples/leak.py [--methods "fedavg, fedbn"] [--rounds 10] [--seeds 5] [--picture leak.png]

A client takes one local step on one image, after --rounds rounds of training. The server knows the plan, its broadcast
and the client's update, and nothing that stays on the client. Adam moves an image until its gradient points where the
upload does (Geiping et al. 2020, arXiv:2003.14053, equation 4: cosine, total variation, signs of gradients). Where
running statistics are sent, r after a step is (1 - m) r + m b, which gives the image's own b in every BatchNorm layer;
they serve as a prior (Yin et al. 2021, arXiv:2104.07586). The label counts as known.

PSNR in decibels and correlation: mean (standard deviation) over seeds. Found: images that correlate most, of all
training images of their client, with their reconstruction. The mean of the client's test images needs no upload.
"""

import argparse
from dataclasses import replace
from functools import partial
from statistics import fmean, stdev

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedshift
from fedshift.core.kernel import broadcast, client_final, client_init, init_client, load_state
from fedshift.core.optimizer import SGD
from fedshift.core.plan import Plan
from fedshift.core.states import LocalTrainingState, ServerState, Update
from fedshift.core.step import client_step_, compute_objective, transform_gradients
from fedshift.core.work import Work
from fedshift.experiments.settings import Settings
from fedshift.experiments.trial import Trial
from fedshift.methods import METHODS
from fedshift.models.digits import small_cnn
from fedshift.utils.random_streams import stream

KEY, SIZE, LR, EPS = torch.zeros((), dtype=torch.int64), 16, 0.03, 1e-5
RATE, HIDDEN_RATE, VARIATION = 0.1, 0.01, 0.01
"""Adam's rates for images, and for parameters that stay on the client; weight of total variation."""


def see_gradients(plan: Plan, server: ServerState, update: Update) -> dict[str, Tensor]:
    """Return the gradient of each trained entry that is loaded and sent: its change over the learning rate."""
    taken = plan.optimizer.lr_in_round(server.round) * update.steps
    names = plan.trained & plan.loaded & update.shared.keys()
    return {name: (server.shared[name] - update.shared[name]) / taken for name in sorted(names)}


def see_statistics(plan: Plan, server: ServerState, update: Update) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the batch's mean and unbiased variance in each BatchNorm layer whose moving statistics are sent."""
    seen = {}
    for name, layer in plan.module.named_modules() if server.round < plan.freeze_from else ():
        entries = [f"{name}.running_mean", f"{name}.running_var"]
        if isinstance(layer, nn.BatchNorm2d) and (plan.loaded & update.shared.keys()).issuperset(entries):
            kept = 1 - layer.momentum
            mean, variance = ((update.shared[entry] - kept * server.shared[entry]) / (1 - kept) for entry in entries)
            seen[name] = mean, variance
    return seen


def simulate(plan: Plan, job: LocalTrainingState, params: dict[str, Tensor], x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Return the gradients that a client would apply for ``x``, clipping included, differentiable in ``x``."""
    leaves = {name: own if own.requires_grad else own.detach().requires_grad_() for name, own in params.items()}
    loss, _, _ = compute_objective(plan, job, leaves, x, y, KEY)
    found = torch.autograd.grad(loss, tuple(leaves.values()), create_graph=True, materialize_grads=True)
    return transform_gradients(plan, replace(job, params=leaves), dict(zip(leaves, found, strict=True)), KEY)


def record_inputs(plan: Plan) -> dict[str, Tensor]:
    """Return a mapping that gets the inputs of every BatchNorm layer, by name, in each pass of the network."""
    inputs: dict[str, Tensor] = {}
    for name, layer in plan.module.named_modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.register_forward_pre_hook(partial(lambda name, _, x: inputs.update({name: x[0]}), name))
    return inputs


def statistics_distance(x: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """Return the distance of a layer's inputs from a batch's mean and variance, in standard deviations."""
    own_variance, own_mean = torch.var_mean(x, dim=(0, 2, 3))
    scale = variance + EPS
    spread = (own_variance + EPS).sqrt() - scale.sqrt()
    return (((own_mean - mean).square() + spread.square()) / scale).mean()


def invert(plan: Plan, server: ServerState, update: Update, y: Tensor, start: Tensor, steps: int) -> Tensor:
    """Return images in -1..1 that explain the upload; parameters that stay on the client are estimated with them."""
    gradients, statistics = see_gradients(plan, server, update), see_statistics(plan, server, update)
    inputs = record_inputs(plan)
    observed = torch.cat([gradient.flatten() for gradient in gradients.values()])
    job = load_state(plan, init_client(plan), server, planned_steps=1)
    x = start.clamp(-1, 1).requires_grad_()
    names = plan.trained - plan.loaded if server.round else ()  # before the first round everyone knows them
    hidden = {name: job.params[name].detach().clone().requires_grad_() for name in names}
    adam = torch.optim.Adam([{"params": [x], "lr": RATE}, {"params": [*hidden.values()], "lr": HIDDEN_RATE}])
    schedule = torch.optim.lr_scheduler.MultiStepLR(adam, [steps * eighths // 8 for eighths in (3, 5, 7)])
    for _ in range(steps):
        with torch.enable_grad():
            made = simulate(plan, job, {**job.params, **hidden}, x, y)
            ours = torch.cat([made[name].flatten() for name in gradients])
            variation = x.diff(dim=3).abs().mean() + x.diff(dim=2).abs().mean()
            objective = 1 - F.cosine_similarity(ours, observed, dim=0) + VARIATION * variation
            if statistics:
                apart = [statistics_distance(inputs[name], *batch) for name, batch in statistics.items()]
                objective = objective + torch.stack(apart).mean()
        leaves = [x, *hidden.values()]
        for leaf, grad in zip(leaves, torch.autograd.grad(objective, leaves, materialize_grads=True), strict=True):
            leaf.grad = grad.sign() if leaf is x else grad
        adam.step()
        schedule.step()
        with torch.no_grad():
            x.clamp_(-1, 1)
    return x.detach()


def score(image: Tensor, row: int, pool: Tensor) -> tuple[float, float, float]:
    """Return PSNR and correlation of ``image [1, C, H, W]`` in 0..1 with ``pool[row]``, and 1.0 if that is found."""
    psnr = -10 * (image.double() - pool[row].double()).square().mean().log10()
    shapes = [F.normalize((x.double() - x.double().mean((2, 3), keepdim=True)).flatten(1)) for x in (image, pool)]
    alike = (shapes[0] @ shapes[1].T)[0]
    return psnr.item(), alike[row].item(), float(alike.argmax() == row)


def attack(method: str, args: argparse.Namespace, seed: int) -> tuple[list[float], Tensor]:
    """Train and attack uploads; return mean scores of reconstructions and of the guess, and originals above images."""
    settings = Settings(
        rounds=max(1, args.rounds), work=Work(batch_size=32, epochs=1), optimizer=SGD(lr=LR), engine="sequential"
    )
    data = fedshift.digits().fit_images(SIZE)
    trial = Trial(METHODS.parse(method), partial(small_cnn, dense_norm=False), data, settings, seed)
    for _ in range(args.rounds):
        trial.advance()
    scores, strip = [], []
    for number in range(args.images):
        client = data.clients[(seed + number) % len(data.clients)]
        row = int(stream(seed, "leak/batch", 1, number).choice(len(client.train), 1)[0])
        x, y = client.train.inputs(torch.tensor([row])), client.train.targets(torch.tensor([row]))
        server = broadcast(trial.server, client.name)
        job = client_init(trial.plan, trial.clients[client.name], server, planned_steps=1)
        _, update = client_final(trial.plan, client_step_(trial.plan, job, x, y, KEY)[0])
        start = torch.from_numpy(stream(seed, "leak/start", 1, number).standard_normal(x.shape)).float()
        image = invert(trial.plan, server, update, y, start, args.iterations) / 2 + 0.5
        pool, tests = (split.copy_rows(slice(None)).float() / 255 for split in (client.train, client.test))
        scores.append([*score(image, row, pool), *score(tests.mean(0, keepdim=True), row, pool)])
        strip.append(torch.cat([pool[row], image[0]], dim=1))
    trial.close()
    return [fmean(column) for column in zip(*scores, strict=True)], torch.cat(strip, dim=2)


def format_row(name: str, columns: list[tuple[float, ...]]) -> str:
    """Return a row of the table from the values over seeds of PSNR, correlation and found."""
    psnr, alike = (f"{fmean(values):.2f} ({stdev(values):.2f})" for values in columns[:2])
    return f"{name:20}{psnr:>14}{alike:>16}{100 * fmean(columns[2]):7.0f}%"


def main() -> None:
    """Print a row for each method and for the guess, and save the images, a row for each method, if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default="fedavg, silobn, fedbn, fixbn, gn, fedwon")
    parser.add_argument("--picture")
    for name, value in (("rounds", 10), ("images", 2), ("seeds", 5), ("iterations", 150)):
        parser.add_argument(f"--{name}", type=int, default=value)
    args, strips = parser.parse_args(), {}
    torch.set_num_threads(1)
    print(f"{'':20}{'PSNR':>14}{'correlation':>16}{'found':>8}")
    for method in METHODS.parse_all(args.methods):
        scores, images = zip(*(attack(method.label, args, seed) for seed in range(args.seeds)), strict=True)
        columns = [*zip(*scores, strict=True)]
        print(format_row(method.label, columns[:3]))
        originals, strips[method.label] = torch.cat(images, dim=2).chunk(2, dim=1)
    print(format_row("mean image", columns[3:]))
    if args.picture:
        rows = {"original": originals, **strips}
        figure, axes = plt.subplots(len(rows), figsize=(8, 0.75 * len(rows)), layout="constrained")
        for axis, (name, row) in zip(axes, rows.items(), strict=True):
            axis.imshow(row.permute(1, 2, 0).numpy())
            axis.set_ylabel(name, rotation=0, ha="right", va="center")
            axis.set(xticks=[], yticks=[])
        figure.savefig(args.picture, dpi=100)


if __name__ == "__main__":
    main()
