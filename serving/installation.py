"""Where the Triton server is on this machine, and what it needs around it."""

import importlib.metadata
import importlib.util
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from serving import preflight
from serving.errors import ServeError

# Names a tritonserver to use instead of the one that is found.
BINARY_VARIABLE = "TRITONSERVER"
CONTAINER_BACKENDS = Path("/opt/tritonserver/backends")


@dataclass(frozen=True)
class Installation:
    """A tritonserver binary with the folders it needs.

    `backends` maps a backend's name to the files or the one folder that make it up; `libraries`
    go to the front of LD_LIBRARY_PATH, `executables` to the front of PATH: the interpreter of a
    Python model is an isolated one, which ignores PYTHONPATH and takes the packages of the first
    `python3` on the PATH.
    """

    binary: Path
    backends: dict[str, Path | list[Path]]
    libraries: list[Path]
    executables: list[Path]
    caches: Path | None = None


def find_installation(binary: Path | None = None) -> Installation:
    """The server named by `binary` or $TRITONSERVER; else the embedded one; else PATH's.

    Raises ServeError if there is none that can run.
    """
    if binary is None and os.environ.get(BINARY_VARIABLE):
        binary = Path(os.environ[BINARY_VARIABLE])
    if binary is not None:
        return _stock_installation(binary)
    on_path = shutil.which("tritonserver")
    problem = embedded_problem()
    if problem is None:
        return _embedded_installation()
    if on_path:
        return _stock_installation(Path(on_path))
    raise ServeError(f"{problem} There is no `tritonserver` on the PATH either.")


def embedded_problem() -> str | None:
    """Why nvidia-pytriton's server cannot run here: a sentence; None if it can."""
    if _pytriton() is None:
        return "nvidia-pytriton, which carries the embedded server, is not installed: `make setup`."
    problem = preflight.python_problem()
    if problem:
        return problem
    problems = preflight.embedded_server_problems()
    if problems:
        return problems[0]
    beside = Path(sys.executable).with_name("python3")
    if not (beside.exists() and beside.samefile(sys.executable)):
        return (
            f"The embedded server would run its models with another Python than {sys.executable}, "
            "which has no `python3` beside it: use a virtual environment (`make setup`)."
        )
    try:
        numpy = importlib.metadata.version("numpy")
    except importlib.metadata.PackageNotFoundError:
        return "numpy, which the embedded server's Python backend needs, is missing: `make setup`."
    if int(numpy.split(".")[0]) >= 2:
        return (
            f"The embedded server's Python backend exchanges garbage with numpy {numpy}: "
            "install a numpy below 2 (`make setup`)."
        )
    return None


def _pytriton() -> Path | None:
    """The folder of the installed pytriton package; it is not imported, which takes seconds."""
    spec = importlib.util.find_spec("pytriton")
    return Path(spec.origin).parent if spec and spec.origin else None


def _embedded_installation() -> Installation:
    package = _pytriton()
    library = preflight.libpython()
    assert package is not None and library is not None  # embedded_problem() was None
    server = package / "tritonserver"
    version = "{}.{}".format(*sys.version_info[:2])
    stub = server / "python_backend_stubs" / version / "triton_python_backend_stub"
    return Installation(
        binary=server / "bin/tritonserver",
        backends={
            "python": [
                server / "backends/python/libtriton_python.so",
                server / "backends/python/triton_python_backend_utils.py",
                stub,
            ]
        },
        libraries=[package.parent / "nvidia_pytriton.libs", Path(library).parent],
        executables=[Path(sys.executable).parent],
        caches=server / "caches",
    )


def _stock_installation(binary: Path) -> Installation:
    """A tritonserver with its own backends beside it, as in NVIDIA's container."""
    if not (binary.is_file() and os.access(binary, os.X_OK)):
        raise ServeError(f"{binary} is not an executable file: name a tritonserver binary.")
    folders = [binary.resolve().parent.parent / "backends", CONTAINER_BACKENDS]
    backends = next((folder for folder in folders if (folder / "python").is_dir()), None)
    if backends is None:
        looked = " or ".join(str(folder / "python") for folder in folders)
        raise ServeError(
            f"{binary} has no Python backend at {looked}: use NVIDIA's container image with all "
            "backends, or the embedded server (`make setup`)."
        )
    stub = backends / "python/triton_python_backend_stub"
    library = "libpython{}.{}.so".format(*sys.version_info[:2])
    ours = stub.is_file() and library.encode() in stub.read_bytes()
    return Installation(
        binary=binary,
        backends={folder.name: folder for folder in sorted(backends.iterdir()) if folder.is_dir()},
        libraries=[],
        # This environment's packages, if the backend was built for this version of Python.
        executables=[Path(sys.executable).parent] if ours else [],
    )
