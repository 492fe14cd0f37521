"""Put before a command: what a `preexec_fn` would do. That runs between fork and exec, where gRPC's
threads, if this process has any, leave their words on the child's stderr."""

# Whoever runs the tests in the background has made their processes deaf to SIGINT.
INTERRUPTIBLE = ("env", "--default-signal=INT")


def limited_files(size: int) -> tuple[str, ...]:
    """No file may grow beyond `size` bytes, as on a full disk."""
    return ("prlimit", f"--fsize={size}")
