"""The installation for GPUs of docs/gpu.md, line by line, as far as a machine without one allows.

Not executed: pip's downloads (each call is written down) and the server. `flashinfer` is the real
command where the package is installed, with `--dry-run`.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tomllib

import pytest

from deploy.start import cli
from tests.support.source_files import ROOT

_VENV = """#!/bin/sh
echo "python3 $*" >> {calls}
mkdir -p "$3/bin"
for name in pip flashinfer manta; do
    printf '#!/bin/sh\\necho "%s $*" >> {calls}\\n' "$name" > "$3/bin/$name"
    chmod +x "$3/bin/$name"
done
printf '#!/bin/sh\\nexec {python} "$@"\\n' > "$3/bin/python"
chmod +x "$3/bin/python"
"""


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What the page's lines call, in order."""
    folder = tmp_path_factory.mktemp("install")
    noted = folder / "calls.txt"
    (folder / "bin").mkdir()
    program = folder / "bin" / "python3"
    program.write_text(_VENV.format(calls=noted, python=sys.executable))
    program.chmod(0o755)
    env = {"PATH": f"{folder / 'bin'}:/usr/bin:/bin"}
    done = subprocess.run(
        ["bash", "-ec", _lines()], cwd=folder, env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() in ("True", "False")
    return noted.read_text().splitlines()


def _lines() -> str:
    section = (ROOT / "docs/gpu.md").read_text().partition("## Install\n")[2]
    found = re.search(r"```bash\n(.*?)```", section, re.S)
    assert found is not None
    return found[1]


def _pinned(name: str) -> str:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    (version,) = [line.partition("==")[2] for line in lines if line.startswith(f"{name}==")]
    return version


def test_torch_comes_once_in_the_pinned_version(calls: list[str]) -> None:
    pips = [call.split()[1:] for call in calls if call.startswith("pip ")]
    assert pips[0] == ["install", f"torch=={_pinned('torch')}"]
    assert pips[1] == ["install", "-c", "constraints.txt", "-e", ".[gpu]"]
    assert len(pips) == 2


def test_kernels_and_driver_are_named(calls: list[str]) -> None:
    page = (ROOT / "docs/gpu.md").read_text().partition("## Install\n")[2].partition("\n## ")[0]
    assert "flashinfer download-kernels" in calls
    assert "driver 580" in page and "`nvcc`" in page and "`ninja`" in page
    assert _pinned("flashinfer-python") in page


def test_flashinfer_is_pinned_to_what_was_checked() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (wanted,) = extras["optional-dependencies"]["gpu"]
    assert wanted == f"flashinfer-python>={_pinned('flashinfer-python')},<0.7.3"


def test_the_last_line_serves_a_config_that_is_there(calls: list[str]) -> None:
    name, *arguments = calls[-1].split()
    assert name == "manta"
    options = cli._parser().parse_args(arguments)
    assert (ROOT / options.target).is_file() and options.run is cli.serve


@pytest.mark.skipif(
    importlib.util.find_spec("flashinfer") is None, reason="flashinfer isn't installed"
)
def test_the_command_for_kernels_exists() -> None:
    command = [sys.executable, "-m", "flashinfer", "download-kernels", "--dry-run"]
    done = subprocess.run(
        [*command, "--cuda-version", "13.0"], capture_output=True, text=True, check=True
    )
    assert f"flashinfer-jit-cache=={_pinned('flashinfer-python')}" in done.stdout
