"""A TCP proxy in place of a site's link to the coordinator, which can be slow, stall or be cut.

    python -m tests.flower.link FILE PORT TO

It passes connections to ``PORT`` on to port ``TO`` of this machine. ``FILE`` holds JSON, which is read again as soon as
it changes: ``delay``, the seconds by which everything arrives later, each way; ``state``: "up", "stalled" (nothing
passes, and nothing is lost) or "cut" (connections are broken, and new ones refused).
"""

import asyncio
import json
import sys
from contextlib import suppress
from pathlib import Path

PART = 2**16
"""Most bytes that are read at once."""
MOST_PARTS = 64
"""Most parts under way in each direction of a connection."""
LOOK = 0.02
"""Seconds between two looks at the file."""


class Link:
    """What ``file`` said last, and the connections that are open."""

    def __init__(self, file, target):
        self.file, self.target = file, target
        self.delay, self.state, self._writers = 0.0, "up", set()

    async def follow(self):
        """Read the file again and again, and break all connections while the link is cut."""
        while True:
            with suppress(ValueError, OSError):  # it is being written
                said = json.loads(self.file.read_text())
                self.delay, self.state = said["delay"], said["state"]
            if self.state == "cut":
                for writer in self._writers:
                    writer.transport.abort()
            await asyncio.sleep(LOOK)

    async def accept(self, reader, writer):
        """Pass on a new connection, both ways, until either side ends it."""
        self._writers.add(writer)
        with suppress(OSError):
            if self.state != "cut":
                far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.target)
                self._writers.add(far_writer)
                ways = [self._pass(reader, far_writer), self._pass(far_reader, writer)]
                await asyncio.gather(*ways)
                self._writers.discard(far_writer)
        self._writers.discard(writer)
        writer.transport.abort()

    async def _pass(self, reader, writer):
        parts, clock = asyncio.Queue(MOST_PARTS), asyncio.get_running_loop().time

        async def write():
            while True:
                due, part = await parts.get()
                while (left := due - clock()) > 0 or self.state == "stalled":
                    await asyncio.sleep(max(left, LOOK))
                if not part:
                    writer.close()
                    return
                writer.write(part)
                await writer.drain()

        async def read():
            while True:
                part = await reader.read(PART)
                await parts.put((clock() + self.delay, part))
                if not part:
                    return

        tasks = [asyncio.ensure_future(write()), asyncio.ensure_future(read())]
        try:
            await asyncio.gather(*tasks)
        except OSError:
            writer.transport.abort()
        finally:
            for task in tasks:
                task.cancel()


async def main(file, port, target):
    """Serve until the process is killed."""
    link = Link(Path(file), int(target))
    async with await asyncio.start_server(link.accept, "127.0.0.1", int(port)) as server:
        print("listening", flush=True)
        await asyncio.gather(server.serve_forever(), link.follow())


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
