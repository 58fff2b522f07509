"""One rank per process of torch.distributed, on torch tensors: gloo on the CPU, NCCL on GPUs.

Every mesh axis has the process group that its DeviceMesh gives it. With `overlap` a collective only starts here and the
result is a `Pending`, which whoever reads it waits for, so that what does not need it runs meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sbp.comm.interface import Array, CommunicationError, Groups, Sizes
from sbp.mesh import Mesh


class Pending:
    """The result of a collective under way; `wait` gives it, once it is there."""

    __slots__ = ("_finish", "_result", "_work")

    def __init__(self, work: Any, finish: Callable[[], Any]) -> None:
        self._work = work
        self._finish: Callable[[], Any] | None = finish
        self._result: Any = None

    def wait(self) -> Any:
        """The tensor. On a GPU only its stream waits."""
        if self._finish is not None:
            self._work.wait()
            self._result = self._finish()
            self._work = self._finish = None  # what was sent may be freed
        return self._result


def arrived(array: Any) -> Any:
    """A tensor, waited for if it is still under way."""
    return array.wait() if isinstance(array, Pending) else array


class TorchCommunicator:
    """The ranks of a DeviceMesh; start the program with `torchrun --nproc-per-node RANKS`.

    Parameters
    ----------
    mesh
        The plan's mesh; its ranks are the places of the device mesh in row-major order.
    device_mesh
        `torch.distributed.device_mesh.DeviceMesh` of the same shape.
    overlap
        Results are `Pending`.

    Raises
    ------
    CommunicationError
        The device mesh has another shape, or this process is not in it.
    """

    def __init__(self, mesh: Mesh, device_mesh: Any, overlap: bool = False) -> None:
        import torch.distributed

        self._dist = torch.distributed
        if tuple(device_mesh.mesh.shape) != mesh.shape:
            raise CommunicationError(
                f"the plan is for {mesh} of shape {list(mesh.shape)}, the device mesh has the shape "
                f"{list(device_mesh.mesh.shape)}; make it with init_device_mesh(device, {mesh.shape}, "
                f"mesh_dim_names={mesh.names})."
            )
        place = device_mesh.get_coordinate()
        if place is None:
            raise CommunicationError("this process is not in the device mesh; give one that holds all processes.")
        self.size = mesh.size
        self.ranks = (mesh.rank(place),)
        self._rank = self.ranks[0]
        self._overlap = overlap
        self._global = [int(rank) for rank in device_mesh.mesh.flatten()]
        # With the groups of others too, so that every process knows alike which are made.
        self._made: dict[tuple[int, ...], Any] = {}
        for axis in range(mesh.ndim):
            for group in mesh.groups(axis):
                self._made.setdefault(group, device_mesh.get_group(axis) if self._rank in group else None)
        self._reduce = {
            "sum": self._dist.ReduceOp.SUM, "max": self._dist.ReduceOp.MAX, "min": self._dist.ReduceOp.MIN
        }  # fmt: skip
        # The public names changed in torch 2.13; the operators below them did not.
        self._reduce_scatter = getattr(self._dist, "reduce_scatter_single", None) or self._dist.reduce_scatter_tensor
        self._all_gather = getattr(self._dist, "all_gather_single", None) or self._dist.all_gather_into_tensor

    # -- collectives -------------------------------------------------------------------------------------------------

    def all_reduce(self, arrays: Mapping[int, Array], groups: Groups, reduce: str) -> dict[int, Array]:
        """P -> B."""
        group, members = self._among(groups)
        if len(members) < 2:
            return {rank: arrays[rank] for rank in members}
        tensor = arrays[self._rank]
        if not tensor.numel():
            return {self._rank: tensor}
        kind, out = tensor.dtype, _countable(tensor).clone(memory_format=_contiguous())
        work = self._dist.all_reduce(out, op=self._reduce[reduce], group=group, async_op=True)
        return self._result(work, lambda: out.to(kind), tensor)

    def all_gather(self, arrays: Mapping[int, Array], groups: Groups, axis: int, sizes: Sizes) -> dict[int, Array]:
        """S(axis) -> B. Uneven shards travel padded to the largest."""
        group, members = self._among(groups)
        if len(members) < 2:
            return {rank: arrays[rank] for rank in members}
        tensor, here = arrays[self._rank], sizes[groups.index(members)]
        most = max(here)
        sent = _padded(tensor.movedim(axis, 0), most)
        out = sent.new_empty((len(here) * most, *sent.shape[1:]))

        def finish() -> Any:
            made = out
            if any(size != most for size in here):
                torch = _torch()
                made = torch.cat([part[:size] for part, size in zip(out.split(most), here)])
            return made.movedim(0, axis).contiguous()

        if not out.numel():
            return {self._rank: finish()}
        work = self._all_gather(out, sent, group=group, async_op=True)
        return self._result(work, finish, sent)

    def reduce_scatter(
        self, arrays: Mapping[int, Array], groups: Groups, axis: int, sizes: Sizes, reduce: str
    ) -> dict[int, Array]:
        """P -> S(axis). Uneven chunks travel padded to the largest."""
        group, members = self._among(groups)
        if len(members) < 2:
            return {rank: arrays[rank] for rank in members}
        tensor, here = arrays[self._rank], sizes[groups.index(members)]
        torch, most, mine = _torch(), max(here), here[members.index(self._rank)]
        kind, rows = tensor.dtype, _countable(tensor).movedim(axis, 0)
        parts = [_padded(part, most) for part in rows.split(list(here))]
        sent = torch.cat(parts)
        out = sent.new_empty((most, *sent.shape[1:]))

        def finish() -> Any:
            return out[:mine].movedim(0, axis).contiguous().to(kind)

        if not out.numel():
            return {self._rank: finish()}
        work = self._reduce_scatter(out, sent, op=self._reduce[reduce], group=group, async_op=True)
        return self._result(work, finish, sent)

    def all_to_all(
        self,
        arrays: Mapping[int, Array],
        groups: Groups,
        source_axis: int,
        source_sizes: Sizes,
        target_axis: int,
        target_sizes: Sizes,
    ) -> dict[int, Array]:
        """S(source_axis) -> S(target_axis)."""
        group, members = self._among(groups)
        if len(members) < 2:
            return {rank: arrays[rank] for rank in members}
        tensor = arrays[self._rank]
        torch, number, position = _torch(), groups.index(members), members.index(self._rank)
        blocks = tensor.split(list(target_sizes[number]), dim=target_axis)
        shapes = []
        for size in source_sizes[number]:
            shape = list(tensor.shape)
            shape[source_axis], shape[target_axis] = size, target_sizes[number][position]
            shapes.append(shape)
        counts = [math.prod(shape) for shape in shapes]
        sent = torch.cat([block.reshape(-1) for block in blocks])
        out = sent.new_empty(sum(counts))

        def finish() -> Any:
            pieces = [part.reshape(shape) for part, shape in zip(out.split(counts), shapes)]
            return torch.cat(pieces, dim=source_axis)

        work = self._dist.all_to_all_single(
            out, sent, counts, [block.numel() for block in blocks], group=group, async_op=True
        )
        return self._result(work, finish, sent)

    def broadcast(self, arrays: Mapping[int, Array], groups: Groups, root: int) -> dict[int, Array]:
        """Every member gets the tensor of the member at position `root`."""
        group, members = self._among(groups)
        if not members:
            return {}
        out = arrays[self._rank].clone(memory_format=_contiguous())
        if len(members) > 1 and out.numel():
            self._dist.broadcast(out, src=self._global[members[root]], group=group)
        return {self._rank: out}

    def permute(
        self,
        arrays: Mapping[int, Array],
        pairs: Sequence[tuple[int, int]],
        shapes: Mapping[int, Sequence[int]],
        dtype: Any,
    ) -> dict[int, Array]:
        """Point to point."""
        torch = _torch()
        kind = dtype if isinstance(dtype, torch.dtype) else getattr(torch, str(dtype))
        group, _ = self._among((tuple(range(self.size)),))
        result, calls = {}, []
        for source, target in pairs:
            if source == target == self._rank:
                result[target] = arrays[source]
            elif target == self._rank:
                device = next(iter(arrays.values())).device if arrays else "cpu"
                result[target] = torch.empty(tuple(shapes[target]), dtype=kind, device=device)
                if result[target].numel():
                    calls.append(self._dist.P2POp(self._dist.irecv, result[target], self._global[source], group))
            elif source == self._rank and arrays[source].numel():
                sent = arrays[source].contiguous()
                calls.append(self._dist.P2POp(self._dist.isend, sent, self._global[target], group))
        for work in self._dist.batch_isend_irecv(calls) if calls else ():
            work.wait()
        return result

    def barrier(self) -> None:
        """Return once every rank has come here."""
        group, _ = self._among((tuple(range(self.size)),))
        self._dist.barrier(group=group)

    def fail(self) -> None:
        """Nothing: torchrun ends all processes when one of them fails."""

    def close(self) -> None:
        """Nothing: the process groups belong to whoever made the device mesh."""

    # -- groups ------------------------------------------------------------------------------------------------------

    def _among(self, groups: Groups) -> tuple[Any, tuple[int, ...]]:
        """This rank's process group and its members; (None, ()) if it is in none."""
        for group in groups:
            if len(group) > 1 and group not in self._made:
                # Every process must take part in making every group, in one order.
                self._made[group] = self._dist.new_group([self._global[rank] for rank in group])
        members = next((group for group in groups if self._rank in group), ())
        return (self._made[members] if len(members) > 1 else None), members

    def _result(self, work: Any, finish: Callable[[], Any], sent: Any) -> dict[int, Array]:
        def keep_sent() -> Any:
            _ = sent  # what is sent must live until it has arrived
            return finish()

        pending = Pending(work, keep_sent)
        return {self._rank: pending if self._overlap else pending.wait()}


def _torch() -> Any:
    import torch

    return torch


def _contiguous() -> Any:
    return _torch().contiguous_format


def _countable(tensor: Any) -> Any:
    """Truth values as bytes: their maximum is any, their minimum all, and not every backend reduces them."""
    return tensor.to(_torch().uint8) if tensor.dtype == _torch().bool else tensor


def _padded(rows: Any, size: int) -> Any:
    """Contiguous, with zeros behind up to `size` rows."""
    if rows.shape[0] == size:
        return rows.contiguous()
    made = rows.new_zeros((size, *rows.shape[1:]))
    made[: rows.shape[0]] = rows
    return made
