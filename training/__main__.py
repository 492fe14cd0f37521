"""`python -m training`. The rendering workers import this module again: it stays light."""

if __name__ == "__main__":
    import signal
    import sys

    from training.run import main

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as tidily as Ctrl-C
    try:
        main()
    except KeyboardInterrupt:
        print("interrupted: the same command goes on", file=sys.stderr)
        sys.exit(130)
