"""Commands in namespaces of their own, made by bubblewrap: no network, a read-only system, no foreign processes (M37)."""

import os
import re
import resource
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

from mcore_agent.protocols import ExecLimits, Ran
from mcore_agent.sandbox.folder import LIMITS, NO_ENV, PATH, Folder, threads

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/opt", "/etc")  # what a command may read
HOME = "/work"
SHM_BYTES = 64 << 20
KERNEL = (5, 14)  # from here on each user namespace has a count of processes of its own
# Sets the limit inside the namespace, where only the sandbox counts; then the command, with the shell's status 127 if there is none.
# Shells disagree about the letter.
FEW = 'n=$1; shift; { ulimit -u "$n" 2>/dev/null || ulimit -p "$n"; } && exec "$@"'
INSTALL = (
    "install bubblewrap (Debian and Ubuntu: apt-get install bubblewrap) and allow user namespaces (sysctl user.max_user_namespaces "
    "above 0; on Ubuntu kernel.apparmor_restrict_unprivileged_userns=0; in a container --security-opt seccomp=unconfined), "
    "or name the sandbox 'process' for code that you trust"
)


class NoBubblewrap(RuntimeError):
    """This machine cannot make such a sandbox. The message says what to change."""


@dataclass
class Bubblewrap(Folder):
    """A command sees the system's programs read-only, its own folder as ``/work``, a ``/tmp`` and its own processes.

    ``read`` are more files or folders that it may read, at the same place. Home folders, data and other sandboxes are not there.
    """

    read: Sequence[str] = ()
    isolates: ClassVar[frozenset[str]] = frozenset({"files", "network", "processes"})

    def start(self) -> None:
        """Makes the folder. Raises NoBubblewrap where that is impossible."""
        probe()
        super().start()

    def exec(self, command: Sequence[str], limits: ExecLimits = LIMITS, stdin: bytes = b"", env: Mapping[str, str] = NO_ENV) -> Ran:
        """Runs a command to its end; of the environment it sees only ``env`` and where it lives."""
        own = {"PATH": PATH, "HOME": HOME, "TMPDIR": "/tmp", "LANG": "C.UTF-8"}
        binds = ["--bind", f"{self.home}/work", HOME, "--bind", f"{self.home}/tmp", "/tmp", "--chdir", HOME]
        for path in self.read:
            binds += ["--ro-bind", path, path]
        run = ["--json-status-fd", "3", "--remount-ro", "/", "--", *few(threads(limits)), *command]
        return self.keep([*walls(), *binds, *run], "/", limits, stdin, {**own, **env}, reports=True)


def few(most: int) -> list[str]:
    """A command that runs another, which may have ``most`` threads; fewer where this process may not have as many."""
    hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    return ["sh", "-c", FEW, "sh", str(most if hard == resource.RLIM_INFINITY else min(most, hard))]


def walls() -> list[str]:
    """bubblewrap's own arguments: the namespaces and what is mounted in them, up to the sandbox's folder."""
    words = ["bwrap", "--unshare-all", "--unshare-user", "--die-with-parent", "--new-session"]
    for path in SYSTEM:
        if os.path.islink(path):
            words += ["--symlink", os.readlink(path), path]
        elif os.path.exists(path):
            words += ["--ro-bind", path, path]
    # Files below /dev would be memory that no limit counts.
    return [*words, "--proc", "/proc", "--dev", "/dev", "--size", str(SHM_BYTES), "--tmpfs", "/dev/shm", "--remount-ro", "/dev"]


@cache
def probe() -> None:
    """Raises NoBubblewrap unless bubblewrap works here; asks once."""
    if shutil.which("bwrap") is None:
        raise NoBubblewrap(f"there is no program bwrap: {INSTALL}")
    release = os.uname().release
    if os.geteuid() != 0 and tuple(int(n) for n in re.findall(r"\d+", release)[:2]) < KERNEL:
        raise NoBubblewrap(
            f"Linux {release} counts a sandbox's processes among all of yours, so that no limit of its own can hold them: use Linux "
            f"{KERNEL[0]}.{KERNEL[1]} or later, run as root, or name the sandbox 'process' for code that you trust"
        )
    nobody = 65534 if os.geteuid() == 0 else None
    try:
        done = subprocess.run([*walls(), "--", *few(64), "true"], capture_output=True, text=True, cwd="/", user=nobody, timeout=60)
    except subprocess.TimeoutExpired as e:
        raise NoBubblewrap(f"bwrap does not answer: {INSTALL}") from e
    if done.returncode:
        raise NoBubblewrap(f"bwrap fails ({done.stderr.strip()}): {INSTALL}")
