"""The launcher's child: `serve run`, which also reports the status of the deployment.

    python -m deploy.start.serve_run CONFIG STATUS_FD

Plain `serve run` only prints. This writes one line of JSON to `STATUS_FD` when the status changes:
`{"application name": {"status": ..., "message": ...}}`, with messages of the application and of its
deployments. It ends when all applications run or one has failed.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from pathlib import Path

from deploy.start.aftermath import leave_to_aftermath

POLL_S = 0.25


def main() -> None:
    """Run until SIGINT, as `serve run` does. If the launcher is gone by then, do what it would
    do: end the launch's processes and remove its folder."""
    config, status_fd, launcher = Path(sys.argv[1]), int(sys.argv[2]), os.getppid()
    from ray.serve.scripts import cli

    threading.Thread(target=_report, args=(status_fd,), daemon=True).start()
    root = Path(__file__).resolve().parents[2]
    sys.argv = ["serve", "run", "--app-dir", str(root), str(config)]
    try:
        cli()
    except SystemExit as end:
        if end.code or os.environ.get("RAY_ADDRESS"):
            raise
        # Serve has stopped its replicas. Ray would now take seconds to end what the launcher, which
        # finds it by its mark, ends at once.
        sys.stdout.flush()
        sys.stderr.flush()
        if os.getppid() == launcher:
            os._exit(0)
    finally:
        if os.getppid() != launcher:
            leave_to_aftermath(config.parent)


def _report(status_fd: int) -> None:
    last = ""
    while True:
        time.sleep(POLL_S)
        states = _states()
        told = json.dumps(states)
        if told != last:
            last = told
            os.write(status_fd, told.encode() + b"\n")
        known = {state["status"] for state in states.values()}
        if known == {"RUNNING"} or "DEPLOY_FAILED" in known:
            os.close(status_fd)
            return


def _states() -> dict[str, dict[str, str]]:
    import ray
    from ray import serve
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException

    if not ray.is_initialized():
        return {}
    try:
        applications = serve.status().applications
    except (RayError, RayServeException, ValueError):  # the controller isn't up yet
        return {}
    except Exception:  # log it and ask again: the launcher waits for an answer
        traceback.print_exc()
        return {}
    return {
        name: {
            "status": app.status.value,
            "message": "\n".join(
                filter(None, [app.message, *(d.message for d in app.deployments.values())])
            ),
        }
        for name, app in applications.items()
    }


if __name__ == "__main__":
    main()
