"""A site behind a link that is slow and is cut again and again: what it takes, and whether the result is the same.

    python -m tests.flower.cuts --megabytes 100 --rate 1

A proxy between the site and the coordinator passes ``--rate`` megabytes a second in each direction, and cuts each
connection after 4 to 12 MB, in turn as if a program had ended (FIN) and as if a device had lost it (RST).
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

from tests.conftest import images, write_npz
from tests.flower.processes import free_port, machines
from tests.flower.sites import same_as_in_process, spec_for

PROXY = """
import asyncio, itertools, json, random, socket, struct, sys
port, target, rate, said = int(sys.argv[1]), int(sys.argv[2]), 1e6 * float(sys.argv[3]), sys.argv[4]
turns, draw, free = itertools.count(), random.Random(0), {"up": 0.0, "down": 0.0}
seen = {"up": 0, "down": 0, "cuts": 0}

async def pump(direction, reader, writer, left, cut):
    clock = asyncio.get_running_loop().time
    try:
        while part := await reader.read(16384):
            free[direction] = max(clock(), free[direction]) + len(part) / rate
            await asyncio.sleep(free[direction] - clock())
            left[0] -= len(part)
            if left[0] < 0:
                cut()
                return
            seen[direction] += len(part)
            writer.write(part)
            await writer.drain()
        writer.close()
    except OSError:
        writer.close()

async def serve(reader, writer):
    there, back = await asyncio.open_connection("localhost", target)
    left, hard, ends = [draw.uniform(4e6, 12e6)], next(turns) % 2, (writer, back)

    def cut():
        seen["cuts"] += 1
        with open(said, "w") as file:
            file.write(json.dumps(seen))
        for end in ends:
            if hard:
                end.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            end.transport.abort()

    await asyncio.gather(pump("up", reader, back, left, cut), pump("down", there, writer, left, cut))

async def main():
    async with await asyncio.start_server(serve, "localhost", port) as server:
        print("ready", flush=True)
        await server.serve_forever()

asyncio.run(main())
"""


def run(folder, *, megabytes, rate):
    """Return the seconds and cuts of one round with a model of so many megabytes; the result is that of one process."""
    data, names = folder / "data", ("pen", "photo")
    data.mkdir()
    for place, name in enumerate(names):
        (x, y), (x_test, y_test) = images(24, 50 * place, 2 * place), images(12, 50 * place, 2 * place + 1)
        write_npz(data / f"{name}.npz", x_train=x, y_train=y, x_test=x_test, y_test=y_test)
    pixels = x[0].size
    spec = spec_for(
        "fedavg", data=str(data), domains="pen,photo", rounds=1, evaluate_every=1, samples=None, image_size=None,
        model=f"tests.flower.gated:network(width={int(megabytes * 1e6 / 4 / (pixels + 10))})",
    )  # fmt: skip
    with machines(folder, spec) as two:
        coordinator = two.serve("--min-clients", 2, seconds=3600)
        port, said = free_port(), folder / "seen.json"
        two.go_on("proxy", PROXY, port, two.port, rate, said).says("ready")
        two._links["pen"] = port
        began = time.monotonic()
        sites = [two.join("pen"), two.join("photo")]
        assert coordinator.ends() == 0, coordinator.said
        seconds = time.monotonic() - began
        assert [site.ends() for site in sites] == [0, 0]
        assert two.rounds == [list(names)]
    same_as_in_process(spec, two.served, folder, folder / "reference")
    return {"seconds": round(seconds), **json.loads(said.read_text())}


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--megabytes", type=float, default=100.0)
    parser.add_argument("--rate", type=float, default=1.0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(run(Path(folder), megabytes=given.megabytes, rate=given.rate))


if __name__ == "__main__":
    main()
