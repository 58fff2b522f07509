"""PyTorch's DTensor: every placement strategy that it lists is admitted by our rules or wrong on real shards."""

import importlib.util
import sys
from collections import Counter
from pathlib import Path

import pytest

from sbp.operator import REGISTRY
from sbp.rule import bind, parse_rule

torch = pytest.importorskip("torch")
if not torch.__version__.startswith("2.13"):
    pytest.skip("asks PyTorch's internals, written for 2.13", allow_module_level=True)
distributed = pytest.importorskip("torch.distributed")
if not distributed.is_available():
    pytest.skip("this PyTorch is built without torch.distributed", allow_module_level=True)


@pytest.fixture(scope="module")
def dtensor_rules():
    path = Path(__file__).parents[1] / "benchmarks" / "dtensor_rules.py"
    spec = importlib.util.spec_from_file_location("dtensor_rules", path)
    module = sys.modules["dtensor_rules"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["dtensor_rules"]


@pytest.fixture(params=[2, 3])
def ranks(request):
    yield request.param
    if distributed.is_initialized():
        distributed.destroy_process_group()


def test_every_strategy_is_admitted_or_wrong(dtensor_rules, ranks):
    rows = dtensor_rules.compare(ranks=ranks)
    missing = [f"{row.operator}{row.case}: {row.strategy}" for row in rows if row.verdict == "missing"]
    assert not missing, "\n".join(missing)
    verdicts = Counter(row.verdict for row in rows)
    assert len({row.aten for row in rows}) >= 95 and verdicts["admitted"] >= 1000
    assert all(row.operator == "cast" for row in rows if row.verdict == "reason")
    print({verdict: verdicts[verdict] for verdict in sorted(verdicts)})


def test_strategies_that_are_wrong(dtensor_rules, ranks):
    """DTensor passes sums of truth values, and scans along a split dimension if that is counted from the end."""
    rows = dtensor_rules.compare(["cast", "cumsum", "sum"], ranks)
    wrong = {(row.operator, row.strategy) for row in rows if row.verdict == "wrong"}
    assert {("cast", "P(sum) -> P(sum)"), ("sum", "P(sum) -> P(sum)"), ("cumsum", "S(1) -> S(1)")} <= wrong


def test_signatures_that_only_our_rules_have(dtensor_rules, ranks):
    """Output channels of a convolution, whole groups of channels, P(max) through a sum, pieces of a triangle."""
    more = dtensor_rules.ours_only(["convolution", "group_norm", "add", "tril", "embedding"], ranks)
    assert all(more[name] > 0 for name in ("convolution", "group_norm", "add", "tril", "embedding"))
    assert dtensor_rules.ours_only(["relu", "matmul"], ranks).total() == 0


def test_a_rule_that_lacks_a_signature_is_noticed(dtensor_rules, ranks, monkeypatch):
    """If no Partial passed a negation, the sums that DTensor lets pass would be found missing."""
    neg = REGISTRY["neg"]
    assert {row.verdict for row in dtensor_rules.compare(["neg"], ranks)} == {"admitted", "foreign"}
    poorer = bind(parse_rule(neg.rule), [t.shape for t in neg.cases[0].types])
    monkeypatch.setattr(type(neg), "bind", lambda op, types, attributes: poorer)
    found = dtensor_rules.compare_case(neg, neg.cases[0], dtensor_rules.start(ranks))
    assert {"P(sum) -> P(sum)", "P(max) -> P(min)"} & {row.strategy for row in found if row.verdict == "missing"}
