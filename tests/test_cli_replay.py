"""`sbp predict` and `sbp validate`, from their words to their data."""

import json

import pytest

from sbp.cli.main import run

MODEL = ["--layers", "8", "--hidden", "1024", "--heads", "16", "--seq", "512", "--vocab", "1000"]
SPREAD = ["--tp", "2", "--pp", "2", "--dp", "2", "--micro-batch", "2", "--global-batch", "32"]
COMMAND = ["predict", *MODEL, *SPREAD, "--cluster", "a100-80g"]

# Korthikanti et al. 2022 (arXiv:2205.05198), Table 5, and a row that lacks what is needed.
RUNS = """\
id,source,model_family,layers,hidden,heads,ffn_hidden,vocab,seq_len,precision,gpu,gpus,gpus_per_node,inter_node_bw,tp,pp,\
vpp,dp,zero_stage,sequence_parallel,recompute,micro_batch,global_batch,step_time_s,framework
22B,Korthikanti,gpt,48,6144,64,24576,51200,2048,bf16,A100-80G,8,8,25,8,1,1,1,0,1,selective,4,4,1.1,Megatron-LM 2022
175B,Korthikanti,gpt,96,12288,96,49152,51200,2048,bf16,A100-80G,64,8,25,8,8,3,1,0,0,full,1,64,18.13,Megatron-LM 2022
none,Korthikanti,gpt,96,,96,49152,51200,2048,bf16,A100-80G,64,8,25,8,8,3,1,0,0,full,1,64,18.13,Megatron-LM 2022
"""


def data_of(capsys, command):
    assert run(command) == 0
    return json.loads(capsys.readouterr().out)


def test_predict_gives_data(capsys):
    found = data_of(capsys, [*COMMAND, "--json"])
    assert found["step_seconds"] > 0 and 0 < found["mfu"] < 1 and found["feasible"] is True
    assert found["micro_batches"] == 8 and found["layers_per_chunk"] == [4, 4]
    assert found["tokens_per_second"] == pytest.approx(32 * 512 / found["step_seconds"])
    assert found["peak_bytes"] == max(stage["total"] for stage in found["memory_per_stage"])
    for stage in found["memory_per_stage"]:
        assert stage["total"] == pytest.approx(sum(value for name, value in stage.items() if name != "total"))


def test_predict_gives_a_table_and_a_trace(capsys, tmp_path):
    trace = tmp_path / "trace.json"
    assert run([*COMMAND, "--schedule", "interleaved:2", "--trace", str(trace)]) == 0
    text = capsys.readouterr().out
    assert "MFU, HFU" in text and "peak memory" in text and "GiB per device, by stage" in text
    events = json.loads(trace.read_text(encoding="utf-8"))
    events = events["traceEvents"] if isinstance(events, dict) else events
    assert any(event.get("name") == "layers" for event in events)


def test_equal_words_give_equal_data(capsys):
    assert data_of(capsys, [*COMMAND, "--json"]) == data_of(capsys, [*COMMAND, "--json"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--cluster", "a1000"], "neither a cluster preset nor a file"),
        (["--framework", "megatron"], "did you mean megatron-"),
        (["--dp", "3"], "do not fill nodes"),
        (["--heads", "15"], "does not divide into 15 heads"),
        (["--layers", "1"], "cannot be cut into 2 stages"),
        (["--global-batch", "30"], "it must be a multiple of 4"),
        (["--schedule", "interleaved:3"], "do not divide into 2 stages x 3 chunks"),
        (["--schedule", "never"], "no schedule is called"),
        (["--kv-heads", "4"], "--kv-heads is for --model llama"),
        (["--tp", "0"], "Invalid value for '--tp'"),
        (["--trace", "/nowhere/trace.json"], "/nowhere/trace.json"),
    ],
)
def test_bad_words_are_answered_in_one_paragraph(capsys, words, message):
    assert run([*COMMAND, *words]) == 2
    said = capsys.readouterr().err
    assert message in said and "Traceback" not in said and "fault of sbp" not in said


def test_validate_predicts_every_row(capsys, tmp_path):
    path = tmp_path / "runs.csv"
    path.write_text(RUNS, encoding="utf-8")
    found = data_of(capsys, ["validate", str(path), "--json", "--quiet"])
    assert [row["id"] for row in found["rows"]] == ["22B", "175B", "none"]
    for row in found["rows"][:2]:
        assert row["error"] == pytest.approx(row["predicted_seconds"] / row["measured_seconds"] - 1)
        assert abs(row["error"]) < 0.06 and row["reason"] is None
    last = found["rows"][2]
    assert last["error"] is None and last["predicted_seconds"] is None
    assert last["reason"] == "the row does not state hidden"
    total = found["summary"]["all"]
    assert (total["rows"], total["replayed"]) == (3, 2)
    errors = [abs(row["error"]) for row in found["rows"][:2]]
    assert total["mean_absolute_error"] == pytest.approx(sum(errors) / 2)
    assert found["summary"]["sources"]["Korthikanti"]["replayed"] == 2


def test_validate_shows_a_table_beside_the_data(capsys, tmp_path):
    path = tmp_path / "runs.csv"
    path.write_text(RUNS, encoding="utf-8")
    assert run(["validate", str(path)]) == 0
    assert "by source" in (shown := capsys.readouterr().out) and "baseline" in shown


def test_validate_refuses_what_is_no_table(capsys, tmp_path):
    assert run(["validate", str(tmp_path / "none.csv")]) == 2
    assert "cannot read" in capsys.readouterr().err
    path = tmp_path / "other.csv"
    path.write_bytes(b"\xff\xfe\x00")
    assert run(["validate", str(path)]) == 2
    assert "is no CSV text" in capsys.readouterr().err
