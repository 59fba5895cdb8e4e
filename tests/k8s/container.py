"""One container: a process tree with its own network, mounts and pids, from a read-only image.

The image is this machine's root file system with the files of the Dockerfile in /opt/manta. What is
written goes to the volumes only. Of a container's security context, user, group, capabilities,
privileges and the read-only root hold.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.source_files import ROOT

_SETUP = """
set -e
mount --make-rprivate /
mount -t tmpfs tmpfs {base}
mkdir {base}/upper {base}/work {base}/root
mount -t overlay overlay -o lowerdir=/,upperdir={base}/upper,workdir={base}/work {base}/root
cd {base}/root
hostname {name}
{prepare}
mount -o remount,ro,bind {base}/root {base}/root 2>/dev/null || mount -o remount,ro {base}/root
mount --rbind /dev dev
mount -t tmpfs -o mode=1777,nosuid,nodev tmpfs dev/shm
mount -t proc proc proc
mount --rbind /sys sys
{volumes}
cd /
exec chroot {base}/root {command}
"""


@dataclass
class Volume:
    """What a container sees under `path`: an empty folder in memory, or files."""

    path: str
    source: Path | None = None
    read_only: bool = False


@dataclass
class Container:
    """A process tree that is started by `start` and ends as a whole."""

    netns: str
    command: Sequence[str]
    env: Mapping[str, str]
    hosts: Path
    volumes: list[Volume]
    log: Path
    user: int
    image: Path
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    def start(self) -> None:
        """Start it. It must not run."""
        base = Path(tempfile.mkdtemp(prefix="manta-pod-", dir="/tmp"))
        env = ["env", "-i", *(f"{key}={value}" for key, value in self.env.items())]
        script = _SETUP.format(
            base=base,
            name=shlex.quote(self.hosts.stem),
            prepare="\n".join(self._prepare()),
            volumes="\n".join(
                [*map(self._mount, [_code(self.image), *self.volumes]), *self._keep_python()]
            ),
            command=shlex.join([*self._as_user(), *env, *self.command]),
        )
        spaces = ["unshare", "--mount", "--pid", "--ipc", "--uts", "--fork", "--kill-child"]
        words = ["ip", "netns", "exec", self.netns, *spaces, "bash", "-c", script]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                words, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
            )
        self._base = base

    def _prepare(self) -> list[str]:
        """Commands in the new root before it becomes read-only."""
        points = [volume.path.lstrip("/") for volume in [_code(self.image), *self.volumes]]
        lines = [f"mkdir -p {shlex.quote(point)}" for point in points]
        lines += [f"cp {shlex.quote(str(self.hosts))} etc/hosts"]
        # Python and its packages may lie where only root may go.
        for start in {Path(sys.prefix), Path(sys.base_prefix)}:
            for folder in [start, *start.parents][:-1]:
                if not folder.stat().st_mode & 0o001:
                    lines.append(f"chmod o+x {shlex.quote(str(folder).lstrip('/'))}")
        return lines

    def _mount(self, volume: Volume) -> str:
        point = shlex.quote(volume.path.lstrip("/"))
        if volume.source is None:
            return f"mount -t tmpfs -o mode=1777 tmpfs {point}"
        bind = f"mount --rbind {shlex.quote(str(volume.source))} {point}"
        return f"{bind} && mount -o remount,bind,ro {point}" if volume.read_only else bind

    def _keep_python(self) -> list[str]:
        """Mounts of Python and its packages where a volume hides them."""
        lines = []
        for start in {Path(sys.prefix), Path(sys.base_prefix)}:
            if any(start.is_relative_to(volume.path) for volume in self.volumes):
                inside = shlex.quote(str(start).lstrip("/"))
                lines += [f"mkdir -p {inside}", f"mount --rbind {shlex.quote(str(start))} {inside}"]
        return lines

    def _as_user(self) -> list[str]:
        ids = [f"--reuid={self.user}", f"--regid={self.user}", "--clear-groups"]
        return ["setpriv", *ids, "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"]

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def pid(self) -> int | None:
        """The first process of the container, seen from outside; None if it has ended."""
        if self.process is None:
            return None
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        try:
            found = children.read_text().split()
        except OSError:
            return None
        return int(found[0]) if found else None

    def signal(self, number: signal.Signals) -> None:
        """Send to the first process: SIGKILL ends the whole container."""
        pid = self.pid
        if pid is not None:
            os.kill(pid, number)

    def run(self, command: Sequence[str], timeout_s: float = 60.0) -> tuple[int, str]:
        """Exit status and output of a command in the container (124: it took too long)."""
        pid = self.pid
        if pid is None:
            return 255, "the container doesn't run"
        spaces = ["--net", "--pid", "--mount", "--ipc", "--uts", "--root", "--wdns=/opt/manta"]
        env = ["env", "-i", *(f"{key}={value}" for key, value in self.env.items())]
        words = ["nsenter", "--target", str(pid), *spaces, *self._as_user(), *env, *command]
        try:
            done = subprocess.run(
                words,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=timeout_s,
            )
        except subprocess.TimeoutExpired as expired:
            return 124, str(expired.output or "")
        return done.returncode, done.stdout

    def wait(self, timeout_s: float) -> bool:
        """Whether it ended in time."""
        if self.process is None:
            return True
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def remove(self) -> None:
        """Kill what runs, and remove what `start` made."""
        self.signal(signal.SIGKILL)
        self.wait(30)
        base = getattr(self, "_base", None)
        if base is not None and base.exists():
            base.rmdir()


def _code(image: Path) -> Volume:
    return Volume("/opt/manta", image, read_only=True)


def image_folder(target: Path) -> Path:
    """/opt/manta of the image in `target`: what the Dockerfile copies, with the CPU kernels."""
    copies = [line.split()[1:-1] for line in _dockerfile() if line.startswith("COPY ")]
    for source in (name for copy in copies if not copy[0].startswith("--") for name in copy):
        subprocess.run(["cp", "-r", "--parents", source, str(target)], check=True, cwd=ROOT)
    library = target / "engine/native/lib"
    library.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "engine.native.build", "--into", str(library)]
    subprocess.run(command, check=True, cwd=ROOT, capture_output=True)
    subprocess.run(["chmod", "-R", "a+rX", str(target)], check=True)
    return target


def _dockerfile() -> list[str]:
    """Lines of the stage that is the image."""
    text = (ROOT / "Dockerfile").read_text()
    return text.partition("\nFROM packages AS cpu\n")[2].partition("\nFROM ")[0].splitlines()
