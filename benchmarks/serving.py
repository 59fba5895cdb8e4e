"""`manta bench` with a server of its own: starts Manta, concurrency 1 and 32, and stops it.

    python benchmarks/serving.py
    python benchmarks/serving.py --base-url http://127.0.0.1:8000 --request-rate 4

benchmarks/README.md explains the figures.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.load import command
from benchmarks.load.output import finish
from benchmarks.servers import ServerError, exit_on_sigterm, manta_server


def main() -> int:
    """Exit status: 1 if a request failed or Manta couldn't be started."""
    exit_on_sigterm()
    try:
        return command.main(start_server=manta_server)
    except ServerError as error:
        print(error, file=sys.stderr)
        finish({"benchmark": "serving", "error": str(error)}, False)
        return 1


if __name__ == "__main__":
    sys.exit(main())
