"""The version of Triton, on which configs, launches and the interpreter depend."""

import re

import triton


def release(version: str) -> tuple[int, ...]:
    """The numbers of a version: (3, 8, 0) of 3.8.0rc1 and of 3.8.0+git."""
    numbers = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, numbers.group().split("."))) if numbers else ()


TRITON_VERSION = release(triton.__version__)
