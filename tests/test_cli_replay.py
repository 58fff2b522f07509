"""`sbp predict` and `sbp validate`, from their words to their data."""

import csv
import io
import json
import random

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
        (["--global-batch", "400000000000"], "use a smaller global batch"),
        (["--dp", "100000000", "--global-batch", "400000000"], "ranks are more than the 262144"),
        (["--layers", str(10**32), "--json"], "layers must be a whole number from 1 to"),
        (["--seq", str(10**20)], "sequence must be a whole number from 1 to"),
        (["--hidden", str(1 << 38)], "2**60 bytes"),
        (["--tp", "8", "--heads", "4"], "tp 8 does not divide the 4 heads"),
        (["--cp", "3"], "does not divide into 3 parts"),
        (["--schedule", "interleaved:0"], "only interleaved takes a number, of chunks"),
        (["--schedule", "1f1b:3"], "only interleaved takes a number"),
        (["--model", "llama", "--kv-heads", "32"], "num_kv_heads 32"),
    ],
)
def test_bad_words_are_answered_in_one_paragraph(capsys, words, message):
    assert run([*COMMAND, *words]) == 2
    said = capsys.readouterr().err
    assert message in said and "Traceback" not in said and "fault of sbp" not in said


@pytest.mark.parametrize(
    "words",
    [["--vocab", "1"], ["--seq", "1"], ["--hidden", "16"], ["--tp", "16", "--devices-per-node", "64"], ["--cp", "2"]],
)
def test_small_and_odd_sizes_are_predicted(capsys, words):
    found = data_of(capsys, [*COMMAND, *words, "--json"])
    assert found["step_seconds"] > 0 and 0 < found["mfu"] < 1 and found["peak_bytes"] > 0


def test_the_table_states_every_axis(capsys):
    assert run([*COMMAND, "--cp", "2"]) == 0
    assert "16 = tp 2 x pp 2 x dp 2 x cp 2 of" in capsys.readouterr().out


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
    path.write_text(RUNS.replace("heads,", "layers,", 1), encoding="utf-8")
    assert run(["validate", str(path)]) == 2
    assert "has the column layers twice" in capsys.readouterr().err


GOOD = {
    "id": "good", "source": "S", "model_family": "gpt", "layers": "4", "hidden": "512", "heads": "8", "kv_heads": "8",
    "ffn_hidden": "2048", "vocab": "1000", "seq_len": "128", "precision": "bf16", "gpu": "A100-80G", "gpus": "8",
    "gpus_per_node": "8", "inter_node_bw": "25", "tp": "2", "pp": "2", "vpp": "1", "dp": "2", "cp": "1", "ep": "1",
    "zero_stage": "0", "sequence_parallel": "0", "recompute": "none", "micro_batch": "1", "global_batch": "8",
    "peak_mem_GB": "3", "step_time_s": "1.1", "framework": "Megatron-LM 2022", "notes": "",
}  # fmt: skip

ODD = ("", "nan", "inf", "-1", "0", "0.5", "1e9", "1e20", "1e400", "1e-300", "abc", "\u00b2", "1,5", "((", "  7 ")


def validated(capsys, path, text):
    path.write_text(text, encoding="utf-8", newline="")
    found = data_of(capsys, ["validate", str(path), "--json", "--quiet"])
    for row in found["rows"]:
        assert set(row) >= {"id", "source", "measured_seconds", "predicted_seconds", "error"}
        if row["error"] is None:
            assert row["reason"], row
        else:
            assert row["error"] == pytest.approx(row["predicted_seconds"] / row["measured_seconds"] - 1)
    return {row["id"]: row for row in found["rows"]}


def table(*rows):
    text = io.StringIO()
    writer = csv.DictWriter(text, list(GOOD))
    writer.writeheader()
    writer.writerows({**GOOD, **row} for row in rows)
    return text.getvalue()


def test_odd_numbers_in_a_row_do_not_stop_the_others(capsys, tmp_path):
    odd = [{"id": f"{name}={value}", name: value} for name in GOOD if name != "id" for value in ODD]
    noise = random.Random(5)
    odd += [
        {"id": f"noise {at}", **{name: noise.choice(ODD) for name in noise.sample(list(GOOD)[1:], 3)}}
        for at in range(1500)
    ]
    found = validated(capsys, tmp_path / "odd.csv", table(*odd, {}))
    assert len(found) == len(odd) + 1 and found["good"]["error"] is not None
    for name in ("layers", "hidden", "vocab", "gpus", "tp", "dp", "global_batch", "step_time_s"):
        for value in ("nan", "inf", "-1", "1e20", "abc", "0"):
            assert name in found[f"{name}={value}"]["reason"], (name, value)
    unmeasured = found["step_time_s="]
    assert unmeasured["predicted_peak_bytes"] > 0 and unmeasured["reason"] == "its step time was not measured"


def test_rows_whose_text_is_damaged_are_said(capsys, tmp_path):
    """Fields missing, fields too many, no name, a field too long, and a quote that is never closed."""
    damaged = f'short,S,gpt\nlong{",1" * 50}\n,S,gpt\n{"x" * 200_000},1\n"open,1\n2,3\n'
    found = validated(capsys, tmp_path / "damaged.csv", table({}) + damaged)
    reasons = {name: row["reason"] for name, row in found.items()}
    assert reasons["good"] is None
    assert reasons["short"] == "neither time nor memory was measured"
    assert reasons["long"] == f"has {51 - len(GOOD)} more fields than there are columns"
    assert set(reasons) == {"good", "short", "long", "line 5", "line 6", "line 8"}
    assert "field larger than field limit" in reasons["line 6"] and "unexpected end" in reasons["line 8"]


def test_a_file_may_begin_with_a_byte_order_mark(capsys, tmp_path):
    assert validated(capsys, tmp_path / "mark.csv", "\ufeff" + table({}))["good"]["error"] is not None


def test_a_file_without_rows_is_said(capsys, tmp_path):
    path = tmp_path / "header.csv"
    path.write_text(table(), encoding="utf-8")
    assert run(["validate", str(path), "--json", "--quiet"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["rows"] == [] and "the files have no rows" in said.err
