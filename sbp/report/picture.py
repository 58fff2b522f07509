"""A plan drawn as an SVG picture: a box per operator, its layouts as coloured squares, what is moved on the lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from sbp.errors import SbpError
from sbp.layout import Layout
from sbp.planner.physical import Box, Compute, PhysicalPlan
from sbp.report.colours import COLLECTIVES, PHASES, sbp_colour

if TYPE_CHECKING:
    from sbp.planner.plan import Plan

WIDTH, LINE, GAP, MARGIN = 250, 17, 46, 24
_LOCAL = "#9a9a9a"


class PictureError(SbpError):
    """A picture that cannot be drawn or written."""


@dataclass(frozen=True, slots=True)
class _Operand:
    """An input of an operator: where it comes from (an operation's number, or None), and how it is moved before."""

    origin: int | None
    text: str
    held: Layout
    steps: tuple[Box, ...]


@dataclass(frozen=True, slots=True)
class _Card:
    """A box of the picture."""

    number: int
    operation: Compute
    operands: tuple[_Operand, ...]
    x: int
    y: int
    row: int

    @property
    def chips(self) -> tuple[_Operand, ...]:
        """Operands that no other card makes."""
        return tuple(operand for operand in self.operands if operand.origin is None)

    @property
    def height(self) -> int:
        return LINE * (3 + len(self.chips)) + 8


def picture(plan: Plan, phases: Sequence[str] = ("forward",)) -> str:
    """The operators of a plan from top to bottom as the text of an SVG file; the same plan gives the same bytes.

    A box has the operator's name, what it makes, and a square per mesh axis with the layout of that; under it stand
    the operands that come from elsewhere (parameters, inputs, values of other phases). A line leads from an operator to
    those that read its result; where the layout changes in between, the line has the colour of the collective and says
    along which mesh axis.

    Parameters
    ----------
    phases
        Which operators: "forward", "backward", "optimizer".

    Raises
    ------
    PictureError
        An unknown phase, or one without operators.
    """
    physical = plan.physical
    known = dict.fromkeys(one.phase for one in physical.operations if isinstance(one, Compute))
    for phase in phases:
        if phase not in known:
            raise PictureError(f"this plan has no operators of phase {phase!r}; its phases are {', '.join(known)}.")
    cards = _placed(physical, frozenset(phases))
    by_number = {card.number: card for card in cards}
    lines = [_edge(by_number[operand.origin], card, operand, physical)
             for card in cards for operand in card.operands if operand.origin is not None]  # fmt: skip
    wide = max(max(card.x + WIDTH for card in cards) + _bulge(12), 700)
    high = max(card.y + card.height for card in cards) + MARGIN
    title = f"{plan.graph.name} on {plan.mesh}, {' and '.join(phases)}"
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{high}" viewBox="0 0 {wide} {high}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="12">'
    )
    return "\n".join(
        [
            head,
            f"<title>{escape(title)}</title>",
            f'<rect width="{wide}" height="{high}" fill="#ffffff"/>',
            f'<text x="{MARGIN}" y="{MARGIN}" font-size="16">{escape(title)}</text>',
            *_legend(),
            *lines,
            *(line for card in cards for line in _drawn(card, physical)),
            "</svg>\n",
        ]
    )


def save_picture(plan: Plan, path: str | Path, phases: Sequence[str] = ("forward",)) -> None:
    """Write `picture` to a file.

    Raises
    ------
    PictureError
        It cannot be drawn or written.
    """
    text = picture(plan, phases)
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise PictureError(f"cannot write the picture to {path}: {error.strerror or error}.") from None


def _placed(physical: PhysicalPlan, phases: frozenset[str]) -> tuple[_Card, ...]:
    """The cards in program order. A card stands below all whose results it reads, under the middle of them."""
    maker = {number: at for at, one in enumerate(physical.operations) for number in one.outputs}
    drawn = {at for at, one in enumerate(physical.operations) if isinstance(one, Compute) and one.phase in phases}
    operands = {at: tuple(_operand(physical, maker, drawn, number) for number in physical.operations[at].inputs)
                for at in sorted(drawn)}  # fmt: skip
    depth: dict[int, int] = {}
    for at, found in operands.items():  # producers come first in program order
        depth[at] = max((depth[operand.origin] + 1 for operand in found if operand.origin is not None), default=0)
    rows: dict[int, list[int]] = {}
    for at, row in depth.items():
        rows.setdefault(row, []).append(at)
    cards: dict[int, _Card] = {}
    top = 3 * MARGIN + LINE

    def wanted(at: int) -> tuple[float, int]:
        above = [cards[operand.origin].x for operand in operands[at] if operand.origin is not None]
        return (sum(above) / len(above) if above else 0.0), at

    for row in sorted(rows):
        made, right = [], MARGIN
        for at in sorted(rows[row], key=wanted):
            operation = physical.operations[at]
            assert isinstance(operation, Compute)
            left = max(right, int(wanted(at)[0]))
            made.append(_Card(at, operation, operands[at], left, top, row))
            right = left + WIDTH + MARGIN
        cards.update((card.number, card) for card in made)
        top += max(card.height for card in made) + GAP
    return tuple(cards[at] for at in sorted(cards))


def _operand(physical: PhysicalPlan, maker: dict[int, int], drawn: set[int], number: int) -> _Operand:
    steps: list[Box] = []
    while number in maker and isinstance(step := physical.operations[maker[number]], Box):
        steps.append(step)
        (number,) = step.inputs
    register = physical.registers[number]
    origin = maker.get(number)
    text = f"{register.value} {register.type}"
    return _Operand(origin if origin in drawn else None, text, register.layout, tuple(reversed(steps)))


def _drawn(card: _Card, physical: PhysicalPlan) -> list[str]:
    operation = card.operation
    name = operation.node.removeprefix(f"{operation.module}.") if operation.module else operation.node
    colour = PHASES.get(operation.phase, _LOCAL)
    middle = card.x + 8
    lines = [
        f"<g><title>{escape(operation.node)}: {escape(operation.op)}</title>",
        f'<rect x="{card.x}" y="{card.y}" width="{WIDTH}" height="{card.height}" rx="5" fill="#f7f7f7" '
        f'stroke="{colour}" stroke-width="1.5"/>',
        _text(middle, card.y + LINE, _short(name, 32), "font-weight", "bold"),
        _text(middle, card.y + 2 * LINE, _short(operation.module, 36), "fill", "#666666"),
    ]
    at = card.y + 3 * LINE
    for number in operation.outputs[:1]:
        register = physical.registers[number]
        more = f" and {len(operation.outputs) - 1} more" if len(operation.outputs) > 1 else ""
        lines += _squares(register.layout, middle, at)
        lines.append(_text(_behind(register.layout, middle), at, _short(f"= {register.type}{more}", 28)))
    for operand in card.chips:
        at += LINE
        lines += _squares(operand.held, middle, at)
        moved = "".join(f" > {step.kind} {physical.mesh.names[step.mesh_axis]}" for step in operand.steps)
        fill = _colour(operand.steps) if operand.steps else "#333333"
        lines.append(_text(_behind(operand.held, middle), at, _label(operand.text, moved), "fill", fill))
    return [*lines, "</g>"]


def _edge(start: _Card, end: _Card, operand: _Operand, physical: PhysicalPlan) -> str:
    colour, rows = _colour(operand.steps), end.row - start.row
    if rows == 1:
        x, y, right, down = start.x + WIDTH // 2, start.y + start.height, end.x + WIDTH // 2, end.y
        bend = (down - y) // 2
        curve, place = f"{x} {y + bend} {right} {down - bend}", ((x + right) // 2 + 6, (y + down) // 2 + 4)
    else:  # around what stands between
        x, y, right, down = start.x + WIDTH, start.y + start.height // 2, end.x + WIDTH, end.y + end.height // 2
        out = max(x, right) + _bulge(rows)
        curve, place = f"{out} {y} {out} {down}", (end.x + WIDTH + 8, end.y + end.height // 2 - 6)
    path = (
        f'<path d="M {x} {y} C {curve} {right} {down}" fill="none" stroke="{colour}" '
        f'stroke-width="{3 if operand.steps else 1}"/>'
    )
    if not operand.steps:
        return path
    said = ", ".join(f"{step.kind} {physical.mesh.names[step.mesh_axis]}" for step in operand.steps)
    return path + _text(*place, said, "fill", colour)


def _bulge(rows: int) -> int:
    """How far a line goes to the side on its way past some rows."""
    return 40 + 12 * min(rows, 12)


def _colour(steps: Sequence[Box]) -> str:
    """That of the first collective; what sends nothing is grey."""
    return next((COLLECTIVES[step.kind] for step in steps if step.kind in COLLECTIVES), _LOCAL)


def _squares(layout: Layout, x: int, y: int) -> list[str]:
    found = []
    for number, sbp in enumerate(layout):
        left = x + 24 * number
        found.append(f'<rect x="{left}" y="{y - 12}" width="22" height="14" rx="2" fill="{sbp_colour(sbp)}"/>')
        label = str(sbp).replace("(", "").replace(")", "").replace("max", "+").replace("min", "-")
        found.append(_text(left + 11, y - 1, label, "fill", "#ffffff", "text-anchor", "middle"))
    return found


def _behind(layout: Layout, x: int) -> int:
    return x + 24 * len(layout) + 6


def _legend() -> list[str]:
    found, x, y = [], MARGIN, 2 * MARGIN
    for name, colour in (*COLLECTIVES.items(), ("without communication", _LOCAL)):
        found.append(f'<rect x="{x}" y="{y - 9}" width="18" height="4" fill="{colour}"/>')
        found.append(_text(x + 22, y - 3, name))
        x += 36 + 7 * len(name)
    return found


def _text(x: int, y: int, text: str, *attributes: str) -> str:
    more = "".join(f' {name}="{value}"' for name, value in zip(attributes[::2], attributes[1::2]))
    return f'<text x="{x}" y="{y}"{more}>{escape(text)}</text>'


def _label(text: str, moved: str) -> str:
    """What an operand is and how it is moved; the second is never cut."""
    return _short(text, max(32 - len(moved), 12)) + moved


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most // 2 - 1]}…{text[-(most // 2) :]}"
