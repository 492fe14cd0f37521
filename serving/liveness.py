"""A liveness probe for containers: `python3 liveness.py [--http-port 8000]`.

Ends with 0 when the server is live and ready and every process of its Python models is alive, and
with 1 and one sentence otherwise. Triton's own health endpoints stay green when such a process
dies, although its requests are then never answered.

Runs beside the server (in the same container, as the same user): it reads /proc. Needs nothing
but the standard library, so that the file can be copied alone.
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

STUB_NAME = "triton_python_backend_stub"
COMM_LENGTH = 15  # the kernel cuts a process's own name to this length
LISTENING = "0A"  # the state of a listening socket in /proc/net/tcp


class Unhealthy(Exception):
    """One sentence on what is wrong."""


def check(host: str, port: int, timeout: float) -> str:
    """Returns a sentence on the healthy server, or raises Unhealthy.

    timeout: seconds for each answer of the server.
    """
    for state in ("live", "ready"):
        status, _ = ask(host, port, "GET", f"/v2/health/{state}", timeout)
        if status != 200:
            raise Unhealthy(f"The server at {host}:{port} is not {state} (HTTP {status}).")
    expected = expected_stubs(host, port, timeout)
    server = listening_process(port)
    if server is None:
        raise Unhealthy(
            f"No process that listens on port {port} is visible in /proc: run the probe in the "
            "server's container, as the server's user."
        )
    living, dead = stubs_of(server)
    for model, count in sorted(expected.items()):
        if living[model] < count:
            raise Unhealthy(
                f"The model {model!r} has {living[model]} living Python processes of {count}: "
                "restart the server."
            )
    if dead:
        raise Unhealthy(f"{dead} Python processes of the server are dead: restart the server.")
    return f"The server is ready, and its {sum(living.values())} Python processes are alive."


def ask(host: str, port: int, method: str, path: str, timeout: float) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(host, port, timeout=timeout)
    try:
        connection.request(method, path)
        response = connection.getresponse()
        return response.status, response.read()
    except (OSError, http.client.HTTPException) as error:
        reason = str(error) or type(error).__name__
        raise Unhealthy(f"The server at {host}:{port} does not answer ({reason}).") from None
    finally:
        connection.close()


def expected_stubs(host: str, port: int, timeout: float) -> Counter[str]:
    """How many Python processes each loaded model should have, from the models' configs."""
    expected: Counter[str] = Counter()
    for entry in ask_json(host, port, "POST", "/v2/repository/index", timeout):
        if entry.get("state") != "READY":
            continue
        model = entry["name"]
        path = f"/v2/models/{model}/versions/{entry['version']}/config"
        config = ask_json(host, port, "GET", path, timeout)
        # "runtime" is model.py in models of a backend that is itself written in Python.
        if config.get("backend") != "python" and not config.get("runtime", "").endswith(".py"):
            continue
        for group in config.get("instance_group", []):
            on_each_gpu = group.get("kind") == "KIND_GPU"
            devices = len(group.get("gpus", [])) if on_each_gpu else 1
            expected[model] += group.get("count", 1) * max(devices, 1)
    return expected


def ask_json(host: str, port: int, method: str, path: str, timeout: float) -> Any:
    status, body = ask(host, port, method, path, timeout)
    if status != 200:
        raise Unhealthy(f"The server at {host}:{port} refuses {path} (HTTP {status}).")
    try:
        return json.loads(body)
    except ValueError:
        raise Unhealthy(f"The server at {host}:{port} answers {path} with no JSON.") from None


def listening_process(port: int) -> int | None:
    """The process that listens on a TCP port of this machine, or None if none is visible."""
    sockets = set()
    for table in ("tcp", "tcp6"):
        try:
            lines = Path("/proc/self/net", table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == LISTENING and int(fields[1].rsplit(":", 1)[1], 16) == port:
                sockets.add(f"socket:[{fields[9]}]")
    holders = []
    for process in processes():
        try:
            names = [str(file.readlink()) for file in Path("/proc", str(process), "fd").iterdir()]
        except OSError:
            continue
        if sockets.intersection(names):
            holders.append(process)
    # Stubs are forked from the server, and may have inherited its sockets.
    return next((process for process in holders if parent(process) not in holders), None)


def stubs_of(server: int) -> tuple[Counter[str], int]:
    """The living Python processes of a server, by model, and the number of dead ones."""
    living: Counter[str] = Counter()
    dead = 0
    for process in processes():
        status = process_status(process)
        if status.get("PPid") != str(server):
            continue
        if status.get("Name") != STUB_NAME[:COMM_LENGTH]:
            continue
        if status.get("State", "Z")[0] in "ZX":
            dead += 1
            continue
        try:
            command = Path("/proc", str(process), "cmdline").read_bytes().decode().split("\0")
        except OSError:
            command = []
        if len(command) < 2:  # it has died since
            dead += 1
            continue
        # The first argument is <model repository>/<model>/<version>/model.py.
        living[Path(command[1]).parent.parent.name] += 1
    return living, dead


def processes() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]


def parent(process: int) -> int | None:
    value = process_status(process).get("PPid")
    return int(value) if value else None


def process_status(process: int) -> dict[str, str]:
    try:
        lines = Path("/proc", str(process), "status").read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.split(":", 1) for line in lines if ":" in line)
    return {name: value.strip() for name, value in pairs}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description="Ends with 0 when the server and all its Python processes are alive, else with "
        "1 and a sentence."
    )
    parser.add_argument("--host", default="127.0.0.1", help="where the server listens")
    parser.add_argument("--http-port", type=int, default=8000)
    parser.add_argument("--timeout", type=float, default=5.0, help="seconds for each answer")
    options = parser.parse_args(arguments)
    try:
        print(check(options.host, options.http_port, options.timeout))
    except Unhealthy as problem:
        print(problem, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
