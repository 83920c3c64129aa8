"""What keeps Flower's programs from phoning home; import it before anything of ``flwr``.

They report use (telemetry) and ask for updates even for ``--help``. Both are read from the environment, telemetry when
``flwr`` is imported, so importing this module switches them off in this process and in those that it starts.
"""

from __future__ import annotations

import os

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}

os.environ.update(QUIET)
