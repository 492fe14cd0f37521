"""`python -m serving --repository DIR --profile NAME`: serves an exported repository."""

import argparse
import contextlib
import sys
from pathlib import Path
from typing import TextIO

from serving.errors import ServeError
from serving.installation import BINARY_VARIABLE
from serving.server import TritonServer
from serving.supervisor import Supervisor


def port_number(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: give a number, 1 to 65535")
    return int(text)


def positive_number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return number


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m serving",
        description="Serves an exported repository until it gets SIGTERM or SIGINT. Watches the "
        "server's Python processes, and starts the server again when one has died.",
    )
    parser.add_argument("--repository", type=Path, required=True, help="what `make export` made")
    parser.add_argument("--profile", required=True, help="the profile that it was exported for")
    parser.add_argument("--http-port", type=port_number, default=8000)
    parser.add_argument("--grpc-port", type=port_number, default=8001)
    parser.add_argument("--metrics-port", type=port_number, default=8002)
    parser.add_argument(
        "--host",
        default="0.0.0.0",
        help="the address to listen on; all of them by default, as tritonserver does. There is no "
        "authentication: 127.0.0.1 keeps the service to this machine.",
    )
    parser.add_argument(
        "--tritonserver",
        type=Path,
        help=f"the server's binary (also ${BINARY_VARIABLE}); by default nvidia-pytriton's, or "
        "else the one on the PATH",
    )
    parser.add_argument("--log-file", type=Path, help="the server's log; standard error by default")
    parser.add_argument(
        "--start-timeout",
        type=positive_number,
        default=600.0,
        help="seconds until all models are ready",
    )
    parser.add_argument(
        "extra", nargs="*", metavar="-- ARGUMENT", help="further arguments of tritonserver"
    )
    return parser.parse_args(arguments)


def say(text: str, stream: TextIO) -> None:
    with contextlib.suppress(OSError):  # a closed terminal must not end the service
        print(text, file=stream, flush=True)


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    try:
        server = TritonServer(
            options.repository,
            options.profile,
            options.http_port,
            options.grpc_port,
            options.metrics_port,
            options.log_file,
            options.extra,
            host=options.host,
            tritonserver=options.tritonserver,
            log=None if options.log_file else sys.stderr,
        )
    except ServeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1

    def announce() -> None:
        say(
            f"Ready: profile {server.profile} of {server.repository}\n"
            f"  HTTP     http://{server.http_url}\n"
            f"  gRPC     {server.grpc_url}\n"
            f"  metrics  {server.metrics_url}\n"
            f"  listening on {server.host}, without authentication",
            sys.stdout,
        )

    def report(sentence: str) -> None:
        say(sentence, sys.stderr)

    supervisor = Supervisor(
        server, start_timeout=options.start_timeout, report=report, announce=announce
    )
    return supervisor.run()


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:  # before the supervisor has taken over the signals
        sys.exit(130)
