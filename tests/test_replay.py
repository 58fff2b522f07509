"""Replay: pinned layouts are Megatron's, prices add up, and published step times come out."""

from dataclasses import replace
from pathlib import Path

import pytest

from sbp.errors import ClusterError, PlanError
from sbp.mesh import Mesh
from sbp.models.gpt import GPTConfig
from sbp.models.llama import LlamaConfig
from sbp.planner.cluster import Cluster
from sbp.planner.cost import AnalyticCostModel
from sbp.planner.frameworks import Framework, frameworks
from sbp.planner.replay import Configuration, for_ranks, predict
from sbp.planner.replay.prediction import model_flops
from sbp.planner.replay.program import program
from sbp.planner.replay.rows import configuration_of, read_rows
from sbp.planner.replay.step import closed_form_seconds, step_pipeline
from sbp.planner.replay.validation import validation

RUNS = Path(__file__).resolve().parent.parent.parent / "shared" / "published_runs" / "runs.csv"

SELENE = {
    "gpu": "A100-80G-SXM",
    "gpus_per_node": "8",
    "inter_node_bw": "25",
    "precision": "fp16-mixed",
    "model_family": "gpt",
    "vocab": "51200",
    "seq_len": "2048",
    "cp": "1",
    "ep": "1",
    "zero_stage": "0",
    "source": "",
}

# Narayanan et al., SC'21, Table 1 (Megatron-LM 2021), and Korthikanti et al. 2022, Table 5 (Megatron-LM 2022):
# layers, hidden, heads, tp, pp, chunks, dp, micro-batch, global batch, recompute, measured seconds.
PUBLISHED = {
    "SC'21 18B": ("Megatron-LM 2021", 40, 6144, 48, 8, 1, 1, 32, 8, 1024, "full", 9.3993),
    "SC'21 145B": ("Megatron-LM 2021", 80, 12288, 96, 8, 8, 2, 24, 2, 2304, "full", 24.8174),
    "SC'21 1T": ("Megatron-LM 2021", 128, 25600, 160, 8, 64, 1, 6, 1, 3072, "full", 102.63),
    "Korthikanti 22B": ("Megatron-LM 2022", 48, 6144, 64, 8, 1, 1, 1, 4, 4, "full", 1.42),
    "Korthikanti 175B": ("Megatron-LM 2022", 96, 12288, 96, 8, 8, 3, 1, 1, 64, "selective", 13.75),
    "Korthikanti 530B": ("Megatron-LM 2022", 105, 20480, 128, 8, 35, 3, 1, 1, 280, "full", 49.05),
}


def row(framework, layers, hidden, heads, tp, pp, chunks, dp, micro_batch, global_batch, recompute, seconds):
    """A row of published_runs as text."""
    numbers = {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": heads,
        "ffn_hidden": 4 * hidden,
        "gpus": tp * pp * dp,
        "tp": tp,
        "pp": pp,
        "vpp": chunks,
        "dp": dp,
        "micro_batch": micro_batch,
        "global_batch": global_batch,
        "step_time_s": seconds,
        "sequence_parallel": int(recompute == "selective"),
    }
    return (
        SELENE
        | {name: str(value) for name, value in numbers.items()}
        | {"framework": framework, "recompute": recompute}
    )


def gpt(layers=4, hidden=512, heads=8, vocabulary=1024, dropout=0.1):
    return GPTConfig(layers, heads, hidden, vocabulary, 256, dropout=dropout)


def run(**changes):
    """A small configuration on one node."""
    given = {
        "tp": 2,
        "pp": 2,
        "dp": 2,
        "micro_batch": 2,
        "global_batch": 32,
        "framework": "megatron-2022",
        "model": gpt(),
        "sequence": 256,
    }
    given |= changes
    ranks = given["tp"] * given["pp"] * given["dp"] * given.get("cp", 1)
    cluster = given.pop("cluster", None) or for_ranks(Cluster.preset("a100-80g"), ranks)
    framework = given.pop("framework")
    traits = Framework.named(framework) if isinstance(framework, str) else framework
    return Configuration(cluster=cluster, framework=traits, **given)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_step_times_come_out(name):
    values = row(*PUBLISHED[name])
    prediction = predict(configuration_of(values))
    assert prediction.step_seconds == pytest.approx(float(values["step_time_s"]), rel=0.09)


def test_the_mean_error_of_the_published_table_is_small():
    errors = [predict(configuration_of(row(*values))).step_seconds / values[-1] - 1 for values in PUBLISHED.values()]
    assert sum(map(abs, errors)) / len(errors) < 0.045


def collectives(found, part, phase):
    return [
        kernel.kind
        for kernel in found.kernels[part, phase]
        if kernel.kind in ("all_reduce", "all_gather", "reduce_scatter")
    ]


@pytest.mark.parametrize("model", [gpt(), LlamaConfig(2, 8, 8, 512, 1024, 1024, 256)], ids=["gpt", "llama"])
def test_pinned_layouts_communicate_as_megatron_does(model):
    whole = program(replace(model, layers=1), 2, False, 2, 256, "mixed")
    assert collectives(whole, "layer", "forward") == ["all_reduce"] * 2  # Shoeybi et al. 2019, figure 4
    assert collectives(whole, "layer", "backward") == ["all_reduce"] * 2
    split = program(replace(model, layers=1), 2, True, 2, 256, "mixed")
    assert (
        collectives(split, "layer", "forward") == ["all_gather", "reduce_scatter"] * 2
    )  # Korthikanti et al., figure 5
    large = [k.kind for k in split.kernels["layer", "backward"] if k.kind == "reduce_scatter"]
    assert len(large) == 2


def test_products_of_a_layer_are_those_of_the_model():
    hidden, wide, tokens, ranks = 512, 2048, 2 * 256, 2
    found = program(replace(gpt(), layers=1), ranks, False, 2, 256, "mixed")
    flops = {
        phase: sum(
            2 * k.sizes[0] * k.sizes[1] * k.sizes[2] * k.sizes[3]
            for k in found.kernels["layer", phase]
            if k.kind == "product"
        )
        for phase in ("forward", "backward")
    }
    expected = 2 * tokens * (4 * hidden**2 + 2 * hidden * wide) / ranks
    assert flops["forward"] == expected
    assert flops["backward"] == 2 * expected


def test_parameters_are_counted_once_and_split():
    model = replace(gpt(), layers=1)
    one, two = (program(model, ranks, False, 2, 256, "mixed") for ranks in (1, 2))
    per_layer = 12 * 512**2 + 13 * 512
    assert one.parameters["layer"] == per_layer
    assert one.parameters["embedding"] == (1024 + 256) * 512
    assert one.tied == 1024 * 512 == 2 * two.tied
    assert two.parameters["layer"] == 12 * 512**2 // 2 + (3 + 4) * 512 // 2 + 6 * 512


def test_only_what_the_head_reads_is_tied():
    long = program(replace(gpt(vocabulary=128), layers=1, positions=4096), 1, False, 1, 4096, "mixed")
    assert long.tied == 128 * 512  # not the larger table of positions
    llama = program(LlamaConfig(1, 8, 8, 512, 1024, 1024, 256), 1, False, 1, 256, "mixed")
    assert llama.tied == 0 and llama.parameters["head"] == 1024 * 512 + 512


def test_the_simulated_step_is_that_of_the_closed_form():
    for changes in ({"pp": 1, "tp": 4}, {"pp": 4, "tp": 1, "dp": 2}, {"schedule": "interleaved:2", "global_batch": 16}):
        given = run(**changes)
        expected = closed_form_seconds(step_pipeline(given, AnalyticCostModel(given.cluster)))
        assert predict(given).step_seconds == pytest.approx(expected, rel=0.03)


def test_zero_bubble_runs_the_same_work_with_less_waiting():
    given = {"pp": 4, "tp": 1, "dp": 1, "model": gpt(layers=8, hidden=1024), "global_batch": 16}
    plain, split = (predict(run(**given, schedule=name)) for name in ("1f1b", "zero-bubble"))
    assert split.step.busy_seconds[:, 0].sum() == pytest.approx(plain.step.busy_seconds[:, 0].sum())
    assert split.step.bubble_fraction < 0.8 * plain.step.bubble_fraction
    assert split.step_seconds < plain.step_seconds


def test_recompute_costs_time_and_saves_memory():
    none, selective, full = (
        predict(run(recompute=kind, model=gpt(hidden=1024))) for kind in ("none", "selective", "full")
    )
    assert none.step_seconds < selective.step_seconds < full.step_seconds
    assert none.peak_bytes > selective.peak_bytes > full.peak_bytes
    assert none.hfu == pytest.approx(none.mfu)
    assert full.hfu == pytest.approx(full.mfu * 4 / 3, rel=0.1)


def test_context_parallel_ranks_share_the_sequence():
    """Each has a part of the tokens, and attends to all of them; parameters are replicated over them."""
    long = {"model": gpt(heads=16, hidden=1024), "sequence": 32768, "tp": 1, "pp": 1, "micro_batch": 1, "zero": 1}
    one = predict(run(**long, dp=1, cp=1, global_batch=1, framework="megatron-core"))
    four = predict(run(**long, dp=1, cp=4, global_batch=1, framework="megatron-core"))
    assert 3.0 < one.step_seconds / four.step_seconds < 4.0
    assert four.memory[0].activations == pytest.approx(one.memory[0].activations / 4)
    assert four.memory[0].optimizer == one.memory[0].optimizer / 4
    assert four.mfu > 0.75 * one.mfu


def test_zero_shares_state_by_level():
    memory = [predict(run(tp=1, pp=1, dp=8, zero=level)).memory[0] for level in range(4)]
    assert [m.optimizer for m in memory] == [memory[0].optimizer] + [memory[0].optimizer / 8] * 3
    assert [m.gradients for m in memory] == [memory[0].gradients] * 2 + [memory[0].gradients / 8] * 2
    assert [m.weights for m in memory] == [memory[0].weights] * 3 + [memory[0].weights / 8]


def test_activations_per_layer_are_those_of_the_formula():
    """s b h (34 + 5 a s / h) bytes (Korthikanti et al. 2022, equation 2), less what dropout's seeds save: two masks."""
    model, batch, sequence, hidden, heads = gpt(layers=8), 2, 256, 512, 8
    given = run(model=model, tp=1, pp=1, dp=1, global_batch=2, framework="megatron-2022")
    found = predict(given).memory[0].activations
    formula = sequence * batch * hidden * (34 + 5 * heads * sequence / hidden) * 8
    assert found == pytest.approx(formula, rel=0.15)


def test_stages_hold_as_many_micro_batches_as_the_schedule_says():
    memory = predict(run(pp=4, tp=1, dp=1, model=gpt(layers=4), global_batch=16, recompute="full")).memory
    middle = [m.activations for m in memory[1:]]
    assert [a / middle[-1] for a in middle] == [3, 2, 1]


def test_model_flops_are_those_of_the_paper():
    """96 B s l h^2 (1 + s / 6h + V / 16lh) with full recompute (Narayanan et al. 2021, equation 3)."""
    given = configuration_of(row(*PUBLISHED["SC'21 145B"]))
    batch, s, layers, h, vocabulary = 2304, 2048, 80, 12288, 51200
    full = 96 * batch * s * layers * h**2 * (1 + s / (6 * h) + vocabulary / (16 * layers * h))
    assert predict(given).hardware_flops == pytest.approx(full, rel=1e-12)
    assert model_flops(given) < full


def test_slower_hosts_decide_small_layers_only():
    slow = replace(Framework.named("megatron-2022"), forward_host_us=60.0)
    small = run(model=gpt(hidden=64))
    large = run(model=gpt(hidden=8192, heads=64), micro_batch=16, global_batch=64)
    slower = [predict(replace(g, framework=slow)).step_seconds / predict(g).step_seconds for g in (small, large)]
    assert slower[0] > 1.3
    assert slower[1] == pytest.approx(1.0, abs=1e-9)


def test_a_layer_of_uneven_stages_goes_first_and_embeddings_can_count():
    assert run(model=gpt(layers=7), pp=4, tp=1, dp=1).layers_of_chunk == (2, 2, 2, 1)
    counted = run(model=gpt(layers=10), pp=4, tp=1, dp=1, framework="megatron-deepspeed")
    assert counted.layers_of_chunk == (2, 3, 3, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cluster": Cluster.preset("a100-80g")}, "= 4 ranks, but"),
        ({"global_batch": 33}, "must be a multiple of 4"),
        ({"model": gpt(layers=1)}, "cannot be cut into 2 stages"),
        ({"model": gpt(heads=7, hidden=7 * 64)}, "does not divide the 7 heads"),
        ({"schedule": "interleaved:3", "model": gpt(layers=7)}, "do not divide into 2 stages x 3 chunks"),
        ({"schedule": "often"}, "no schedule is called 'often'"),
        ({"recompute": "some"}, "recompute must be one of"),
        ({"cp": 3, "dp": 1, "tp": 1}, "does not divide into 3 parts"),
        ({"micro_batch": 0}, "micro_batch must be a whole number"),
    ],
)
def test_what_cannot_be_replayed_is_said(changes, message):
    given = {"dp": 1} | changes if "cluster" in changes else changes
    with pytest.raises(PlanError, match=message):
        run(**given)


def test_frameworks_are_known_by_name():
    assert {"megatron-2021", "megatron-2022", "megatron-deepspeed", "fsdp-llm-foundry", "nemo"} <= set(frameworks())
    assert all(Framework.named(name).source for name in frameworks())
    with pytest.raises(ClusterError, match="did you mean megatron-2021"):
        Framework.named("megatron-201")
    with pytest.raises(ClusterError, match="attention must be one of stored, fused"):
        replace(Framework.named("nemo"), attention="none")
    with pytest.raises(ClusterError, match="pointwise_traffic must be a finite number"):
        replace(Framework.named("nemo"), pointwise_traffic=-1.0)


def test_ranks_fill_nodes():
    cluster = Cluster.preset("a100-80g")
    assert (for_ranks(cluster, 4).nodes, for_ranks(cluster, 4).devices_per_node) == (1, 4)
    assert for_ranks(cluster, 24).nodes == 3
    with pytest.raises(PlanError, match="do not fill nodes"):
        for_ranks(cluster, 12)


def test_a_file_is_validated_row_by_row(tmp_path):
    rows = [row(*values) | {"id": f"row{at}", "source": "a paper"} for at, values in enumerate(PUBLISHED.values())]
    rows[0] |= {"model_family": "cnn"}
    rows[1] |= {"framework": "unheard of"}
    names = list(rows[2])
    lines = [",".join(names), *(",".join(values.get(name, "") for name in names) for values in rows)]
    path = tmp_path / "runs.csv"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    data = validation(read_rows(path)).to_json()
    assert [entry["reason"] for entry in data["rows"][:2]] == [
        "the model family 'cnn' is not replayed", "the framework 'unheard of' is not known",
    ]  # fmt: skip
    assert [entry["error"] is None for entry in data["rows"]] == [True, True, False, False, False, False]
    third = data["rows"][2]
    assert third["error"] == pytest.approx(third["predicted_seconds"] / third["measured_seconds"] - 1)
    assert data["summary"]["all"]["rows"] == 6 and data["summary"]["all"]["replayed"] == 4


def test_a_file_without_the_columns_is_refused(tmp_path):
    path = tmp_path / "other.csv"
    path.write_text("a,b\n1,2\n", encoding="utf-8")
    with pytest.raises(PlanError, match="has no column global_batch, gpu|has no column gpu"):
        read_rows(path)
    with pytest.raises(PlanError, match="cannot read"):
        read_rows(tmp_path / "none.csv")


@pytest.mark.skipif(not RUNS.exists(), reason="../shared/published_runs is not there")
def test_core_rows_are_within_three_percent():
    rows = [
        r
        for r in read_rows(RUNS)
        if r.id.startswith(("megatron_sc21_t1", "megatron_sc21_t2_ptdp", "korthikanti_t5", "korthikanti_dp8"))
    ]
    assert len(rows) == 26
    errors = [
        closed_form_seconds(step_pipeline(r.configuration, AnalyticCostModel(r.configuration.cluster))) / r.seconds - 1
        for r in rows
    ]
    assert sum(map(abs, errors)) / len(errors) < 0.03


def test_meshes_of_tensor_parallel_ranks_are_those_of_the_cluster():
    """The collectives of tp are priced where its ranks lie: inside a node, or over two."""
    inside, over = run(tp=8, pp=1, dp=2, model=gpt(heads=16)), run(tp=16, pp=1, dp=1, model=gpt(heads=16))
    assert inside.ranks == over.ranks == 16
    model = AnalyticCostModel(inside.cluster)
    near, far = (model.collective_seconds("all_reduce", Mesh((1, 16 // t, t)), 2, 1e7) for t in (8, 16))
    assert far > near
