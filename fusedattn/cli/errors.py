"""The error that ends a command with one line and exit status 2."""


class CommandError(Exception):
    """An error that the user can fix: a wrong option, a missing file, a missing package."""
