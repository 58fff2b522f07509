"""Names of equal layers as one: `h.0.mlp.fc.weight` ... `h.11.mlp.fc.weight` are `h.{0..11}.mlp.fc.weight`."""

from __future__ import annotations

from collections.abc import Iterable

Template = tuple[str | None, ...]
"""The parts of a dotted name; None stands for a whole number."""


def template_of(name: str) -> tuple[Template, tuple[int, ...]]:
    """A dotted name with its whole-number parts taken out, and these numbers.

    >>> template_of("h.3.mlp.weight")
    (('h', None, 'mlp', 'weight'), (3,))
    """
    parts: list[str | None] = []
    numbers = []
    for part in name.split("."):
        if part.isdecimal():
            numbers.append(int(part))
            parts.append(None)
        else:
            parts.append(part)
    return tuple(parts), tuple(numbers)


def grouped_names(names: Iterable[str]) -> list[str]:
    """Patterns that stand for exactly these names, in order of first appearance.

    >>> grouped_names(["h.0.w", "h.1.w", "h.2.w", "b", "h.4.w"])
    ['h.{0..2,4}.w', 'b']
    """
    found: dict[Template, list[tuple[int, ...]]] = {}
    for name in names:
        template, numbers = template_of(name)
        found.setdefault(template, []).append(numbers)
    return [_filled(template, braces) for template, tuples in found.items() for braces in _braces(tuples)]


def _braces(tuples: list[tuple[int, ...]]) -> list[tuple[str, ...]]:
    """Products of number sets that together cover exactly these tuples."""
    if not tuples or not tuples[0]:
        return [()]
    rest: dict[int, list[tuple[int, ...]]] = {}
    for numbers in tuples:
        rest.setdefault(numbers[0], []).append(numbers[1:])
    alike: dict[tuple[tuple[str, ...], ...], list[int]] = {}
    for first, tails in rest.items():
        alike.setdefault(tuple(_braces(tails)), []).append(first)
    return [(_set_text(firsts), *braces) for endings, firsts in alike.items() for braces in endings]


def _set_text(numbers: list[int]) -> str:
    """`3`, `{0..11}`, `{0..2,4}`."""
    ordered = sorted(set(numbers))
    runs: list[list[int]] = []
    for number in ordered:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    if len(ordered) == 1:
        return str(ordered[0])
    texts = [str(a) if a == b else f"{a},{b}" if b == a + 1 else f"{a}..{b}" for a, b in runs]
    return "{" + ",".join(texts) + "}"


def _filled(template: Template, braces: tuple[str, ...]) -> str:
    numbers = iter(braces)
    return ".".join(next(numbers) if part is None else part for part in template)
