"""Tables as Markdown, so that what a command prints can stand in a document as it is."""

from collections.abc import Iterable, Sequence


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table with its columns lined up: text to the left, numbers to the right."""
    lines = [tuple(header), *map(tuple, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    right = [all(_is_number(line[column]) for line in lines[1:]) for column in range(len(header))]

    def shown(line: Sequence[str]) -> str:
        cells = [
            cell.rjust(width) if aligned else cell.ljust(width)
            for cell, width, aligned in zip(line, widths, right, strict=True)
        ]
        return f"| {' | '.join(cells)} |"

    rule = [("-" * (width - 1) + ":") if aligned else "-" * width for width, aligned in zip(widths, right, strict=True)]
    return "\n".join([shown(lines[0]), f"| {' | '.join(rule)} |", *map(shown, lines[1:])])


def _is_number(cell: str) -> bool:
    try:
        float(cell or 0)
    except ValueError:
        return False
    return True
