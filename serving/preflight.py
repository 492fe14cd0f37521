"""Says what this machine lacks to run the project: `python3 -m serving.preflight`.

Runs before anything is installed: the standard library only, and syntax that Pythons older than
the supported ones still read, so that they get a sentence and not a traceback.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

PYTHONS = ((3, 10), (3, 12))  # numpy 1.26.4, the last below 2, has wheels for 3.10 to 3.12
GLIBC = (2, 35)  # the embedded server is a manylinux_2_35 build
SHARED_MEMORY_BYTES = 256 * 1024**2
DISK_BYTES = 4 * 1024**3  # the environment takes 2 GB, and pip needs room to unpack


def python_problem() -> str | None:
    lowest, highest = (".".join(map(str, version)) for version in PYTHONS)
    if PYTHONS[0] <= sys.version_info[:2] <= PYTHONS[1]:
        return None
    return (
        f"Python {platform.python_version()} ({sys.executable}) is not supported: install "
        f"Python {lowest} to {highest} and name it, as in `make setup PYTHON=python{highest}`."
    )


def glibc_version() -> tuple[int, ...] | None:
    """The C library's version, or None where it is not glibc."""
    try:
        name, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").split()
        return tuple(int(part) for part in version.split(".")) if name == "glibc" else None
    except (ValueError, OSError, AttributeError):
        return None


def libpython() -> str | None:
    """The path of this Python's shared library, or None if there is none.

    Distributions and builds put it in different places, and a statically linked interpreter
    (Debian's) works without it.
    """
    name = "libpython{}.{}.so.1.0".format(*sys.version_info[:2])
    folders = [
        Path(sysconfig.get_config_var("LIBDIR") or "/usr/lib"),
        Path(sys.base_prefix, "lib"),
        Path(sys.base_prefix, "lib64"),
        *(Path(folder) for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder),
        *sorted(Path("/usr/lib").glob("*-linux-gnu")),
        Path("/usr/lib64"),
        Path("/usr/lib"),
    ]
    return next((str(folder / name) for folder in folders if (folder / name).exists()), None)


def embedded_server_problems() -> list[str]:
    """What keeps nvidia-pytriton's tritonserver from running here, one sentence each."""
    problems = []
    machine = platform.machine()
    if machine not in ("x86_64", "AMD64"):
        problems.append(
            f"The embedded server needs an x86-64 processor, and this one is {machine}."
        )
    needed = ".".join(map(str, GLIBC))
    glibc = glibc_version()
    if glibc is None:
        problems.append(
            f"The embedded server needs glibc {needed} or newer, and this system has another C "
            "library: use Debian 12, Ubuntu 22.04 or newer."
        )
    elif glibc < GLIBC:
        found = ".".join(map(str, glibc))
        problems.append(
            f"The embedded server needs glibc {needed} or newer, and this system has {found}: "
            "use Debian 12, Ubuntu 22.04 or newer."
        )
    if libpython() is None:
        version = "{}.{}".format(*sys.version_info[:2])
        problems.append(
            f"The shared library libpython{version}.so.1.0 of {sys.executable} is missing: install "
            f"the package libpython{version} (Debian, Ubuntu), or a Python that was built with "
            "--enable-shared."
        )
    return problems


def setup_problems() -> tuple[list[str], list[str]]:
    """What keeps `make setup` from working, and what is only worth a note: sentences each."""
    problems = []
    notes = []
    if sys.platform != "linux":
        return [f"The server runs on Linux only, and this is {platform.system()}."], []
    if python_problem():
        problems.append(str(python_problem()))
    else:
        embedded = embedded_server_problems()
        if embedded and shutil.which("tritonserver"):
            notes += embedded
            notes.append(f"`make serve` will use {shutil.which('tritonserver')}.")
        else:
            problems += embedded
        if not _can_make_environments():
            version = "{}.{}".format(*sys.version_info[:2])
            problems.append(
                f"{sys.executable} cannot make virtual environments: install the package "
                f"python{version}-venv (Debian, Ubuntu)."
            )
    free = _free_bytes(Path("/dev/shm"))
    if free is None:
        problems.append("There is no /dev/shm: mount a tmpfs there (containers: --shm-size=1g).")
    elif free < SHARED_MEMORY_BYTES:
        notes.append(
            f"/dev/shm has {free >> 20} MB free, and the server's Python processes exchange "
            f"tensors there: give it at least {SHARED_MEMORY_BYTES >> 20} MB "
            "(containers: --shm-size=1g)."
        )
    free = _free_bytes(Path.cwd())
    if free is not None and free < DISK_BYTES:
        notes.append(
            f"{Path.cwd()} has {free / 1024**3:.1f} GB free, and the setup takes up to "
            f"{DISK_BYTES >> 30} GB."
        )
    return problems, notes


def _can_make_environments() -> bool:
    probe = "import venv, ensurepip"
    return subprocess.run([sys.executable, "-c", probe], capture_output=True).returncode == 0


def _free_bytes(folder: Path) -> int | None:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def main() -> int:
    problems, notes = setup_problems()
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
