"""A page of the documentation that has a place for generated figures, between two comments."""

import re

FIGURES = re.compile(r"(<!-- figures: .*? -->\n).*?(<!-- end of figures -->)", re.DOTALL)


def with_block(page: str, figures: str) -> str:
    """The page with `figures`, Markdown, between its comments; ValueError where it has none."""
    if not FIGURES.search(page):
        raise ValueError("page: got none of the comments 'figures: ...' and 'end of figures' to write between")
    return FIGURES.sub(lambda match: f"{match[1]}\n{figures}\n{match[2]}", page)
