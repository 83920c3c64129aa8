"""Random kills, freezes and link cuts over runs of a coordinator and three sites, whose results are then compared.

    python -m tests.flower.kills --faults 40 --log kills.jsonl

A run has twelve rounds and ten faults, one in each tenth of its rounds, of four kinds: a process is killed; it is
stopped and goes on after a while (SIGSTOP, SIGCONT), before it is missed or after; a site's link is cut, or lets
nothing pass, for a while. All sites are behind a :mod:`.link`, each with another
delay. Whatever has ended is started again as docs/deployment.md says, and only that: ``serve --resume`` where
``fedshift serve`` has ended, the same ``fedshift join`` where that has. At the end the checkpoint, the sites' states
and the records are compared with those of one process, with its engines sequential and pool, bit for bit; a site that
is away just when an evaluation begins has no records of it, which are counted (``rows_missing``). What is done when
follows from the seed. Each run adds a line to the log, and a log that exists is continued.
"""

import argparse
import json
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random

from fedshift.results.summary import read_summary
from tests.conftest import images, write_npz
from tests.flower.processes import machines
from tests.flower.sites import list_rows, same_as_in_process, spec_for

NAMES = ("pen", "photo", "print")
METHODS = ("fedbn", "scaffold", "fedbn+fedadam")
ENGINES = ("sequential", "pool")
ROUNDS, EACH = 12, 10
"""Rounds and faults of a run."""
KINDS = ("kill", "freeze", "cut", "stall")
DELAYS = (0.0, 0.05, 0.2)
"""Seconds by which everything arrives later at the sites and from them, each way."""
PAUSE = 30.0
"""Most seconds that a freeze or a cut lasts; a coordinator misses a site after twenty."""
LONGEST = 900.0
"""Seconds without another round after which a run counts as hanging."""
PARTING = 30.0
"""Seconds that the coordinator goes on after a site has heard of the end, at most."""
SPREAD = 3.0
"""Most seconds from the end of a round to the fault, longer than a round takes."""


class Hang(Exception):
    """No round was completed for :data:`LONGEST` seconds."""


def write_data(folder):
    """Write each site's data below ``folder``, and return the directory."""
    place = folder / "data"
    place.mkdir()
    for number, name in enumerate(NAMES):
        (x, y), (x_test, y_test) = images(24, 50 * number, 2 * number), images(12, 50 * number, 2 * number + 1)
        write_npz(place / f"{name}.npz", x_train=x, y_train=y, x_test=x_test, y_test=y_test)
    return str(place)


class Run:
    """Three sites and a coordinator in ``three``, started again whenever they end before the end."""

    def __init__(self, three):
        self.three, self.restarts = three, Counter()
        self.delays = dict(zip(NAMES, DELAYS, strict=True))
        for name, delay in self.delays.items():
            three.link(name, delay=delay)
        self.coordinator = three.serve("--min-clients", 3)
        self.sites = {name: three.join(name) for name in NAMES}
        self._done, self._since, self._ended = 0, time.monotonic(), dict[int, float]()

    def step(self):
        """Start again what has ended, wait a moment, and return whether the experiment goes on."""
        if self.coordinator.code == 0:
            return False
        if self.coordinator.code is not None:
            self.restarts["coordinator"] += 1
            begun = (self.three.served / "config.toml").exists()
            self.coordinator = self.three.serve("--min-clients", 3, resume=begun)
        for name, site in self.sites.items():
            ended = self._ended.setdefault(site.pid, time.monotonic()) if site.code is not None else 0.0
            if site.code or (ended and time.monotonic() - ended > PARTING):  # told of an end that was then lost
                self.restarts["site"] += 1
                self.sites[name] = self.three.join(name)
        done = self.three.rounds_done
        if done != self._done:
            self._done, self._since = done, time.monotonic()
        if time.monotonic() - self._since > LONGEST:
            raise Hang(f"no round since number {done}")
        time.sleep(0.05)
        return True

    def choose(self, random):
        """Return a random process that runs, and whose it is in words."""
        running = {name: each for name, each in self.everybody.items() if each.code is None}
        name = random.choice(sorted(running))
        return running[name], "coordinator" if name == "coordinator" else "site"

    @property
    def everybody(self):
        """The process of each place."""
        return {"coordinator": self.coordinator, **self.sites}

    def kill(self, random):
        """Kill a random process, and return what it was."""
        process, what = self.choose(random)
        process.kill()
        return f"kill of a {what}"

    def freeze(self, random):
        """Stop a random process for a while, and return what it was."""
        process, what = self.choose(random)
        process.signal(signal.SIGSTOP)
        try:
            self.go_on(random.uniform(0, PAUSE))
        finally:
            process.signal(signal.SIGCONT)
        return f"freeze of a {what}"

    def cut(self, random, state="cut"):
        """Cut a random site's link for a while, and return what was done."""
        name = random.choice(NAMES)
        self.three.link(name, delay=self.delays[name], state=state)
        self.go_on(random.uniform(0, PAUSE))
        self.three.link(name, delay=self.delays[name])
        return f"{state} of a site's link"

    def stall(self, random):
        """Let nothing pass over a random site's link for a while, and return what was done."""
        return self.cut(random, "stalled")

    def go_on(self, seconds):
        """Let the experiment go on for so long, unless it ends before."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and self.step():
            pass


def list_counts(counts):
    """Return counts in words, the greatest first."""
    return ", ".join(f"{number} {what}" for what, number in counts.most_common())


def plan(random, faults):
    """Return each of ``faults``: its kind, the rounds after which it happens, and the seconds from then."""
    kinds = [KINDS[number % len(KINDS)] for number in range(faults)]
    random.shuffle(kinds)
    rounds = [int(ROUNDS * (number + random.random()) / faults) for number in range(faults)]
    return [(kind, after, random.uniform(0, SPREAD)) for kind, after in zip(kinds, rounds, strict=True)]


def run(folder, seed, faults=EACH, *, say=print):
    """Run one experiment with ``faults`` in ``folder``, which is empty; return a line of the log.

    Raises AssertionError where its results differ from those of one process, and :class:`Hang`.
    """
    random, method = Random(f"faults {seed}"), METHODS[seed % len(METHODS)]
    spec = spec_for(
        method, data=write_data(folder), model="tests.flower.gated:network", rounds=ROUNDS, evaluate_every=2,
        samples=None, image_size=None,
    )  # fmt: skip
    happened, start = Counter(), time.monotonic()
    with machines(folder, spec) as three:
        going = Run(three)
        for kind, after, delay in plan(random, faults):
            while three.rounds_done < after and going.step():
                pass
            going.go_on(delay)
            if going.coordinator.code == 0:  # this fault comes too late
                break
            done = three.rounds_done
            what = getattr(going, kind)(random)
            happened[what] += 1
            say(f"seed {seed}, {method}: {what}, after round {done}", flush=True)
        while going.step():
            pass
        assert three.rounds == [list(NAMES)] * ROUNDS, three.rounds
    for engine in ENGINES:
        reference = folder / f"reference-{engine}"
        same_as_in_process(spec, three.served, folder, reference, engine)
        rows, wanted = (list_rows(read_summary(place)) for place in (three.served, reference))
        assert set(rows) <= set(wanted)
    return {
        "seed": seed, "method": method, "faults": happened.total(), "happened": dict(happened),
        "restarts": dict(going.restarts), "rows_missing": len(wanted) - len(rows),
        "seconds": round(time.monotonic() - start),
    }  # fmt: skip


def main():
    """Make as many faults as are asked for, less those in the log."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=40)
    parser.add_argument("--log", type=Path, default=Path("kills.jsonl"))
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no run after so long")
    given = parser.parse_args()
    lines = [json.loads(line) for line in given.log.read_text().splitlines()] if given.log.exists() else []
    began = time.monotonic()
    while sum(line["faults"] for line in lines) < given.faults and time.monotonic() - began < 60 * given.minutes:
        seed = max((line["seed"] for line in lines), default=-1) + 1
        folder = Path(tempfile.mkdtemp(prefix="kills-"))
        try:
            lines.append({**run(folder, seed), "result": "same bits"})
        except Hang as error:
            lines.append({"seed": seed, "faults": EACH, "result": f"hang: {error}", "folder": str(folder)})
        except AssertionError as error:
            lines.append({"seed": seed, "faults": EACH, "result": f"differs: {error}"[:500], "folder": str(folder)})
        with given.log.open("a") as log:
            log.write(json.dumps(lines[-1]) + "\n")
    results = Counter(line["result"].partition(":")[0] for line in lines)
    print(f"{sum(line['faults'] for line in lines)} faults in {len(lines)} runs: {list_counts(results)}")
    for counted in ("happened", "restarts"):
        counts = sum((Counter(line.get(counted, {})) for line in lines), Counter())
        print(f"{counted}: {list_counts(counts)}")
    rows, seconds = (sum(line.get(name, 0) for line in lines) for name in ("rows_missing", "seconds"))
    print(f"records missing, of sites that were away: {rows}; {seconds / 60:.0f} minutes")
    return 0 if set(results) <= {"same bits"} else 1


if __name__ == "__main__":
    sys.exit(main())
