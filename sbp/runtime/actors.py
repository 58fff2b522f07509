"""Actors: a cut plan run as a pipeline, one thread per stage, driven by full registers and free buffers.

A segment (what a chunk does in one phase for one micro-batch) is an actor's work. It fires when every register that it
reads has arrived and every register that it fills has a free buffer; nothing else holds the pipeline together. With
credits (`sbp.planner.schedule.Credits`) the order arises from that alone: 1F1B is stage s of p having p - s buffers for
what its forward leaves to its backward. With a schedule the order is given, and a stage waits for its next segment.
Gradients are added up as segments end; the once phase (reduction over tied copies, optimizer) runs after the last one.

All stages live in this process, each with the ranks of one mesh; NumPy computes outside Python's lock, so that stages
overlap.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sbp.cuda.interface import Backend
from sbp.errors import PlanError, SbpError
from sbp.planner.places import BACKWARD, FORWARD, ONCE, WEIGHT, Place
from sbp.planner.schedule import Action, Credits, Schedule, describe, schedule_named
from sbp.planner.stages import StagedPlan, Transfer
from sbp.runtime.boxing import Local
from sbp.runtime.executor import Executor, Table

Ran = tuple[int, float, float]
"""An operation, and when it started and stopped."""


class DeadlockError(SbpError):
    """Actors that wait for each other: too few buffers, or orders that no pipeline can keep."""


@dataclass(frozen=True, slots=True)
class PipelineStep:
    """What one step made.

    Attributes
    ----------
    outputs
        Output value -> per micro-batch the arrays of the ranks of the stage that made it.
    state
        State value -> arrays after the step, on the ranks of the stage that updates it.
    orders
        Per stage its segments in the order in which they ran.
    in_flight
        Per stage the most micro-batches (times chunks) at once whose forward had run and whose last phase had not
        ended.
    shares
        Per micro-batch what its loss and its gradients were multiplied by in those of the step.
    timelines
        Per stage its operations in the order in which they ran, those of the once phase at the end, as (operation,
        start, stop), in seconds from the start of the step; empty unless timed.
    """

    outputs: Mapping[str, tuple[Local, ...]]
    state: Mapping[str, Local]
    orders: tuple[tuple[Action, ...], ...]
    in_flight: tuple[int, ...]
    shares: tuple[float, ...]
    timelines: tuple[tuple[Ran, ...], ...] = ()


class PipelineExecutor:
    """A staged plan, ready to run.

    Parameters
    ----------
    staged
        The plan, cut into chunks.
    micro_batches
        How many make a step. Each has the inputs of the plan's graph; losses and gradients are those of all samples
        together (see `sbp.planner.accumulation`).
    order
        A `Schedule`, `Credits`, or the name of a schedule, such as "1f1b" or "interleaved:2".
    buffers
        Per stage how many forward segments may wait for their last phase; replaces those of credits, and for a schedule
        sets them (default as many as its order needs).
    backend, floating
        As for `sbp.runtime.executor.Executor`.

    Raises
    ------
    PipelineError, PlanError
        The order is for another number of stages, chunks or micro-batches, or has a phase that the plan has not.
    """

    def __init__(
        self,
        staged: StagedPlan,
        micro_batches: int,
        order: Schedule | Credits | str = "1f1b",
        *,
        buffers: Sequence[int] | None = None,
        backend: Backend | None = None,
        floating: str | None = None,
    ) -> None:
        phases = staged.phases
        if isinstance(order, str):
            order = schedule_named(order, staged.stages, staged.chunks, micro_batches, phases)
        if not isinstance(order, (Schedule, Credits)):
            raise PlanError(f"order must be the name of a schedule, a Schedule or Credits, got {order!r}.")
        expected = (staged.stages, staged.chunks, micro_batches)
        if (order.stages, order.chunks, order.micro_batches) != expected:
            raise PlanError(
                f"{order.name} is for {order.stages} stages of {order.chunks} chunks and {order.micro_batches} "
                f"micro-batches, the plan has {expected[0]} of {expected[1]} and runs {expected[2]}."
            )
        wanted = order.phases if isinstance(order, Schedule) else order.priority
        if set(wanted) != set(phases):
            raise PlanError(
                f"{order.name} has the phases {', '.join(wanted)}, the plan has {', '.join(phases)}; weight gradients "
                "are part of its backward phase unless `cut` is told weights_apart."
            )
        self.staged, self.micro_batches, self.order, self.phases = staged, micro_batches, order, phases
        self.buffers = self._buffers(order, buffers)
        self._executor = Executor(staged.physical, backend, floating=floating)
        self._runs = [run for run, _ in self._executor._steps]
        self._arriving: dict[Place, list[Transfer]] = {}
        self._leaving: dict[Place, list[Transfer]] = {}
        self._counting = {staged.made[number]: number for number in staged.accumulation.counts}
        for transfer in staged.transfers:
            self._arriving.setdefault(transfer.target, []).append(transfer)
            self._leaving.setdefault(transfer.source, []).append(transfer)

    def _buffers(self, order: Schedule | Credits, given: Sequence[int] | None) -> tuple[Mapping[str, int], ...]:
        """Per stage and phase after forward how many forward segments may wait for it."""
        if given is not None:
            listed = isinstance(given, (list, tuple)) and len(given) == order.stages
            if not listed or not all(type(count) is int and count >= 1 for count in given):
                raise PlanError(f"buffers gives each of {order.stages} stages at least 1, got {given!r}.")
            return tuple(dict.fromkeys(self.phases[-1:], count) for count in given)
        if self.phases == (FORWARD,):
            return ({},) * order.stages
        if isinstance(order, Schedule):
            return tuple({self.phases[-1]: count} for count in order.in_flight(self.phases[-1]))
        return order.buffers

    # -- in and out --------------------------------------------------------------------------------------------------

    def place(self, arrays: Mapping[str, Any]) -> dict[str, Local]:
        """The shards of global arrays (inputs of one micro-batch, or state) for the ranks of one stage."""
        return self._executor.place(arrays)

    def collect_state(self, state: Mapping[str, Local]) -> dict[str, Any]:
        """The global arrays of state values."""
        return self._executor.collect_state(state)

    def collect_outputs(self, outputs: Mapping[str, Sequence[Local]]) -> dict[str, list[Any]]:
        """Per micro-batch the global arrays of the outputs."""
        numbers = self.staged.physical.outputs
        return {
            value: [self._executor.collect(one, numbers[value]) for one in local] for value, local in outputs.items()
        }

    def collect_losses(self, step: PipelineStep) -> dict[str, float]:
        """Scalar output -> its value over all micro-batches, as the program of the whole batch gives it."""
        registers = self.staged.physical.registers
        scalars = {
            value: local
            for value, local in step.outputs.items()
            if not registers[self.staged.physical.outputs[value]].type.shape
        }
        return {
            value: math.fsum(share * float(one) for share, one in zip(step.shares, made) if share)
            for value, made in self.collect_outputs(scalars).items()
        }

    def zeros(self, number: int) -> Local:
        """A register's arrays, filled with zeros."""
        executor = self._executor
        dtype = executor.backend.dtype(executor.dtype(self.staged.physical.registers[number]))
        boxes = zip(executor.communicator.ranks, executor._local(number))
        return {rank: executor.backend.xp.zeros(box.shape, dtype=dtype) for rank, box in boxes}

    # -- run ---------------------------------------------------------------------------------------------------------

    def run(
        self, state: Mapping[str, Local], feeds: Sequence[Mapping[str, Local]], timed: bool = False
    ) -> PipelineStep:
        """One step.

        Parameters
        ----------
        state
            State value -> arrays of one stage's ranks, placed; every chunk that reads a value starts from it.
        feeds
            Per micro-batch the placed inputs.
        timed
            Note when every operation ran; each is then waited for.

        Raises
        ------
        DeadlockError
            No actor can fire any more; the message names every blocked one and what it waits for.
        SbpError
            What a kernel raised.
        """
        if len(feeds) != self.micro_batches:
            raise PlanError(f"a step has {self.micro_batches} micro-batches, got feeds for {len(feeds)}.")
        executor = self._executor
        for value, number in executor._state.items():
            executor._given(value, number, state, "state")
        for feed in feeds:
            for value, number in executor._feeds.items():
                executor._given(value, number, feed, "input")
        shared = _Shared(self, timed)
        workers = [_Stage(self, shared, stage, state, feeds) for stage in range(self.staged.stages)]
        threads = [
            threading.Thread(target=worker.main, name=f"stage {worker.stage}", daemon=True) for worker in workers
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if shared.error is not None:
            raise shared.error
        found = dict(state)
        outputs: dict[str, tuple[Local, ...]] = {}
        for worker in workers:
            found.update(worker.new_state)
            outputs.update({value: tuple(one for one in made if one) for value, made in worker.outputs.items()})
        divisor = self.staged.accumulation.divisor(shared.weights, self.micro_batches)
        return PipelineStep(
            outputs,
            found,
            tuple(tuple(worker.order) for worker in workers),
            tuple(worker.most_in_flight for worker in workers),
            tuple(shared.weights.get(at, 1.0) / divisor if divisor else math.nan for at in range(self.micro_batches)),
            tuple(tuple(worker.ran) for worker in workers) if timed else (),
        )


class _Shared:
    """What the stages' threads share: the mail, and who waits."""

    def __init__(self, pipeline: PipelineExecutor, timed: bool) -> None:
        self.timed, self.origin = timed, time.perf_counter()
        self.changed = threading.Condition()
        self.mail: dict[tuple[int, int, int], Local] = {}  # (register, chunk, micro-batch; -1 for once) -> arrays
        # Micro-batch -> its count, if such is what it weighs. It is there before any gradient of the micro-batch.
        self.weights: dict[int, float] = {}
        self.working = pipeline.staged.stages
        self.waiting: dict[int, str] = {}
        self.error: BaseException | None = None

    def send(self, register: int, chunk: int, micro_batch: int, local: Local) -> None:
        with self.changed:
            self.mail[register, chunk, micro_batch] = local
            # Whoever waits has to look again before it counts as waiting: this may be what it waits for.
            self.waiting.clear()
            self.changed.notify_all()

    def fail(self, error: BaseException) -> None:
        with self.changed:
            self.error = self.error or error
            self.changed.notify_all()

    def ended(self) -> None:
        with self.changed:
            self.working -= 1
            self._look_for_deadlock()
            self.changed.notify_all()

    def wait(self, stage: int, why: str) -> None:
        """Until something has changed; holding `changed`. The last one to wait finds that nobody can go on."""
        self.waiting[stage] = why
        self._look_for_deadlock()
        if self.error is None:
            self.changed.wait()
        self.waiting.pop(stage, None)
        if self.error is not None:
            raise _Stopped

    def _look_for_deadlock(self) -> None:
        if self.error is None and self.waiting and len(self.waiting) == self.working:
            blocked = "; ".join(f"stage {stage}: {why}" for stage, why in sorted(self.waiting.items()))
            self.error = DeadlockError(
                f"the pipeline stands still, every actor waits: {blocked}. Give the stages more buffers, or orders "
                "that follow the data."
            )
            self.changed.notify_all()


class _Stopped(Exception):
    """Another stage failed."""


class _Stage:
    """One stage: its chunks' registers, and the thread that fires its actors."""

    def __init__(
        self,
        pipeline: PipelineExecutor,
        shared: _Shared,
        stage: int,
        state: Mapping[str, Local],
        feeds: Sequence[Mapping[str, Local]],
    ) -> None:
        self.pipeline, self.shared, self.stage, self.feeds = pipeline, shared, stage, feeds
        staged = pipeline.staged
        self.staged, self.physical = staged, staged.physical
        self.chunks = range(stage, staged.stages * staged.chunks, staged.stages)
        self.state = {
            value: local
            for value, local in state.items()
            if any(c in self.chunks for c in staged.copies.get(value, ()))
        }
        self.tables: dict[tuple[int, int], Table] = {}
        # Made at once, as training frameworks do, so that memory does not grow during the step.
        self.sums = {number: pipeline.zeros(number) for number in self.summed()}
        self.order: list[Action] = []
        self.ran: list[Ran] = []
        # Per phase after forward how many micro-batches (times chunks) wait for it.
        self.waiting = dict.fromkeys(pipeline.phases[1:], 0)
        self.most_in_flight = 0
        self.backward_done: set[tuple[int, int]] = set()
        self.outputs: dict[str, list[Local]] = {}
        self.new_state: dict[str, Local] = {}

    def summed(self) -> list[int]:
        """Registers of this stage that the once phase reads of the micro-batches."""
        places, made = self.staged.places, self.staged.made
        wanted = sorted({*self.staged.accumulated, *self.staged.carried})
        return [number for number in wanted if places[made[number]][0] in self.chunks]

    def main(self) -> None:
        try:
            if isinstance(self.pipeline.order, Schedule):
                for action in self.pipeline.order.orders[self.stage]:
                    self.await_ready(action)
                    self.fire(action)
            else:
                self.fire_by_credits(self.pipeline.order)
            self.once()
        except _Stopped:
            pass
        except BaseException as error:  # the caller's thread raises it
            self.shared.fail(error)
        finally:
            self.shared.ended()

    # -- what fires when ---------------------------------------------------------------------------------------------

    def missing(self, action: Action) -> str:
        """What an action waits for; empty if it can fire. Holding `changed`."""
        phase, chunk, micro_batch = action
        if phase == FORWARD:
            for after, count in self.pipeline.buffers[self.stage].items():
                if self.waiting[after] >= count:
                    return f"{describe(action)} needs a free buffer, all {count} of its stage wait for their {after}"
        elif (chunk, micro_batch) not in self.tables:
            return f"{describe(action)} comes after its forward"
        elif phase == WEIGHT and (chunk, micro_batch) not in self.backward_done:
            return f"{describe(action)} comes after its backward"
        for transfer in self.pipeline._arriving.get((chunk, phase), ()):
            if (transfer.register, chunk, micro_batch) not in self.shared.mail:
                value = self.physical.registers[transfer.register].value
                return f"{describe(action)} waits for {value} from chunk {transfer.source[0]}"
        return ""

    def await_ready(self, action: Action) -> None:
        with self.shared.changed:
            while why := self.missing(action):
                self.shared.wait(self.stage, why)

    def fire_by_credits(self, credits: Credits) -> None:
        """The most urgent phase whose next segment can fire, until all have."""
        queues = {phase: list(runs) for phase, runs in credits.queues[self.stage].items()}
        while any(queues.values()):
            with self.shared.changed:
                chosen = None
                while chosen is None:
                    reasons = []
                    for phase in credits.priority:
                        if queues[phase]:
                            action = (phase, *queues[phase][0])
                            why = self.missing(action)
                            if not why:
                                chosen = action
                                break
                            reasons.append(why)
                    if chosen is None:
                        self.shared.wait(self.stage, ", and ".join(reasons))
            self.fire(chosen)
            queues[chosen[0]].pop(0)

    # -- work --------------------------------------------------------------------------------------------------------

    def fire(self, action: Action) -> None:
        phase, chunk, micro_batch = action
        last = self.pipeline.phases[-1]
        if phase == FORWARD:
            for after in self.waiting:
                self.waiting[after] += 1
            self.most_in_flight = max(self.most_in_flight, self.waiting.get(last, 1))
        table = self.table(chunk, micro_batch)
        with self.shared.changed:
            for transfer in self.pipeline._arriving.get((chunk, phase), ()):
                table[transfer.register] = self.shared.mail.pop((transfer.register, chunk, micro_batch))
        place = (chunk, phase)
        operations = self.staged.segments[place]
        for at in operations[:-1]:
            self.run(at, micro_batch, table)
            for number in self.staged.releases.get(at, ()):
                table[number] = None
        for at in operations[-1:]:
            self.run(at, micro_batch, table)
        self.leave(place, micro_batch, table)
        for at in operations[-1:]:
            for number in self.staged.releases.get(at, ()):
                table[number] = None
        self.order.append(action)
        if phase != FORWARD:
            self.waiting[phase] -= 1
        if phase == BACKWARD:
            self.backward_done.add((chunk, micro_batch))
        if phase == last:
            del self.tables[chunk, micro_batch]

    def timed(self, at: int, table: Table) -> None:
        """One operation, and when it ran if that is wanted."""
        if not self.shared.timed:
            self.pipeline._runs[at](table)
            return
        start = time.perf_counter()
        self.pipeline._runs[at](table)
        self.pipeline._executor.backend.synchronize()
        self.ran.append((at, start - self.shared.origin, time.perf_counter() - self.shared.origin))

    def run(self, at: int, micro_batch: int, table: Table) -> None:
        """One operation of a micro-batch; of a count, note what the micro-batch weighs.

        Where nothing counts, the sums of loss and gradients are zero and must stay so, whatever they are divided by.
        """
        self.timed(at, table)
        number = self.pipeline._counting.get(at)
        if number is not None:
            local = _full(table, number)
            count = float(next(iter(local.values())))
            with self.shared.changed:
                self.shared.weights.setdefault(micro_batch, count)
            if not count:
                table[number] = {rank: array + 1 for rank, array in local.items()}

    def leave(self, place: Place, micro_batch: int, table: Table) -> None:
        """Send, put out and add up what the segment made."""
        for transfer in self.pipeline._leaving.get(place, ()):
            if transfer.target[1] != ONCE:
                self.shared.send(transfer.register, transfer.target[0], micro_batch, _full(table, transfer.register))
        for value, number in self.physical.outputs.items():
            if number in self.staged.made and self.staged.places[self.staged.made[number]] == place:
                made = self.outputs.setdefault(value, [{} for _ in range(self.pipeline.micro_batches)])
                made[micro_batch] = dict(_full(table, number))
        for number in self.sums:
            if self.staged.places[self.staged.made[number]] == place:
                self.add(number, _full(table, number), self.shared.weights.get(micro_batch))

    def add(self, number: int, local: Local, weight: float | None) -> None:
        for rank, array in local.items():
            if number in self.staged.accumulated:
                self.sums[number][rank] += array if weight is None else array * weight
            else:
                self.sums[number][rank][...] = array

    def table(self, chunk: int, micro_batch: int) -> Table:
        found = self.tables.get((chunk, micro_batch))
        if found is None:
            found = self.tables[chunk, micro_batch] = [None] * len(self.physical.registers)
            self.fill(found, self.feeds[micro_batch], self.staged.reads[chunk])
        return found

    def fill(self, table: Table, feed: Mapping[str, Local], read: Collection[int] | None = None) -> None:
        for value, number in self.physical.sources.items():
            if read is None or number in read:
                table[number] = self.state.get(value) or feed.get(value)

    # -- once --------------------------------------------------------------------------------------------------------

    def once(self) -> None:
        """After the last micro-batch: whole gradients, what belongs to other chunks, the optimizer, tied copies."""
        staged = self.staged
        divisor = staged.accumulation.divisor(self.shared.weights, self.pipeline.micro_batches)
        means: Table = [None] * len(self.physical.registers)
        self.fill(means, {})
        for number, local in self.sums.items():
            means[number] = local
            if number in staged.accumulated:
                for array in local.values():
                    array /= divisor
        mine = sorted(at for chunk in self.chunks for at in staged.segments[chunk, ONCE])
        self.send_once(means, tuple(self.sums))
        for at in mine:
            operation = self.physical.operations[at]
            chunk = staged.places[at][0]
            for number in operation.inputs:
                if means[number] is None:
                    means[number] = self.receive_once(number, chunk, at)
            self.timed(at, means)
            self.send_once(means, operation.outputs)
        for value, new in self.physical.updates.items():
            if staged.homes[value] in self.chunks and new in staged.made:
                self.new_state[value] = _full(means, new)

    def send_once(self, means: Table, numbers: Sequence[int]) -> None:
        for transfer in self.staged.transfers:
            if transfer.target[1] == ONCE and transfer.register in numbers and transfer.source[0] in self.chunks:
                self.shared.send(transfer.register, transfer.target[0], -1, _full(means, transfer.register))

    def receive_once(self, number: int, chunk: int, at: int) -> Local:
        with self.shared.changed:
            while (number, chunk, -1) not in self.shared.mail:
                value = self.physical.registers[number].value
                self.shared.wait(self.stage, f"operation {at} of the once phase, of chunk {chunk}, waits for {value}")
            return self.shared.mail.pop((number, chunk, -1))


def _full(table: Table, number: int) -> Local:
    local = table[number]
    assert local is not None, f"register {number} is empty where it is needed"
    return local
