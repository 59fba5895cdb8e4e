"""Manta on Ray Serve: ingress, OpenAI protocol, engine replicas, metrics."""

import sys

# Before anything that an older Python can't even read.
if sys.version_info < (3, 11):  # noqa: UP036
    sys.exit("error: Manta needs Python 3.11 or newer, not " + sys.version.split()[0] + ".")
