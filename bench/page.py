"""A page of the documentation that has places for generated figures, each between two comments."""

import re


def with_block(page: str, figures: str, writer: str = "") -> str:
    """The page with `figures`, Markdown, between the comments of `writer`, the command that their text begins with.

    ValueError where the page has none.
    """
    block = re.compile(rf"(<!-- figures: {re.escape(writer)}.*? -->\n).*?(<!-- end of figures -->)", re.DOTALL)
    if not block.search(page):
        raise ValueError(f"page: got none of the comments 'figures: {writer}...' and 'end of figures' to write between")
    return block.sub(lambda match: f"{match[1]}\n{figures}\n{match[2]}", page)
