"""``python -m fusedattn``: demonstrate fused attention, check the kernels on this machine, list what runs here."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence

from fusedattn.cli.errors import CommandError
from fusedattn.cli.parser import build_parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a sample of text must not fail on a terminal that is not UTF-8
            stream.reconfigure(errors="replace")
    parser = build_parser()
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help(sys.stderr)
        return 2
    try:
        return options.run(options)
    except CommandError as error:
        print(f"{parser.prog} {options.command}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader has closed the pipe, as `| head` does
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (flushed when Python exits)
        return 141


if __name__ == "__main__":
    sys.exit(main())
