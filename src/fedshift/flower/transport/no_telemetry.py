"""Environment that keeps Flower's programs from calling home; import it before anything of ``flwr``.

They report usage (telemetry) and check for updates even for ``--help``. Flower reads both settings from the
environment, telemetry when ``flwr`` is imported, so importing this module disables them in this process and in its
children.
"""

from __future__ import annotations

import os

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}

os.environ.update(QUIET)
