"""The command ``fedshift theory``: a numerical check of FedBN's theory."""

from __future__ import annotations

from json import dumps
from pathlib import Path

from ..console.terminal import make_console, print_line, print_parts
from ..utils.errors import UsageError
from ..utils.files import write_atomically


def theory(
    *,
    clients: int = 4,
    samples: int = 16,
    dimension: int = 10,
    width: int = 1024,
    heterogeneity: float = 2.0,
    alpha: float = 10.0,
    seed: int = 0,
    steps: int = 200,
    draws: int = 1000,
    monte_carlo: int = 1_000_000,
    out: Path | None = None,
) -> int:
    """Check FedBN's theory numerically: Gram matrices, corollary 4.6, lemma 4.3, predicted and measured convergence.

    Args:
        clients: Number of clients, each with a different random covariance.
        samples: Samples of each client.
        dimension: Inputs of a sample.
        width: Neurons of the trained network; networks with a sixteenth, a quarter and four times as many are also
            used.
        heterogeneity: How much covariances differ: their eigenvalues lie between e to the minus this and e to this.
        alpha: Standard deviation of the network's initial weights: the larger, the more effect gamma has.
        seed: Seed of all random numbers.
        steps: Steps of gradient descent.
        draws: Random federations on which corollary 4.6 is tested.
        monte_carlo: Sampled neurons with which the integrated Gram matrix is compared.
        out: Directory for the figures (SVG and PNG) and theory.json; without it nothing is written.

    """
    from ..theory import TheorySettings, check_theory
    from ..theory.rendering import render_theory, to_plain_values

    setting = TheorySettings(
        clients=clients, samples=samples, dimension=dimension, width=width, heterogeneity=heterogeneity, alpha=alpha,
        seed=seed, steps=steps, draws=draws, monte_carlo=monte_carlo,
    )  # fmt: skip
    if out:
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"out={out}: {error.strerror}: name a directory that can be written") from error
    console = make_console()
    with console.status("computing"):
        found = check_theory(setting)
    print_parts(console, render_theory(found))
    if out:
        from ..theory.figures import save_panels

        files = save_panels(found, out)
        write_atomically(out / "theory.json", (dumps(to_plain_values(found), indent=2) + "\n").encode())
        for file in (*files, out / "theory.json"):
            print_line(console, f"Written: {file}")
    return 0
