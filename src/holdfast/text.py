"""Plain-text tables."""

from collections.abc import Collection, Sequence


def table(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> str:
    """Align the cells of rows: the columns numbered in `left` to the left, all others, such as numbers, to the right.

    >>> print(table([("layer", "neurons"), ("conv", "64")]))
    layer  neurons
    conv        64
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(f"{cell:{'<' if i in left else '>'}{widths[i]}}" for i, cell in enumerate(row)).rstrip()
        for row in rows
    )
