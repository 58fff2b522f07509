"""Predicted timeline of a physical plan: a compute stream and a communication stream per mesh axis, in program order.

An operation starts when its inputs are there and its stream is free. What communication does not hide behind compute is
exposed: the step takes compute plus exposed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sbp.planner.physical import COLLECTIVES, Box, PhysicalPlan

COMPUTE = "compute"


@dataclass(frozen=True, eq=False)
class Timeline:
    """When every operation runs.

    Attributes
    ----------
    start, stop
        float64 (operations,): seconds from the start of the step.
    streams
        Per operation its stream: "compute" or the name of a mesh axis.
    """

    start: np.ndarray
    stop: np.ndarray
    streams: tuple[str, ...]

    @property
    def step_seconds(self) -> float:
        """Length of the step."""
        return float(self.stop.max(initial=0.0))

    def busy_seconds(self, stream: str) -> float:
        """Time during which a stream works."""
        chosen = np.array([name == stream for name in self.streams], dtype=bool)
        return float((self.stop - self.start)[chosen].sum()) if len(chosen) else 0.0

    @property
    def exposed_seconds(self) -> float:
        """Time that communication adds to the step."""
        return max(self.step_seconds - self.busy_seconds(COMPUTE), 0.0)


def predict_timeline(physical: PhysicalPlan) -> Timeline:
    """Play the plan on its streams."""
    ready = np.zeros(len(physical.registers))
    free: dict[str, float] = {}
    start = np.zeros(len(physical.operations))
    stop = np.zeros(len(physical.operations))
    streams = []
    for at, operation in enumerate(physical.operations):
        moves = isinstance(operation, Box) and operation.kind in COLLECTIVES
        stream = physical.mesh.names[operation.mesh_axis] if moves and isinstance(operation, Box) else COMPUTE
        begin = free.get(stream, 0.0)
        for number in operation.inputs:
            begin = max(begin, ready[number])
        end = begin + operation.seconds
        for number in operation.outputs:
            ready[number] = end
        free[stream] = end
        start[at], stop[at] = begin, end
        streams.append(stream)
    return Timeline(start, stop, tuple(streams))
