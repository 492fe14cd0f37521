"""What goes wrong before or while a server is started."""


class ServeError(Exception):
    """One sentence for the operator: what was wrong, and what would be right."""
