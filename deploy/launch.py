"""`python -m deploy.launch CONFIG`: the older name of `manta serve CONFIG`."""

from __future__ import annotations

import sys

from deploy.start import cli


def main(argv: list[str] | None = None) -> int:
    """Run `manta serve` with these arguments; returns its exit status."""
    return cli.main(["serve", *(sys.argv[1:] if argv is None else argv)])


if __name__ == "__main__":
    sys.exit(main())
