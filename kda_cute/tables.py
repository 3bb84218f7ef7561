"""Tables in Markdown; those for a terminal are made by `layouts.plan.format_table`."""

from collections.abc import Iterable


def markdown(head: Iterable[str], body: Iterable[Iterable[str]]) -> str:
    """A table; every line has as many cells as the head."""
    head = list(head)
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
