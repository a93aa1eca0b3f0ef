"""Griffe extension: makes Markdown of the marks of Sphinx and doctest in docstrings."""

from __future__ import annotations

import re
import textwrap
from typing import Any

from griffe import Extension, Object

ROLE = re.compile(r":(?:func|class|meth|mod|data|attr):`~?(?P<name>[\w.]+)`")
# Lines from a prompt to the next empty line.
EXAMPLE = re.compile(r"^[ ]*>>> .*(?:\n[ ]*\S.*)*", re.MULTILINE)
LITERAL = re.compile(r"::$", re.MULTILINE)  # before an indented block
# Functions of the package that hide the module that defines them.
NAMESAKES = {"fusedattn.attention": "fusedattn.attention.attention", "fusedattn.merge": "fusedattn.merge.merge"}


class Docstrings(Extension):
    """Rewrites each docstring when its object has been read."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        if obj.docstring:
            text = EXAMPLE.sub(lambda example: _fenced(example[0]), obj.docstring.value)
            obj.docstring.value = ROLE.sub(lambda role: _link(role["name"], obj), LITERAL.sub(":", text))


def _fenced(example: str) -> str:
    indent = example[: len(example) - len(example.lstrip())]
    return textwrap.indent(f"```pycon\n{textwrap.dedent(example)}\n```", indent)


def _link(name: str, obj: Object) -> str:
    """A link if the name has an entry on the site; the name alone otherwise."""
    path = name if name.startswith("fusedattn.") else f"{obj.module.path}.{name}"
    return f'<autoref identifier="{NAMESAKES.get(path, path)}" optional><code>{name}</code></autoref>'
