"""Checkpoints: saved on some ranks, read on any others; a write that breaks off harms nothing; damage is named."""

import json
import threading
import zlib

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sbp
from sbp.cli.main import run as command
from sbp.comm.inprocess import InProcessCommunicator
from sbp.comm.nccl import NCCLCommunicator
from sbp.cuda.numpy_backend import NumpyBackend
from sbp.errors import LayoutError, MeshError, PlanError
from sbp.layout import Layout
from sbp.mesh import Mesh
from sbp.operator import TensorType
from sbp.planner.auto_parallel import auto_parallel
from sbp.runtime import checkpoint as files
from sbp.runtime.checkpoint import CheckpointError, Held, open_checkpoint, owners_of, write_checkpoint
from tests.fake_cupy import FakeCupy, World
from tests.test_comm_nccl import on_ranks

RNG = numpy.random.default_rng


def data_files(folder):
    return sorted(path.name for path in folder.iterdir() if path.name != files.INDEX)


# -- tensors -----------------------------------------------------------------------------------------------------------

LAYOUTS = {
    1: ["S(0)", "S(1)", "B", "P", "P(max)"],
    2: ["S(0), S(1)", "S(1), S(0)", "S(0), S(0)", "B, S(1)", "P, S(0)", "B, B"],
}
MESHES = {1: [(1,), (2,), (3,), (5,)], 2: [(2, 2), (3, 2), (1, 4)]}


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_layout_on_any_mesh_is_read_in_any_other(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("state")
    ends = [data.draw(st.sampled_from([1, 2])) for _ in range(2)]
    meshes = [data.draw(st.sampled_from(MESHES[ndim])) for ndim in ends]
    layouts = [data.draw(st.sampled_from(LAYOUTS[ndim])) for ndim in ends]
    shape = data.draw(st.sampled_from([(6, 4), (5, 3), (1, 7), (2, 2), (0, 3)]))
    dtype = data.draw(st.sampled_from(["f8", "f4", "f2", "i8", "i4", "u1"]))
    array = (RNG(0).standard_normal(shape) * 10).astype(dtype)
    sbp.save(folder, {"x": sbp.from_numpy(array, layouts[0], meshes[0]), "y": sbp.from_numpy(array.T, None, meshes[0])})
    found = sbp.load(folder, {"x": layouts[1]}, meshes[1])
    assert found["x"].layout == Layout.parse(layouts[1]) and found["x"].numpy().dtype == array.dtype
    numpy.testing.assert_array_equal(found["x"].numpy(), array)
    numpy.testing.assert_array_equal(found["y"].numpy(), array.T)


def test_numbers_booleans_and_bf16(tmp_path):
    tensors = {
        "number": sbp.from_numpy(numpy.float64(2.5), None, 3),
        "flags": sbp.from_numpy(numpy.array([True, False, True]), "S(0)", 3),
        "half": sbp.from_numpy(RNG(0).standard_normal((5, 2)), "S(0)", 3, dtype="bf16"),
    }
    sbp.save(tmp_path / "state", tensors)
    found = sbp.load(tmp_path / "state", mesh=2)
    assert {name: (item.type, item.numpy().tolist()) for name, item in found.items()} == {
        name: (item.type, item.numpy().tolist()) for name, item in tensors.items()
    }


def test_replicas_are_written_once_and_by_different_ranks():
    """8 tensors that all of 4 ranks hold: each is written by one, and every rank writes two of them."""
    mesh = Mesh((4,))
    kind, whole, split = TensorType((6, 2), "f32"), Layout.parse("B"), Layout.parse("S(0)")
    owners = owners_of({f"t{at}": (kind, whole) for at in range(8)}, mesh)
    assert [len(shards) for shards in owners.values()] == [1] * 8
    ranks = [rank for shards in owners.values() for rank in shards.values()]
    assert sorted(ranks) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert list(owners_of({"t": (kind, split)}, mesh)["t"].values()) == [0, 1, 2], "the fourth shard is empty"
    nested = owners_of({"t": (kind, Layout.parse("B, S(0)"))}, Mesh((2, 3)))["t"]
    assert sorted(shard.offset for shard in nested) == [(0, 0), (2, 0), (4, 0)]


def test_only_what_overlaps_is_read(tmp_path, monkeypatch):
    """Each of 4 ranks that load what 4 ranks saved opens one file; half of a piece is read where half is wanted."""
    array = RNG(0).standard_normal((8, 3))
    sbp.save(tmp_path / "x", {"x": sbp.from_numpy(array, "S(0)", 4)})
    read = []
    part = files.Checkpoint._part

    def watched(self, name, piece, slices):
        found = part(self, name, piece, slices)
        read.append((piece.file, found.shape))
        return found

    monkeypatch.setattr(files.Checkpoint, "_part", watched)
    sbp.load(tmp_path / "x", "S(0)", 4)
    assert read == [(f"000000-rank0000{rank}.safetensors", (2, 3)) for rank in range(4)]
    read.clear()
    sbp.load(tmp_path / "x", "S(0)", 8)
    assert [shape for _, shape in read] == [(1, 3)] * 8
    read.clear()
    sbp.load(tmp_path / "x", "S(1)", 3)
    assert [shape for _, shape in read] == [(2, 1)] * 12


def test_files_are_readable_without_this_library(tmp_path):
    from safetensors import safe_open

    sbp.save(tmp_path / "x", {"x": sbp.from_numpy(numpy.arange(10.0).reshape(5, 2), "S(0)", 2)})
    with safe_open(tmp_path / "x" / "000000-rank00001.safetensors", framework="numpy") as file:
        assert file.get_tensor("x").tolist() == [[6, 7], [8, 9]]
        crc = zlib.crc32(numpy.array([6.0, 7, 8, 9]).tobytes())
        assert json.loads(file.metadata()["sbp"]) == {"x": {"global_shape": [5, 2], "offset": [3, 0], "crc32": crc}}


def test_the_same_state_gives_the_same_bytes(tmp_path):
    tensors = {name: sbp.randn((6, 4), "S(0)", 2, seed=at) for at, name in enumerate("abc")}
    for name in ("one", "two"):
        sbp.save(tmp_path / name, tensors)
    assert data_files(tmp_path / "one") == data_files(tmp_path / "two")
    for name in (*data_files(tmp_path / "one"), files.INDEX):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_tensors_of_two_meshes_are_refused(tmp_path):
    with pytest.raises(MeshError, match=r"one mesh, got mesh\(x=2\) and mesh\(x=3\)"):
        sbp.save(tmp_path / "x", {"a": sbp.ones(3, None, 2), "b": sbp.ones(3, None, 3)})
    with pytest.raises(MeshError, match="got none"):
        sbp.save(tmp_path / "x", {})
    sbp.save(tmp_path / "x", {"a": sbp.ones(3, None, 2)})
    with pytest.raises(LayoutError, match="load of a"):
        sbp.load(tmp_path / "x", "S(1)", 2)


# -- whole or not at all -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fails_at", ["save_file", "replace", "index", "fsync"])
def test_a_write_that_breaks_off_leaves_the_old_checkpoint(tmp_path, monkeypatch, fails_at):
    """Whatever the step at which the disk is full or the process is killed, the folder reads as before."""
    import safetensors.numpy

    folder = tmp_path / "state"
    old, new = sbp.ones((4, 2), "S(0)", 2), sbp.zeros((4, 2), "S(0)", 2)
    sbp.save(folder, {"x": old})

    class Killed(BaseException):
        pass

    def broken(*arguments, **options):
        raise Killed

    replace = files.os.replace
    with monkeypatch.context() as patch:
        if fails_at == "save_file":
            patch.setattr(safetensors.numpy, "save_file", broken)
        elif fails_at == "fsync":
            patch.setattr(files.os, "fsync", broken)
        elif fails_at == "replace":
            patch.setattr(files.os, "replace", broken)
        else:
            patch.setattr(files.os, "replace", lambda a, b: broken() if str(b).endswith(files.INDEX) else replace(a, b))
        with pytest.raises(Killed):
            sbp.save(folder, {"x": new})
    assert (sbp.load(folder)["x"].numpy() == 1).all()
    sbp.save(folder, {"x": new})
    assert (sbp.load(folder)["x"].numpy() == 0).all()
    named = {piece.file for piece in open_checkpoint(folder).tensors["x"].pieces}
    assert set(data_files(folder)) == named, "nothing is left of the write that broke off"


def test_files_of_others_stay(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "model.safetensors").write_text("mine too")
    for value in (1.0, 2.0):
        sbp.save(tmp_path, {"x": sbp.full((2,), value, "S(0)", 2)})
    assert (tmp_path / "notes.txt").read_text() == "mine" and (tmp_path / "model.safetensors").exists()
    assert len(list(tmp_path.iterdir())) == 5


def test_where_nothing_can_be_written_it_is_said(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    for path in (blocked, blocked / "inside"):
        with pytest.raises(CheckpointError, match=r"cannot write the checkpoint .*file"):
            sbp.save(path, {"x": sbp.ones(2)})
    with pytest.raises(CheckpointError, match="is empty; give the name of a folder"):
        sbp.save("", {"x": sbp.ones(2)})


class Lockstep:
    """A communicator of one rank, in a thread of its own beside those of the other ranks; all-reduce is all it has."""

    def __init__(self, size, rank, barrier, slots):
        self.size, self.ranks, self._barrier, self._slots = size, (rank,), barrier, slots

    def all_reduce(self, arrays, groups, reduce):
        (rank,) = self.ranks
        self._slots[rank] = arrays[rank]
        self._barrier.wait(20)
        every = dict(self._slots)
        self._barrier.wait(20)
        return {rank: InProcessCommunicator(self.size).all_reduce(every, groups, reduce)[rank]}


def in_processes(ranks, program):
    """What `program(communicator)` returns or raises on every rank."""
    barrier, slots, found = threading.Barrier(ranks), {}, {}

    def one(rank):
        try:
            found[rank] = program(Lockstep(ranks, rank, barrier, slots))
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == ranks
    return found


def test_several_processes_write_one_checkpoint(tmp_path):
    array, layout, mesh = RNG(0).standard_normal((5, 2)), Layout.parse("S(0)"), Mesh((3,))
    kind = TensorType((5, 2), "f64")

    def program(communicator):
        (rank,) = communicator.ranks
        local = {rank: array[layout.shard((5, 2), (3,), (rank,)).slices]}
        write_checkpoint(tmp_path, {"x": Held(kind, layout, local)}, mesh, NumpyBackend(), communicator, {"steps": 3})

    for _ in range(2):
        assert set(in_processes(3, program).values()) == {None}
        assert len(data_files(tmp_path)) == 3
    found = open_checkpoint(tmp_path)
    numpy.testing.assert_array_equal(found.read("x"), array)
    assert found.steps == 3


def test_if_one_process_cannot_write_none_says_it_did(tmp_path, monkeypatch):
    import safetensors.numpy

    save_file = safetensors.numpy.save_file

    def full_disk(arrays, path, metadata):
        if "rank00001" in str(path):
            raise OSError(28, "No space left on device")
        save_file(arrays, path, metadata)

    layout, mesh, kind = Layout.parse("S(0)"), Mesh((3,)), TensorType((3,), "f64")

    def program(value):
        def write(communicator):
            local = {rank: numpy.full(1, value) for rank in communicator.ranks}
            write_checkpoint(tmp_path, {"x": Held(kind, layout, local)}, mesh, NumpyBackend(), communicator)

        return write

    in_processes(3, program(1.0))
    monkeypatch.setattr(safetensors.numpy, "save_file", full_disk)
    raised = in_processes(3, program(2.0))
    assert all(isinstance(error, CheckpointError) for error in raised.values())
    assert "No space left on device" in str(raised[1]) and "another process failed" in str(raised[0])
    assert open_checkpoint(tmp_path).read("x").tolist() == [1, 1, 1]


def test_shards_of_a_gpu_process_each(tmp_path):
    """The same over NCCL's communicator, with the arrays of a stand-in for CuPy."""
    world, layout, mesh = World(), Layout.parse("S(0)"), Mesh((2,))
    kind = TensorType((4,), "f32")

    def program(rank, environment):
        cupy = FakeCupy(world)
        communicator = NCCLCommunicator(environment, cupy, timeout=20)

        class Backend(NumpyBackend):
            xp = cupy
            to_host = staticmethod(cupy.asnumpy)

        local = {rank: cupy.full((2,), float(rank), dtype="float32")}
        write_checkpoint(tmp_path, {"x": Held(kind, layout, local)}, mesh, Backend(), communicator)
        communicator.close()
        return True

    assert on_ranks(2, program) == {0: True, 1: True}
    assert open_checkpoint(tmp_path).read("x").tolist() == [0, 0, 1, 1]


# -- damage ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path):
    sbp.save(tmp_path / "state", {"x": sbp.from_numpy(RNG(0).standard_normal((6, 2)), "S(0)", 3)})
    return tmp_path / "state"


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda index: index.update(schema=2), "schema 1"),
        (lambda index: index.pop("tensors"), "'tensors' is missing"),
        (lambda index: index["tensors"]["x"].update(shape=[7, 2]), "pieces of x do not make up f64.7,2."),
        (lambda index: index["tensors"]["x"].update(shape="x"), "shape must be a list"),
        (lambda index: index["tensors"]["x"].update(dtype="f3"), "unknown element type"),
        (lambda index: index["tensors"]["x"]["pieces"].pop(), "pieces of x"),
        (lambda index: index["tensors"]["x"]["pieces"][0].update(offset=[2, 0]), "pieces of x"),
        (lambda index: index["tensors"]["x"]["pieces"][0].update(offset=[-2, 0]), "offset.0. must be a whole number"),
        (lambda index: index["tensors"]["x"]["pieces"][0].update(offset=[0]), "pieces of x"),
        (lambda index: index["tensors"]["x"]["pieces"][2].update(offset=[5, 0]), "pieces of x"),
        (lambda index: index["tensors"]["x"]["pieces"][0].update(file="none.safetensors"), "none.safetensors"),
        (lambda index: index["tensors"].update(y=index["tensors"].pop("x")), "cannot read y"),
    ],
)
def test_a_damaged_index_is_named(saved, damage, says):
    index = json.loads((saved / files.INDEX).read_text())
    damage(index)
    (saved / files.INDEX).write_text(json.dumps(index))
    with pytest.raises(sbp.SbpError, match=says):
        sbp.load(saved)


@pytest.mark.parametrize("keep", [0, 7, 60, -1])
def test_a_file_that_was_cut_off_is_named(saved, keep):
    path = saved / "000000-rank00001.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"rank00001.safetensors: cannot read x"):
        sbp.load(saved)


@pytest.mark.parametrize("seed", range(20))
def test_a_bit_that_changed_is_noticed(saved, seed):
    """Anywhere in a file, numbers or header; where it changes what nobody reads, the numbers are right."""
    rng, path = RNG(seed), saved / "000000-rank00001.safetensors"
    data, right = bytearray(path.read_bytes()), RNG(0).standard_normal((6, 2))
    data[rng.integers(len(data)) if seed % 2 else -1 - rng.integers(32)] ^= 1 << int(rng.integers(8))
    path.write_bytes(data)
    try:
        found = sbp.load(saved)["x"].numpy()
    except CheckpointError as error:
        assert "rank00001.safetensors" in str(error)
    else:
        assert seed % 2 and (found == right).all()


def test_files_whose_names_were_exchanged_are_noticed(saved):
    first, second = (saved / f"000000-rank0000{rank}.safetensors" for rank in (0, 1))
    bytes = first.read_bytes(), second.read_bytes()
    first.write_bytes(bytes[1]), second.write_bytes(bytes[0])
    with pytest.raises(CheckpointError, match=r"x of offset \[2, 0\], but checkpoint.json says \[0, 0\]"):
        sbp.load(saved)


@pytest.mark.parametrize(
    ("kind", "says"), [("f4", "x as float32, another file as float64"), ("i8", "x of type i64, but .* says f64")]
)
def test_files_of_another_element_type_are_noticed(saved, tmp_path, kind, says):
    sbp.save(tmp_path / "other", {"x": sbp.from_numpy(numpy.ones((6, 2), kind), "S(0)", 3)})
    (tmp_path / "other" / "000000-rank00001.safetensors").replace(saved / "000000-rank00001.safetensors")
    with pytest.raises(CheckpointError, match=says):
        sbp.load(saved)


def test_a_layout_for_what_is_not_there_is_refused(saved):
    with pytest.raises(LayoutError, match="a layout for 'xx', which the checkpoint .* has not; did you mean x"):
        sbp.load(saved, {"xx": "S(0)"}, 2)
    for tensors in ({"x": numpy.ones(3)}, {3: sbp.ones(3)}):
        with pytest.raises(sbp.SbpError, match="save takes global tensors by name"):
            sbp.save(saved, tensors)


def test_files_of_two_checkpoints_are_not_mixed(saved, tmp_path):
    sbp.save(tmp_path / "other", {"x": sbp.from_numpy(numpy.zeros((7, 2)), "S(0)", 2)})
    (tmp_path / "other" / "000000-rank00000.safetensors").replace(saved / "000000-rank00000.safetensors")
    with pytest.raises(CheckpointError, match="not of one checkpoint"):
        sbp.load(saved)


def test_a_folder_without_index_is_no_checkpoint(tmp_path):
    for path in ("", tmp_path, tmp_path / "none"):
        with pytest.raises(CheckpointError, match=r"there is no checkpoint in .*checkpoint\.json"):
            sbp.load(path)
    (tmp_path / files.INDEX).write_text('{"format": "sbp-che')
    with pytest.raises(CheckpointError, match="not a complete JSON file"):
        sbp.load(tmp_path)


# -- training ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plans():
    """A GPT with dropout and AdamW on four meshes, on each with its state split otherwise."""
    model = sbp.build("tiny-gpt2", vocabulary=256, dropout=0.1)
    pins = {(2,): "S(0)", (2, 2): "S(1), S(0)", (3,): "S(1)"}
    return {
        mesh: auto_parallel(
            model,
            sbp.Cluster.preset("cpu", nodes=1, devices_per_node=Mesh(mesh).size),
            batch=4, sequence=8, mesh=mesh, time_limit=5,
            pins={f"h.*.mlp.*.weight{what}": pins[mesh] for what in ("", ".exp_avg")} if mesh in pins else None,
        )
        for mesh in ((1,), (2,), (2, 2), (3,))
    }  # fmt: skip


def test_a_resumed_run_is_the_run_that_went_on(plans, tmp_path):
    """Weights, optimizer state, random numbers of dropout, place in the data: the same bits on the same mesh."""
    plan = plans[(2, 2)]
    whole = plan.run(6, seed=3, floating="f64")
    plan.run(4, seed=3, floating="f64", save=tmp_path)
    rest = plan.run(2, floating="f64", resume=tmp_path)
    assert rest.first_step == 4 and rest.losses == whole.losses[4:]
    for name, array in whole.state.items():
        numpy.testing.assert_array_equal(rest.state[name], array)
    kinds = {plan.graph.values[name].kind for name in open_checkpoint(tmp_path).tensors}
    assert {"parameter", "optimizer", "buffer"} <= kinds
    assert open_checkpoint(tmp_path).facts["seed"] == 3


@pytest.mark.parametrize("mesh", [(1,), (2,), (3,)])
def test_other_ranks_go_on_where_four_stopped(plans, tmp_path, mesh):
    whole = plans[(1,)].run(6, floating="f64")
    plans[(2, 2)].run(4, floating="f64", save=tmp_path, save_every=2)
    rest = plans[mesh].run(2, floating="f64", resume=tmp_path)
    numpy.testing.assert_allclose(rest.losses, whole.losses[4:], rtol=1e-12)


def test_a_run_that_was_killed_goes_on_from_its_last_save(plans, tmp_path):
    whole = plans[(2,)].run(5, floating="f64")

    class Killed(Exception):
        pass

    def killed(step, loss):
        if step == 3:
            raise Killed

    with pytest.raises(Killed):
        plans[(2,)].run(9, floating="f64", save=tmp_path, save_every=3, progress=killed)
    assert open_checkpoint(tmp_path).steps == 3
    rest = plans[(2,)].run(2, floating="f64", resume=tmp_path, save=tmp_path)
    assert rest.losses == whole.losses[3:] and open_checkpoint(tmp_path).steps == 5


def test_a_checkpoint_of_something_else_is_refused(plans, tmp_path):
    plan = plans[(2,)]
    plan.run(1, save=tmp_path / "state")
    text = tmp_path / "text"
    text.write_bytes(b"other words " * 20)
    with pytest.raises(PlanError, match="is of a run on text .*, this one reads text"):
        plan.run(1, resume=tmp_path / "state", text=text)
    cluster = plan.cluster
    model = sbp.build("tiny-gpt2", vocabulary=256, dropout=0.1)
    sgd = auto_parallel(model, cluster, batch=4, sequence=8, mesh=(2,), optimizer="sgd", time_limit=5)
    with pytest.raises(PlanError, match=r"has besides .*\.exp_avg.* and \d+ more\. It was saved by \S+; train with"):
        sgd.run(1, resume=tmp_path / "state")
    wide = auto_parallel(
        sbp.build("tiny-gpt2", vocabulary=300, dropout=0.1), cluster, batch=4, sequence=8, mesh=(2,), time_limit=5
    )
    with pytest.raises(
        CheckpointError, match=r"wte.weight is f32\[300,\d+\] here, but f32\[256,\d+\] in the checkpoint"
    ):
        wide.run(1, resume=tmp_path / "state")
    with pytest.raises(PlanError, match="save_every says how often"):
        plan.run(1, save_every=1)


def test_the_command_saves_and_resumes(plans, tmp_path, capsys):
    for mesh in ((2, 2), (3,)):
        plans[mesh].save(tmp_path / f"{len(mesh)}.json")
    first, second, state = str(tmp_path / "2.json"), str(tmp_path / "1.json"), str(tmp_path / "state")
    assert command(["run", first, "--steps", "3", "--float64", "--json", "--save", state, "--save-every", "2"]) == 0
    captured = capsys.readouterr()
    assert f"The state after 3 steps is in {state}." in captured.err
    options = ["--steps", "2", "--float64", "--json", "--compare", "--resume", state, "--save", state]
    assert command(["run", second, *options]) == 0
    captured = capsys.readouterr()
    resumed = json.loads(captured.out)
    assert resumed["first_step"] == 3 and resumed["largest_relative_difference"] < 1e-12
    assert "step 5 of 5" in captured.err
    numpy.testing.assert_allclose(resumed["losses"], plans[(1,)].run(5, floating="f64").losses[3:], rtol=1e-12)
    assert command(["run", first, "--resume", str(tmp_path / "none")]) == 2
    assert "there is no checkpoint in" in capsys.readouterr().err
    assert command(["run", first, "--save-every", "2"]) == 2
    assert "give --save FOLDER too" in capsys.readouterr().err
