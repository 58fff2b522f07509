"""Rules: an operator's sharding in one line, and the signatures that follow from it.

A rule names the dimensions of every operand, `"*b m k+, *b k+ n -> *b m n"`:

=========  ==========================================================================================
``m``      a dimension; splitting it splits every operand that has it, the others are broadcast
``k+``     splitting it makes outputs that lack it P(sum); ``k>`` makes them P(max), ``k<`` P(min)
``k^``     never split
``*b``     any number of dimensions (NumPy broadcasting between operands); marks apply to each
``...``    the same, for elementwise operators
``(h d)``  a compound dimension, major factor first; only the major factor splits
``h~p``    splits along with ``p``, in chunks of its own size: ranks then fetch from their neighbours what the
           operator `reads` beyond their shards; in inputs it may also stay whole
``1``      a dimension of size one
=========  ==========================================================================================

Besides, Partial inputs pass where the operator is linear (sum) or monotone (max, min) in them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product

from sbp.errors import RuleError
from sbp.layout import SBP, Broadcast, Layout, Partial, Shard, Split

_MARKS = {"+": "sum", ">": "max", "<": "min"}
_TERM = re.compile(r"(?P<group>\*)?(?P<name>[A-Za-z_]\w*|\.\.\.)(?P<mark>[+<>^]*)(?:~(?P<leader>[A-Za-z_]\w*))?")
_TOKEN = re.compile(r"\([^()]*\)|[^\s()]+")


@dataclass(frozen=True, slots=True)
class Term:
    """One dimension (or group of dimensions) of a pattern: its factors, major first."""

    factors: tuple[str, ...]
    is_group: bool = False


@dataclass(frozen=True, slots=True)
class Rule:
    """A parsed rule: patterns of inputs and outputs, and the marks of the named dimensions."""

    text: str
    inputs: tuple[tuple[Term, ...], ...]
    outputs: tuple[tuple[Term, ...], ...]
    reduces: Mapping[str, str]
    never_split: frozenset[str]
    follows: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Passing:
    """Partial inputs that pass: `inputs` together P(before), the others B; `outputs` become P(after), the others B."""

    inputs: frozenset[int]
    outputs: frozenset[int]
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class Factor:
    """A named dimension of a bound rule, with its size; `follows` names the one along with which it splits."""

    name: str
    size: int
    reduce: str | None
    splittable: bool
    follows: str | None = None


@dataclass(frozen=True, slots=True)
class Signature:
    """One legal choice of layouts for all inputs and outputs of a node."""

    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]

    def __str__(self) -> str:
        return f"{', '.join(map(str, self.inputs))} -> {', '.join(map(str, self.outputs))}"


Dimensions = tuple[tuple[int, ...], ...]
"""Of one operand: per dimension the numbers of its factors, major first."""


@lru_cache(maxsize=4096)
def parse_rule(text: str) -> Rule:
    """Parse a rule.

    Raises
    ------
    RuleError
        Bad syntax, or an output lacks an input's dimension that is neither marked with a reduction nor never split.
    """
    left, arrow, right = text.partition("->")
    if not arrow:
        raise RuleError(f"Rule {text!r} has no '->'; write inputs -> outputs, such as 'm k+, k+ n -> m n'.")
    reduces: dict[str, str] = {}
    never: set[str] = set()
    follows: dict[str, str] = {}

    def pattern(part: str) -> tuple[Term, ...]:
        terms = []
        if part.count("(") != part.count(")") or re.search(r"\([^)]*\(", part):
            raise RuleError(f"Rule {text!r}: parentheses stand around a compound, such as (h d), and hold no others.")
        for token in _TOKEN.findall(part):
            if token == "1":
                terms.append(Term(()))
                continue
            names, group = [], False
            for piece in token.strip("()").split():
                match = _TERM.fullmatch(piece)
                if match is None:
                    raise RuleError(f"Rule {text!r}: cannot read {piece!r}; see sbp.rule for the notation.")
                group = bool(match["group"]) or match["name"] == "..."
                if group and token.startswith("("):
                    raise RuleError(f"Rule {text!r}: a compound dimension {token} cannot hold the group {piece!r}.")
                names.append(match["name"])
                if match["leader"]:
                    if token.startswith("(") or group:
                        raise RuleError(f"Rule {text!r}: only a single dimension can follow another, not {token!r}.")
                    follows[match["name"]] = match["leader"]
                for mark in match["mark"]:
                    if mark == "^":
                        never.add(match["name"])
                    elif reduces.setdefault(match["name"], _MARKS[mark]) != _MARKS[mark]:
                        raise RuleError(f"Rule {text!r}: dimension {match['name']!r} carries two reductions.")
            terms.append(Term(tuple(names), group))
        if sum(term.is_group for term in terms) > 1:
            raise RuleError(f"Rule {text!r}: an operand can hold one group of dimensions only, got {part.strip()!r}.")
        return tuple(terms)

    inputs = tuple(pattern(part) for part in left.split(",")) if left.strip() else ()
    outputs = tuple(pattern(part) for part in right.split(","))
    for operand in (*inputs, *outputs):
        once = [name for term in operand for name in term.factors if name not in never]
        twice = sorted({name for name in once if once.count(name) > 1})
        if twice:
            raise RuleError(
                f"Rule {text!r}: an operand has {', '.join(twice)} twice, so it cannot be split along it; "
                "mark it with ^, or give the two dimensions different names."
            )
    named = {name for operand in inputs for term in operand for name in term.factors}
    everything = named | {name for operand in outputs for term in operand for name in term.factors}
    if not set(follows.values()) <= everything - set(follows):
        raise RuleError(f"Rule {text!r}: after ~ stands a dimension of the rule that does not follow another itself.")
    for operand in outputs:
        has = {name for term in operand for name in term.factors}
        lacking = named - has - {follows.get(name) for name in has} - never - set(reduces) - set(follows)
        if lacking:
            raise RuleError(
                f"Rule {text!r}: an output lacks {', '.join(sorted(lacking))}; mark what is summed with +, "
                "a maximum with >, a minimum with <, and what cannot be split with ^."
            )
    return Rule(text, inputs, outputs, reduces, frozenset(never), follows)


@dataclass(frozen=True)
class BoundRule:
    """A rule with the sizes of one node filled in; everything about that node's layouts follows from it."""

    text: str
    factors: tuple[Factor, ...]
    inputs: tuple[Dimensions, ...]
    outputs: tuple[Dimensions, ...]
    passing: tuple[Passing, ...] = ()
    sizes: Mapping[str, int] = field(default_factory=dict, hash=False, compare=False)

    def output_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The global shapes of the outputs."""
        return tuple(self._shape(operand) for operand in self.outputs)

    def input_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The global shapes of the inputs."""
        return tuple(self._shape(operand) for operand in self.inputs)

    def _shape(self, operand: Dimensions) -> tuple[int, ...]:
        return tuple(math.prod(self.factors[number].size for number in dimension) for dimension in operand)

    def signatures(self, mesh_shape: Sequence[int], least_fill: float = 0.0) -> tuple[Signature, ...]:
        """Every signature on a mesh, each mesh axis choosing in turn; the first is all-broadcast.

        On a mesh axis of one rank, where every SBP means the same, all is B (see `Layout.normal`).

        Parameters
        ----------
        mesh_shape
            Sizes of the mesh axes.
        least_fill
            Leave out splits whose mean shard is smaller than this fraction of the largest one
            (0 keeps all, 1 keeps even splits only). Used by planners to keep the choice small.
        """
        return _signatures(self, tuple(mesh_shape), least_fill)

    def admits(self, signature: Signature, mesh_shape: Sequence[int]) -> bool:
        """Whether the rule allows the signature on the mesh."""
        if 1 in mesh_shape:
            inputs, outputs = (
                tuple(layout.normal(mesh_shape) for layout in side) for side in (signature.inputs, signature.outputs)
            )
            signature = Signature(inputs, outputs)
        return signature in _signature_set(self, tuple(mesh_shape))

    def local_sizes(self, signature: Signature, mesh_shape: Sequence[int]) -> dict[str, int]:
        """Sizes of the named dimensions on the first (largest) rank, as `sizes` holds them for the global shapes.

        A dimension that follows another keeps its size, as the operator may read more of it than a shard.
        """
        sizes = {factor.name: factor.size for factor in self.factors}
        for axis, parts in enumerate(mesh_shape):
            number = self._split_factor(signature, axis, sizes)
            if number is not None:
                name = self.factors[number].name
                sizes[name] = -(-sizes[name] // parts)
        return _with_products(sizes)

    def _split_factor(self, signature: Signature, axis: int, sizes: Mapping[str, int]) -> int | None:
        for layouts, operands in ((signature.inputs, self.inputs), (signature.outputs, self.outputs)):
            for layout, operand in zip(layouts, operands):
                sbp = layout[axis]
                if isinstance(sbp, Split):
                    candidates = [n for n in operand[sbp.axis] if sizes[self.factors[n].name] != 1] or operand[sbp.axis]
                    return self._leader(candidates[0]) if candidates else None
        return None

    def _leader(self, number: int) -> int:
        """The factor that a split of this one splits."""
        name = self.factors[number].follows
        return number if name is None else next(n for n, factor in enumerate(self.factors) if factor.name == name)

    def border_shape(self, signature: Signature, mesh_shape: Sequence[int]) -> tuple[int, ...]:
        """The mesh's shape with 1 for the axes along which ranks surely hold what they read.

        Only an axis that splits a dimension which others follow has borders. Along the other axes the first rank, whose
        shards are the largest, stands for all.
        """
        leaders = {factor.follows for factor in self.factors}
        sizes = {factor.name: factor.size for factor in self.factors}
        numbers = [self._split_factor(signature, axis, sizes) for axis in range(len(mesh_shape))]
        return tuple(
            parts if number is not None and self.factors[number].name in leaders else 1
            for number, parts in zip(numbers, mesh_shape)
        )

    def shards(
        self, signature: Signature, mesh_shape: Sequence[int], coordinate: Sequence[int]
    ) -> tuple[tuple[Shard, ...], tuple[Shard, ...]]:
        """The boxes of all inputs and outputs on the rank at `coordinate`."""
        boxes = (
            tuple(
                layout.shard(self._shape(operand), mesh_shape, coordinate) for layout, operand in zip(layouts, operands)
            )
            for layouts, operands in ((signature.inputs, self.inputs), (signature.outputs, self.outputs))
        )
        inputs, outputs = boxes
        return inputs, outputs


def _with_products(sizes: Mapping[str, int]) -> dict[str, int]:
    """Sizes by name, with the product of each group's dimensions (`b.0`, `b.1`, ...) under the group's own name."""
    result = dict(sizes)
    for name, size in sizes.items():
        group, dot, _ = name.rpartition(".")
        if dot and group:
            result[group] = result.get(group, 1) * size
    return result


def bind(
    rule: Rule,
    shapes: Sequence[Sequence[int]],
    sizes: Mapping[str, int] | None = None,
    passing: tuple[Passing, ...] = (),
) -> BoundRule:
    """Fill in a rule's sizes from input shapes; `sizes` gives those that only outputs or compounds have.

    Raises
    ------
    RuleError
        The shapes do not fit the rule; the message names the operand.
    """
    known: dict[str, int] = dict(sizes or {})
    if len(shapes) != len(rule.inputs):
        raise RuleError(f"takes {len(rule.inputs)} inputs by its rule {rule.text!r}, got {len(shapes)}")
    spread = [
        _spread(rule, operand, shape, position) for position, (operand, shape) in enumerate(zip(rule.inputs, shapes))
    ]
    groups: dict[str, int] = {}
    for operand, (_, count) in zip(rule.inputs, spread):
        for term in operand:
            if term.is_group:
                groups[term.factors[0]] = max(groups.get(term.factors[0], 0), count)

    pending = []
    inputs: list[list[tuple[str, ...]]] = []
    for position, (dimensions, _) in enumerate(spread):
        named: list[tuple[str, ...]] = []
        for term, size, from_right in dimensions:
            if term.is_group:
                name = f"{term.factors[0]}.{groups[term.factors[0]] - 1 - from_right}"
                if size != 1:
                    _agree(rule, known, name, size, position, shapes)
                named.append((name,))
            else:
                named.append(term.factors)
                pending.append((term.factors, size, position))
        inputs.append(named)
    for group, count in groups.items():
        for number in range(count):
            known.setdefault(f"{group}.{number}", 1)
    # Single dimensions first, then compounds, whose one unknown factor follows by division.
    for factors, size, position in sorted(pending, key=lambda item: len(item[0])):
        unknown = [name for name in factors if name not in known]
        if not unknown:
            product = math.prod(known[name] for name in factors)
            if product != size:
                label = factors[0] if len(factors) == 1 else f"({' '.join(factors)})"
                raise RuleError(
                    f"input {position} of shape {list(shapes[position])} has {size} where dimension {label} of its "
                    f"rule {rule.text!r} is {product}"
                )
        else:
            rest = math.prod(known[name] for name in factors if name in known)
            if len(unknown) > 1 or (rest == 0 and size) or (rest and size % rest):
                raise RuleError(
                    f"input {position} of shape {list(shapes[position])}: cannot divide {size} into "
                    f"({' '.join(factors)}) of its rule {rule.text!r} with {known}"
                )
            known[unknown[0]] = size // rest if rest else 0

    numbers: dict[str, int] = {}
    factors_found: list[Factor] = []

    def number_of(name: str) -> int:
        if name not in known:
            raise RuleError(f"rule {rule.text!r} does not say the size of output dimension {name!r}")
        if name not in numbers:
            base = name.rpartition(".")[0] or name
            numbers[name] = len(factors_found)
            leader = rule.follows.get(base)
            splittable = base not in rule.never_split and leader is None
            factors_found.append(Factor(name, known[name], rule.reduces.get(base), splittable, leader))
        return numbers[name]

    bound_inputs = []
    for named, shape in zip(inputs, shapes):
        # A dimension of size one that broadcasts against a larger one has no part in splitting it.
        bound_inputs.append(
            tuple(
                () if size == 1 and math.prod(known[name] for name in names) != 1 else tuple(map(number_of, names))
                for names, size in zip(named, shape)
            )
        )
    bound_outputs = []
    for operand in rule.outputs:
        dims: list[tuple[int, ...]] = []
        for term in operand:
            if term.is_group:
                count = groups.get(term.factors[0])
                if count is None:
                    raise RuleError(f"rule {rule.text!r}: no input says how many dimensions *{term.factors[0]} has")
                dims.extend((number_of(f"{term.factors[0]}.{number}"),) for number in range(count))
            else:
                dims.append(tuple(map(number_of, term.factors)))
        bound_outputs.append(tuple(dims))
    return BoundRule(
        rule.text, tuple(factors_found), tuple(bound_inputs), tuple(bound_outputs), passing, _with_products(known)
    )


def _spread(rule: Rule, operand: tuple[Term, ...], shape: Sequence[int], position: int):
    """Match an input pattern with its shape: [(term, size, index from the right in its group)], rank of the group."""
    fixed = sum(not term.is_group for term in operand)
    count = len(shape) - fixed
    has_group = fixed != len(operand)
    if count < 0 or (count > 0 and not has_group):
        raise RuleError(
            f"input {position} of shape {list(shape)} has {len(shape)} dimensions, its rule {rule.text!r} wants "
            f"{'at least ' if has_group else ''}{fixed}"
        )
    dimensions, at = [], 0
    for term in operand:
        if term.is_group:
            for number in range(count):
                dimensions.append((term, shape[at], count - 1 - number))
                at += 1
        else:
            if not term.factors and shape[at] != 1:
                raise RuleError(
                    f"input {position} of shape {list(shape)} must have size 1 in dimension {at}, by {rule.text!r}"
                )
            dimensions.append((term, shape[at], 0))
            at += 1
    return dimensions, count


def _agree(
    rule: Rule, known: dict[str, int], name: str, size: int, position: int, shapes: Sequence[Sequence[int]]
) -> None:
    if known.setdefault(name, size) != size:
        raise RuleError(
            f"input {position} of shape {list(shapes[position])} does not broadcast with the other inputs "
            f"({', '.join(str(list(shape)) for shape in shapes)}) by rule {rule.text!r}"
        )


# One mesh axis' choice: the SBP of every input and output, and the numbers of the factors it splits.
_Choice = tuple[tuple[SBP, ...], tuple[SBP, ...], tuple[int, ...]]


# The different sizes that each factor has on some rank, largest first: uneven splits leave several.
_Sizes = tuple[tuple[int, ...], ...]


def _axis_choices(rule: BoundRule, sizes: _Sizes, parts: int, least_fill: float) -> Iterator[_Choice]:
    """What one mesh axis of `parts` ranks can do, given what the axes to its left have left of each factor."""
    whole = Broadcast()
    yield (whole,) * len(rule.inputs), (whole,) * len(rule.outputs), ()
    if parts == 1:
        return  # every choice would mean the same
    for number, factor in enumerate(rule.factors):
        if not factor.splittable:
            continue
        size = sizes[number][0]
        if size < least_fill * parts * -(-size // parts):
            continue
        followers = tuple(n for n, other in enumerate(rule.factors) if other.follows == factor.name)
        found = [
            next((at for n in (number, *followers) if (at := _position(operand, n, sizes, parts)) is not None), None)
            for operand in (*rule.inputs, *rule.outputs)
        ]
        if any(position == _BLOCKED for position in found):
            continue
        inputs = tuple(whole if position is None else Split(position) for position in found[: len(rule.inputs)])
        lost = whole if factor.reduce is None else Partial(factor.reduce)
        outputs = tuple(lost if position is None else Split(position) for position in found[len(rule.inputs) :])
        yield inputs, outputs, (number, *followers)
        led = [any(n in dimension for dimension in operand for n in followers) for operand in rule.inputs]
        if any(led) and not any(n in dimension for operand in rule.outputs for dimension in operand for n in followers):
            alone = [_position(operand, number, sizes, parts) for operand in rule.inputs]
            yield tuple(whole if at is None else Split(at) for at in alone), outputs, (number,)
    for passing in rule.passing:
        before, after = Partial(passing.before), Partial(passing.after)
        yield (
            tuple(before if index in passing.inputs else whole for index in range(len(rule.inputs))),
            tuple(after if index in passing.outputs else whole for index in range(len(rule.outputs))),
            (),
        )


_BLOCKED = -1


def _position(operand: Dimensions, number: int, sizes: _Sizes, parts: int) -> int | None:
    """The dimension of an operand that splits with a factor; None if it lacks it, _BLOCKED if it cannot split there."""
    for position, dimension in enumerate(operand):
        if number in dimension:
            at = dimension.index(number)
            if any(sizes[other][0] != 1 for other in dimension[:at]):
                return _BLOCKED
            minors = [math.prod(found) for found in product(*(sizes[other] for other in dimension[at + 1 :]))]
            if any(
                -(-size * minor // parts) != -(-size // parts) * minor for size in sizes[number] for minor in minors
            ):
                return _BLOCKED  # the chunks of the flat dimension would cut through the minor factors
            return position
    return None


def _chunk_sizes(sizes: tuple[int, ...], parts: int) -> tuple[int, ...]:
    """The different sizes of the chunks when dimensions of these sizes are split."""
    found = set()
    for size in sizes:
        step = -(-size // parts)
        whole = size // step if step else parts
        found |= {step} if whole >= parts else {step, size - whole * step} | ({0} if whole + 1 < parts else set())
    return tuple(sorted(found, reverse=True))


@lru_cache(maxsize=1 << 14)
def _signatures(rule: BoundRule, mesh_shape: tuple[int, ...], least_fill: float) -> tuple[Signature, ...]:
    found: dict[Signature, None] = {}

    def extend(axis: int, sizes: _Sizes, chosen: tuple[_Choice, ...]) -> None:
        if axis == len(mesh_shape):
            inputs = tuple(Layout(tuple(choice[0][i] for choice in chosen)) for i in range(len(rule.inputs)))
            outputs = tuple(Layout(tuple(choice[1][i] for choice in chosen)) for i in range(len(rule.outputs)))
            if all(_one_reduction(layout) for layout in (*inputs, *outputs)):
                found.setdefault(Signature(inputs, outputs))
            return
        parts = mesh_shape[axis]
        for choice in _axis_choices(rule, sizes, parts, least_fill):
            left = tuple(_chunk_sizes(s, parts) if n in choice[2] else s for n, s in enumerate(sizes))
            extend(axis + 1, left, (*chosen, choice))

    extend(0, tuple((factor.size,) for factor in rule.factors), ())
    return tuple(found)


@lru_cache(maxsize=1 << 14)
def _signature_set(rule: BoundRule, mesh_shape: tuple[int, ...]) -> frozenset[Signature]:
    return frozenset(_signatures(rule, mesh_shape, 0.0))


def _one_reduction(layout: Layout) -> bool:
    """Sums and maxima over different mesh axes do not commute, so a layout may hold one kind of Partial only."""
    return len({sbp.reduce for sbp in layout.axes if isinstance(sbp, Partial)}) <= 1
