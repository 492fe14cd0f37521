"""Running the service: the server, its watcher, the liveness probe, and the machine's check."""
