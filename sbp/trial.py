"""One operator run on shards, and how its results differ from the unsharded run: what the prover of rules does."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from typing import Any

import numpy

from sbp.borders import fetched
from sbp.dtype import is_floating, numpy_name
from sbp.layout import Layout, Partial, Shard
from sbp.mesh import Mesh
from sbp.operator import Case, Operator, TensorType
from sbp.shards import partial_axes, reduce_pair, scatter

_TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "float16": 3e-2}


def draw_inputs(op: Operator, case: Case, rng: numpy.random.Generator) -> list[numpy.ndarray]:
    """Random inputs of a case: floating ones in float64, normal, or uniform in their range; integers below its end."""
    drawn = []
    for index, kind in enumerate(case.types):
        name = op.input_names[min(index, len(op.input_names) - 1)]
        bounds = case.ranges.get(name)
        array: Any
        if kind.dtype == "bool":
            array = rng.random(kind.shape) < 0.5
        elif is_floating(kind.dtype):
            array = rng.standard_normal(kind.shape) if bounds is None else rng.uniform(*bounds, kind.shape)
        else:
            low, high = bounds or ((0, 7) if kind.dtype.startswith("u") else (-6, 7))
            array = rng.integers(int(low), int(high), kind.shape).astype(numpy_name(kind.dtype))
        array = numpy.asarray(array)
        array.flags.writeable = False
        drawn.append(array)
    return drawn


class Trial:
    """One case on one mesh with one set of random inputs: the unsharded result, and sharded results as asked for."""

    def __init__(self, op: Operator, case: Case, outputs: Sequence[TensorType], mesh: Mesh, seed: int):
        self.op, self.case, self.mesh = op, case, mesh
        self.rng = numpy.random.default_rng([seed, len(case.types)])
        self.inputs = draw_inputs(op, case, self.rng)
        self.in_shapes = [t.shape for t in case.types]
        self.out_shapes = [t.shape for t in outputs]
        self.problem = ""
        self.attributes = op.complete(case.attributes)
        self.expected: list[numpy.ndarray] = []
        try:
            self.expected = self._run(self.inputs, self.attributes)
        except Exception as error:  # a kernel of the user's may fail in any way
            self.problem = f"unsharded, the kernel fails: {type(error).__name__}: {error}"
        self._tolerances = [_tolerance(array) for array in self.expected]
        self._boxes: dict[tuple[tuple[int, ...], Layout], tuple[Shard, ...]] = {}
        self._check_types(outputs)
        self._parts: dict[tuple[int, Layout], list[numpy.ndarray]] = {}
        self._results: dict[Any, list[list[numpy.ndarray]] | Exception] = {}
        self._of: tuple[Layout, ...] | None = None

    def _run(self, inputs: Sequence[numpy.ndarray], attributes: dict[str, Any]) -> list[numpy.ndarray]:
        with numpy.errstate(all="ignore"):
            made = self.op.kernel(numpy, *inputs, **attributes)
        return [numpy.asarray(item) for item in (made if isinstance(made, (tuple, list)) else (made,))]

    def _check_types(self, outputs: Sequence[TensorType]) -> None:
        if self.problem:
            return
        if len(self.expected) != len(outputs):
            self.problem = f"the kernel gives {len(self.expected)} results, the rule {len(outputs)}"
            return
        for index, expected in enumerate(outputs):
            found = self.expected[index]
            same = (
                (found.dtype.kind == "f")
                if is_floating(expected.dtype)
                else (found.dtype == numpy_name(expected.dtype))
            )
            if found.shape != expected.shape or not same:
                self.problem = (
                    f"unsharded, the kernel makes {found.dtype}{list(found.shape)} where the rule says {expected}"
                )
                return
            if found.dtype.kind == "f" and numpy.isnan(found).any():
                self.problem = "unsharded, the kernel makes NaN; give the case `ranges` inside the operator's domain"
                return

    def held(self, index: int, layout: Layout) -> list[numpy.ndarray]:
        """The shards of one input, the same whenever they are asked for."""
        key = (index, layout)
        if key not in self._parts:
            # a scalar's parts may be NumPy scalars, which have no flags
            parts = [numpy.asarray(part) for part in scatter(self.inputs[index], layout, self.mesh, numpy, self.rng)]
            for part in parts:
                part.flags.writeable = False
            self._parts[key] = parts
        return self._parts[key]

    def results(
        self, inputs: tuple[Layout, ...], outputs: tuple[Layout, ...], borders: bool = False
    ) -> list[list[numpy.ndarray]]:
        """Per rank the kernel's results on its shards; runs that differ only in the output layouts are run once.

        With `borders` ranks fetch what the operator reads beyond their shards, as they do when a rule's signature runs.
        """
        if inputs != self._of:
            self._of, self._results = inputs, {}
        if borders and self.op.borders:
            return self._with_borders(inputs, outputs)
        attributes: list[dict[str, Any]] = [self.attributes] * self.mesh.size
        if self.op.localizes:
            held = zip(*(self.boxes(shape, layout) for shape, layout in zip(self.in_shapes, inputs)))
            made = zip(*(self.boxes(shape, layout) for shape, layout in zip(self.out_shapes, outputs)))
            both = zip(held if inputs else repeat(()), made)
            attributes = [self.op.local_attributes(self.attributes, *boxes) for boxes in both]
        key = repr(attributes) if self.op.localizes else ""
        if key not in self._results:
            try:
                shards = [self.held(index, layout) for index, layout in enumerate(inputs)]
                self._results[key] = [
                    self._run([parts[rank] for parts in shards], attributes[rank]) for rank in range(self.mesh.size)
                ]
            except Exception as error:  # a kernel may fail in any way on shards that do not fit together
                self._results[key] = error
        found = self._results[key]
        if isinstance(found, Exception):
            raise found
        return found

    def _with_borders(self, inputs: tuple[Layout, ...], outputs: tuple[Layout, ...]) -> list[list[numpy.ndarray]]:
        held = list(zip(*(self.boxes(shape, layout) for shape, layout in zip(self.in_shapes, inputs))))
        made = list(zip(*(self.boxes(shape, layout) for shape, layout in zip(self.out_shapes, outputs))))
        read = [self.op.read_boxes(self.attributes, *both) for both in zip(held, made)]
        arrays = [
            fetched(
                numpy, self.held(index, layout), layout, self.mesh, [b[index] for b in held], [b[index] for b in read]
            )
            for index, layout in enumerate(inputs)
        ]
        attributes = [self.op.local_attributes(self.attributes, *both) for both in zip(read, made)]
        return [self._run([parts[rank] for parts in arrays], attributes[rank]) for rank in range(self.mesh.size)]

    def boxes(self, shape: tuple[int, ...], layout: Layout) -> tuple[Shard, ...]:
        """The boxes that the ranks hold of a tensor."""
        key = (shape, layout)
        if key not in self._boxes:
            self._boxes[key] = tuple(layout.shard(shape, self.mesh.shape, place) for place in self.mesh.coordinates())
        return self._boxes[key]

    def difference(self, inputs: tuple[Layout, ...], outputs: tuple[Layout, ...], borders: bool = True) -> str:
        """Why the sharded run is not a sharding of the unsharded one; "" if it is.

        Without `borders` each rank's kernel has its shards only: whether a signature that no rule admits is right.
        """
        try:
            results = self.results(inputs, outputs, borders)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        for index, layout in enumerate(outputs):
            found = self.output_difference(results, index, layout)
            if found:
                return f"{self.op.output_names[min(index, len(self.op.output_names) - 1)]} {found}"
        return ""

    def output_difference(self, results: list[list[numpy.ndarray]], index: int, layout: Layout) -> str:
        """The same for one output."""
        expected = self.expected[index]
        boxes = self.boxes(self.out_shapes[index], layout)
        for rank, (result, box) in enumerate(zip(results, boxes)):
            part = result[index]
            if part.shape != box.shape:
                return f"on rank {rank} has shape {list(part.shape)}, its shard {list(box.shape)}"
            if part.dtype != expected.dtype:
                return f"on rank {rank} has type {part.dtype}, unsharded {expected.dtype}"
        axes = partial_axes(layout)
        if not axes:
            for rank, (result, box) in enumerate(zip(results, boxes)):
                if not self._close(result[index], index, box):
                    return f"on rank {rank} differs from its shard of the unsharded result"
            return ""
        sbp = layout[axes[0]]
        assert isinstance(sbp, Partial)
        if expected.dtype == bool and sbp.reduce == "sum":
            return "is boolean and has no sum"
        wholes: dict[tuple[int, ...], tuple[Any, Shard]] = {}
        for result, box, place in zip(results, boxes, self.mesh.coordinates()):
            key = tuple(0 if axis in axes else at for axis, at in enumerate(place))
            part = result[index]
            with numpy.errstate(all="ignore"):
                whole = reduce_pair(wholes[key][0], part, sbp.reduce) if key in wholes else part
            wholes[key] = (whole, box)
        if all(self._close(whole, index, box) for whole, box in wholes.values()):
            return ""
        return "reduced over its parts differs from the unsharded result"

    def _close(self, found: numpy.ndarray, index: int, box: Shard) -> bool:
        expected = self.expected[index][box.slices]
        if found.size == 0:
            return True
        if found.dtype.kind != "f":
            return bool((found == expected).all())
        tolerance, all_finite = self._tolerances[index]
        with numpy.errstate(all="ignore"):
            near = numpy.abs(found - expected) <= tolerance
            if not all_finite:
                near |= found == expected
        return bool(near.all())


def _tolerance(array: numpy.ndarray) -> tuple[float, bool]:
    """How far elements may be off, relative to the largest (at least 1), and whether all elements are finite."""
    if array.dtype.kind != "f":
        return 0.0, True
    finite = numpy.abs(array[numpy.isfinite(array)])
    scale = max(1.0, float(finite.max())) if finite.size else 1.0
    return _TOLERANCE[array.dtype.name] * scale, finite.size == array.size
