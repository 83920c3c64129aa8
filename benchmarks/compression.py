"""What lossless compression of uploads would save: real uploads of two clients of the digits, by method and round.

    python benchmarks/compression.py

For each way: bytes after over bytes before, and megabytes that a second of one core compresses and restores.
``shuffle`` puts the first bytes of all numbers together, then the second ones, and so on; ``xor`` combines the bits of
the upload with those of the broadcast first, which the receiver can undo.
"""

from __future__ import annotations

import time
import zlib

import numpy as np
from torch import Tensor

import fedshift
from fedshift.engines.sequential import Sequential

METHODS = ("fedavg", "fedbn", "scaffold")
ROUNDS = 10
WATCHED = (1, 5, 10)


def collect(method: str) -> dict[int, list[tuple[bytes, bytes]]]:
    """Return the float32 bytes of each upload, and those of the broadcast before it, by round."""
    seen = dict[int, list[tuple[bytes, bytes]]]()
    train = Sequential.train_client

    def watch(self, server, name, client):  # type: ignore[no-untyped-def]
        found = train(self, server, name, client)
        shared = found.update.shared
        seen.setdefault(server.round + 1, []).append((flat(shared), flat({key: server.shared[key] for key in shared})))
        return found

    Sequential.train_client = watch  # type: ignore[method-assign]
    try:
        fedshift.compare(
            [method], data="digits", domains="print,photo", samples=300, rounds=ROUNDS, seeds=[0], engine="sequential",
            evaluate_every=ROUNDS,
        )  # fmt: skip
    finally:
        Sequential.train_client = train  # type: ignore[method-assign]
    return seen


def flat(state: dict[str, Tensor]) -> bytes:
    return b"".join(x.numpy().tobytes() for x in state.values() if x.is_floating_point())


def shuffle(raw: bytes) -> bytes:
    return np.frombuffer(raw, np.uint8).reshape(-1, 4).T.tobytes()


def restore(shuffled: bytes) -> bytes:
    return np.frombuffer(shuffled, np.uint8).reshape(4, -1).T.tobytes()


def xor(raw: bytes, base: bytes) -> bytes:
    return (np.frombuffer(raw, np.uint32) ^ np.frombuffer(base, np.uint32)).tobytes()


def measure(raw: bytes, base: bytes, *, level: int, shuffled: bool, against: bool) -> tuple[float, float]:
    """Return bytes after over before, and seconds of a core to compress and restore."""
    began = time.process_time()
    made = xor(raw, base) if against else raw
    packed = zlib.compress(shuffle(made) if shuffled else made, level)
    back = restore(zlib.decompress(packed)) if shuffled else zlib.decompress(packed)
    back = xor(back, base) if against else back
    seconds = time.process_time() - began
    assert back == raw
    return len(packed) / len(raw), seconds


def main() -> None:
    print(f"{'method':10} {'round':>5} {'MB':>6}  {'way':20} {'after/before':>12} {'MB/s':>7}")
    for method in METHODS:
        seen = collect(method)
        for round in WATCHED:
            for name, named in (
                ("zlib 1", {"level": 1, "shuffled": False, "against": False}),
                ("shuffle, zlib 1", {"level": 1, "shuffled": True, "against": False}),
                ("shuffle, zlib 6", {"level": 6, "shuffled": True, "against": False}),
                ("xor, shuffle, zlib 1", {"level": 1, "shuffled": True, "against": True}),
            ):
                found = [measure(raw, base, **named) for raw, base in seen[round]]  # type: ignore[arg-type]
                size = sum(len(raw) for raw, _ in seen[round]) / len(found)
                ratio, seconds = (sum(each) / len(found) for each in zip(*found, strict=True))
                print(f"{method:10} {round:5} {size / 1e6:6.2f}  {name:20} {ratio:12.3f} {size / 1e6 / seconds:7.1f}")


if __name__ == "__main__":
    main()
