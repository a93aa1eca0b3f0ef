"""The error that ends a command with one line and exit status 2."""


class CommandError(Exception):
    """What the user can put right: a wrong option, a missing file, a missing package."""
