"""The prover: wrong rules are caught, right ones pass, what is left out is listed; all rules of the library hold."""

import copy
import dataclasses
import json
from itertools import product

import numpy
import pytest
from own_operators import OWN

import sbp
from sbp.check_rules import FAST_MESHES, Report, case_text, check_operator, check_rules, require_sound
from sbp.cli.main import run
from sbp.errors import GraphError, LayoutError, MeshError, RuleError, SbpError
from sbp.layout import Broadcast, Layout, Partial, Split
from sbp.mesh import Mesh
from sbp.operator import REGISTRY, Case, Operator, parse_type
from sbp.shards import gather, scatter


def probe(kernel, rule, *types, attributes=None, ranges=None, localize=None, **options):
    op = Operator(kernel, rule, name="probe", **options)
    if localize:
        op.localize(localize)
    op.cases.append(Case(tuple(map(parse_type, types)), attributes or {}, ranges or {}))
    return op


def found(op, mesh=(2,)):
    report = check_operator(op, mesh)
    return {f.signature for f in report.unsound}, {f.signature for f in report.missing}


def test_a_right_rule_passes():
    report = check_operator(probe(lambda xp, x: xp.tanh(x), "... -> ...", "f32[4,6]", monotone="all"), (2,))
    assert report.sound and not report.missing and report.admitted == 5
    assert report.combinations == 6 * 6, "2 splits, B and 3 Partials on either side"


WRONG = {
    "abs is not linear": (lambda xp, x: xp.abs(x), "... -> ...", {"linear": "all"}, ["f32[4,6]"], {"P -> P"}),
    "a square is not monotone": (
        lambda xp, x: x * x,
        "... -> ...",
        {"monotone": "all"},
        ["f32[4]"],
        {"P(max) -> P(max)", "P(min) -> P(min)"},
    ),
    "a cumulative sum along a split dimension": (
        lambda xp, x: xp.cumsum(x, 1),
        "a b -> a b",
        {},
        ["f32[4,6]"],
        {"S(1) -> S(1)"},
    ),
    "a softmax over a split dimension": (
        lambda xp, x: xp.exp(x) / xp.exp(x).sum(1, keepdims=True),
        "a b -> a b",
        {},
        ["f32[4,6]"],
        {"S(1) -> S(1)"},
    ),
    "a mean that sums parts of unequal size": (lambda xp, x: x.mean(0), "a+ -> ", {}, ["f32[5]"], {"S(0) -> P"}),
    "a maximum that claims a sum": (lambda xp, x: x.max(0), "a+ b -> b", {}, ["f32[4,3]"], {"S(0) -> P"}),
    "a product, linear in both together": (
        lambda xp, x, y: x * y,
        "..., ... -> ...",
        {"linear": "all"},
        ["f32[4]", "f32[4]"],
        {"P, P -> P"},
    ),
    "a sum, linear in each alone": (
        lambda xp, x, y: x + y,
        "..., ... -> ...",
        {"linear": "each"},
        ["f32[4]", "f32[4]"],
        {"P, B -> P", "B, P -> P"},
    ),
    "a sum, monotone in both together": (
        lambda xp, x, y: x + y,
        "..., ... -> ...",
        {"monotone": "all"},
        ["f32[4]", "f32[4]"],
        {"P(max), P(max) -> P(max)", "P(min), P(min) -> P(min)"},
    ),
    "a shift is affine": (lambda xp, x: x + 1, "... -> ...", {"linear": "all"}, ["f32[4]"], {"P -> P"}),
    "a float-to-integer cast lets no sum pass": (
        lambda xp, x: x.astype("int64"),
        "... -> ...",
        {"linear": "all", "dtype": "i64"},
        ["f32[4]"],
        {"P -> P"},
    ),
    "a flip moves elements between shards": (lambda xp, x: x[::-1], "a -> a", {}, ["f32[6]"], {"S(0) -> S(0)"}),
    "a transpose that forgets to exchange": (
        lambda xp, x: x.T,
        "a b -> a b",
        {},
        ["f32[4,4]"],
        {"S(0) -> S(0)", "S(1) -> S(1)"},
    ),
    "positions are local on a shard": (
        lambda xp, x: x.argmax(0),
        "a> b -> b",
        {"dtype": "i64"},
        ["f32[6,8]"],
        {"S(0) -> P(max)"},
    ),
    "an index has no sum": (
        lambda xp, t, i: t[i],
        "n^, i -> i",
        {"linear": "i"},
        ["f32[7]", "i64[4]"],
        {"B, P -> P"},
    ),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.filterwarnings("ignore:Mean of empty slice", "ignore:invalid value encountered")
def test_a_wrong_rule_is_caught(name):
    kernel, rule, options, types, expected = WRONG[name]
    op = probe(kernel, rule, *types, ranges={"i": (0, 7)}, **options)
    assert found(op)[0] == expected
    assert found(op, (3,))[0] >= expected


MISSING = {
    "a maximum passes": (
        lambda xp, x: xp.tanh(x),
        "... -> ...",
        {},
        ["f32[4]"],
        {"P(max) -> P(max)", "P(min) -> P(min)"},
    ),
    "an exchanged maximum": (
        lambda xp, x: -x,
        "... -> ...",
        {"linear": "all"},
        ["f32[4]"],
        {"P(max) -> P(min)", "P(min) -> P(max)"},
    ),
    "a dimension too careful": (
        lambda xp, x: xp.cumsum(x, 1),
        "a^ b^ -> a^ b^",
        {"linear": "all"},
        ["f32[4,6]"],
        {"S(0) -> S(0)"},
    ),
    "a sum that is not marked": (
        lambda xp, x: x.sum(1),
        "a b^ -> a",
        {"linear": "all"},
        ["f32[4,6]"],
        {"S(1) -> P"},
    ),
    "a value that is never read": (
        lambda xp, x: xp.zeros_like(x),
        "... -> ...",
        {},
        ["f32[4]"],
        {"P -> B", "P(max) -> B", "P(min) -> B"},
    ),
    "a maximum of both": (
        lambda xp, x, y: xp.maximum(x, y),
        "..., ... -> ...",
        {"monotone": "each"},
        ["f32[4]", "f32[4]"],
        {"P(max), P(max) -> P(max)"},
    ),
}


@pytest.mark.parametrize("name", MISSING)
def test_what_no_rule_admits_is_listed(name):
    kernel, rule, options, types, expected = MISSING[name]
    op = probe(kernel, rule, *types, **options)
    assert found(op) == (set(), expected)
    op.reasons = {"*": "kept out on purpose"}
    report = check_operator(op, (2,))
    assert not report.missing and {f.signature for f in report.missing_with_reason} == expected
    assert {f.detail for f in report.missing_with_reason} == {"kept out on purpose"}


@pytest.mark.parametrize(("size", "admitted"), [(5, {"B", "P"}), (6, {"B", "P", "S(0)"})])
def test_repeated_elements_split_only_where_chunks_agree(size, admitted):
    """OneFlow's repeat_interleave: 5 elements are cut 3 and 2, which is 6 and 4 when doubled; 10 are cut 5 and 5."""
    op = probe(lambda xp, x: xp.repeat(x, 2, 0), lambda x: ("a -> (a two)", {"two": 2}), f"f32[{size}]", linear="all")
    op.reasons = {"P(*) -> P(*)": "not what is tested here"}
    assert found(op) == (set(), set())
    signatures = op.bind(op.cases[0].types, {}).signatures((2,))
    assert {str(signature.inputs[0][0]) for signature in signatures} == admitted


def test_a_reason_covers_only_what_it_names():
    op = probe(lambda xp, x: xp.tanh(x), "... -> ...", "f32[4]")
    op.reasons = {"P(max) -> *": "for the test"}
    report = check_operator(op, (2,))
    assert [f.signature for f in report.missing] == ["P(min) -> P(min)"]
    assert [f.signature for f in report.missing_with_reason] == ["P(max) -> P(max)"]


def test_views_are_searched_on_two_axes():
    """(8, 4) -> (2, 4, 4) on 2x2 admits (S(0), S(0)) -> (S(0), S(1)); a rule without the compound misses it."""

    def reshaped(xp, x, *, shape):
        return x.reshape(shape)

    def local(attributes, inputs, outputs):
        return {"shape": outputs[0].shape}

    full = lambda x, shape: ("(a b) c -> a b c", {"a": 2})  # noqa: E731
    careful = lambda x, shape: ("(a b^) c -> a b^ c", {"a": 2})  # noqa: E731
    wanted = "(S(0), S(0)) -> (S(0), S(1))"
    for rule, expected in ((full, set()), (careful, {wanted})):
        op = probe(reshaped, rule, "f32[8,4]", attributes={"shape": (2, 4, 4)}, localize=local, linear="all")
        op.reasons = {"P(*) -> P(*)": "not what is tested here"}
        unsound, missing = found(op, (2, 2))
        assert not unsound and missing == expected
        assert found(op, (2,)) == (set(), set())


def test_localize_is_checked():
    """Attributes that should differ by rank and do not: a mask that starts at row 0 on every rank."""

    def triangle(xp, x, *, offset=0):
        return xp.tril(x, offset)

    right = lambda attributes, inputs, outputs: {"offset": inputs[0].offset[0] - inputs[0].offset[1]}  # noqa: E731
    assert found(probe(triangle, "a b -> a b", "f32[4,6]", localize=right))[0] == set()
    assert found(probe(triangle, "a b -> a b", "f32[4,6]"))[0] == {"S(0) -> S(0)", "S(1) -> S(1)"}


def test_empty_shards_are_part_of_the_proof():
    """Three rows on two by two ranks: a kernel that cannot take an empty shard is unsound, unless its rule says so."""
    lowest = lambda xp, x: x.min(0)  # noqa: E731
    unsound, _ = found(probe(lowest, "a< b -> b", "f32[3,2]"), (2, 2))
    assert unsound == {"(S(0), S(0)) -> (P(min), P(min))"}
    assert found(probe(lowest, "a^ b -> b", "f32[3,2]"), (2, 2))[0] == set()


@pytest.mark.parametrize(
    ("kernel", "rule", "types", "says"),
    [
        (lambda xp, x: x.sum(0), "a b -> a b", ["f32[4,6]"], "makes float64[6] where the rule says f32[4,6]"),
        (lambda xp, x: x.astype("int32"), "... -> ...", ["f32[4]"], "makes int32[4] where the rule says f32[4]"),
        (lambda xp, x: xp.log(x), "... -> ...", ["f32[40]"], "give the case `ranges` inside the operator's domain"),
        (lambda xp, x: (x,), "a -> a, a", ["f32[4]"], "gives 1 results, the rule 2"),
    ],
)
def test_the_unsharded_result_is_checked_first(kernel, rule, types, says):
    op = probe(kernel, rule, *types, outputs=("a", "b")[: rule.count(",") + 1])
    (finding,) = check_operator(op, (2,)).unsound
    assert finding.signature == "unsharded" and says in finding.detail


def test_a_kernel_that_writes_its_input_is_caught():
    def kernel(xp, x):
        x += 1
        return x

    (finding,) = check_operator(probe(kernel, "... -> ...", "f32[4]"), (2,)).unsound
    assert "unsharded, the kernel fails: ValueError" in finding.detail and "read-only" in finding.detail


def test_an_operator_without_cases_is_refused():
    with pytest.raises(RuleError, match="operator probe has no example calls"):
        check_operator(Operator(lambda xp, x: x, "... -> ...", name="probe"), (2,))
    with pytest.raises(MeshError, match="at least 2 ranks"):
        check_rules(["matmul"], meshes=((1,),))
    with pytest.raises(GraphError, match="unknown operator"):
        check_rules(["matmull"])


def test_the_same_call_reports_the_same():
    assert check_rules(["matmul", "split"]).to_json() == check_rules(["matmul", "split"]).to_json()


def test_every_rule_of_the_library_is_sound_and_complete():
    """On two ranks; `sbp check-rules` tries three ranks and two by two as well."""
    light = [name for name in OWN if len(REGISTRY[name].input_names) <= 3]
    assert len(light) >= 90
    report = check_rules(light, FAST_MESHES)
    require_sound(report)
    missing = [str(finding) for item in report.operators for finding in item.missing]
    assert not missing, "admit these, or give the reason in `reasons`:\n" + "\n".join(missing)
    assert report.summary["combinations"] > 50_000


@pytest.mark.parametrize(("mark", "instead"), [("^", ""), ("+", ">")])
def test_every_mark_in_the_library_is_needed(mark, instead):
    """The prover notices when any rule of the library loses its `^` marks, or takes its sums for maxima."""
    changed = 0
    for name in OWN:
        op = copy.copy(REGISTRY[name])
        rule = op.rule
        if len(op.input_names) > 2:
            continue

        def without(*shapes, rule=rule, **attributes):
            source = rule(*shapes, **attributes) if callable(rule) else rule
            text, sizes = source if isinstance(source, tuple) else (source, {})
            return text.replace(mark, instead), sizes

        op.rule = without
        op.cases = [case for case in op.cases if _differs(op, case, rule)]
        if op.cases:
            changed += 1
            assert check_operator(op, (2,)).unsound, f"{name} passes without its {mark}"
    assert changed >= 10


def _differs(op, case, rule):
    """Whether a changed rule is still one, and another one than `rule`."""
    try:
        changed = op.bind(case.types, case.attributes).signatures((2,))
    except RuleError:
        return False
    before = copy.copy(op)
    before.rule = rule
    return set(changed) != set(before.bind(case.types, case.attributes).signatures((2,)))


def test_require_sound_lists_what_is_wrong():
    op = probe(lambda xp, x: xp.abs(x), "... -> ...", "f32[4]", linear="all")
    report = Report((check_operator(op, (2,)),))
    assert not report.sound and "UNSOUND probe (f32[4]) on 2: P -> P" in str(report)
    with pytest.raises(SbpError, match=r"correct these rules:\nprobe \(f32\[4\]\) on 2: P -> P"):
        require_sound(report)
    assert case_text(op, op.cases[0]) == "(f32[4])"


# -- scatter and gather, on which all of this stands -----------------------------------------------------------------

ARRAYS = {
    "float64": numpy.random.default_rng(1).standard_normal((5, 3)),
    "int64": numpy.random.default_rng(2).integers(-9, 9, (5, 3)),
    "uint8": numpy.random.default_rng(3).integers(0, 9, (5, 3)).astype("uint8"),
    "bool": numpy.random.default_rng(4).random((5, 3)) < 0.5,
}


@pytest.mark.parametrize("dtype", ARRAYS)
@pytest.mark.parametrize("mesh", [Mesh((2,)), Mesh((3,)), Mesh((2, 2)), Mesh((2, 3))], ids=str)
def test_gather_is_the_inverse_of_scatter(dtype, mesh):
    array = ARRAYS[dtype]
    options = [Broadcast(), Split(0), Split(1), *(Partial(kind) for kind in ("sum", "max", "min"))]
    tried = 0
    for axes in product(options, repeat=mesh.ndim):
        kinds = {sbp.reduce for sbp in axes if isinstance(sbp, Partial)}
        if len(kinds) > 1 or (dtype == "bool" and "sum" in kinds):
            with pytest.raises(LayoutError):
                scatter(array, Layout(axes), mesh, numpy, numpy.random.default_rng(0))
            continue
        parts = scatter(array, Layout(axes), mesh, numpy, numpy.random.default_rng(0))
        assert len(parts) == mesh.size and all(part.dtype == array.dtype for part in parts)
        whole = gather(parts, Layout(axes), mesh, array.shape)
        if "sum" in kinds and dtype == "float64":
            numpy.testing.assert_allclose(whole, array, rtol=1e-12, atol=1e-12)
        else:
            numpy.testing.assert_array_equal(whole, array)
        tried += 1
    assert tried >= 5


def test_parts_are_neither_equal_nor_proportional():
    array = numpy.random.default_rng(0).standard_normal((20, 20))
    rng = numpy.random.default_rng(1)
    a, b = scatter(array, Layout.parse("P"), Mesh((2,)), numpy, rng)
    ratio = a / b
    assert ratio.std() > 1 and (a < 0).any() and (a > 0).any() and (a * b < 0).any()
    c, d = scatter(array, Layout.parse("P(max)"), Mesh((2,)), numpy, rng)
    assert (c > d).any() and (d > c).any() and numpy.isneginf(c).any()


def test_gather_names_ranks_that_disagree():
    mesh = Mesh((2, 2), ("dp", "tp"))
    layout = Layout.parse("B, S(0)")
    parts = scatter(numpy.arange(5.0), layout, mesh, numpy, numpy.random.default_rng(0))
    parts[2][0] += 1e-6
    with pytest.raises(LayoutError) as error:
        gather(parts, layout, mesh, (5,), what="h.0.bias")
    assert "h.0.bias: ranks 0 and 2 of mesh(dp=2, tp=2) hold different numbers" in str(error.value)
    assert gather(parts, layout, mesh, (5,), rtol=1e-5).shape == (5,)


# -- user code -------------------------------------------------------------------------------------------------------


@pytest.fixture
def user_operator():
    @sbp.operator("b m k+, n k+ -> b m n", linear="each")
    def linear_map(xp, x, w):
        """x (b, m, k) times the transposed weight (n, k)."""
        return xp.matmul(x, w.T)

    linear_map.case("f32[2,3,4]", "f32[5,4]")
    yield linear_map
    del REGISTRY._operators["linear_map"]


def test_a_user_operator_is_proven(user_operator):
    report = check_rules(["linear_map"])
    assert report.sound and report.summary["missing"] == 0 and report.summary["admitted"] > 10


def test_a_users_wrong_rule_is_caught(tmp_path, capsys):
    """The README's example: somebody takes a clipped product for linear, and says so."""
    (tmp_path / "mine.py").write_text(
        "import sbp\n\n"
        '@sbp.operator("m k+, k+ n -> m n", linear="each")\n'
        "def clipped_product(xp, x, w):\n"
        '    """Never below zero."""\n'
        "    return xp.maximum(xp.matmul(x, w), 0)\n\n"
        'clipped_product.case("f32[4,6]", "f32[6,5]")\n'
    )
    try:
        assert run(["check-rules", "--import", str(tmp_path / "mine.py"), "--mesh", "2", "--json"]) == 1
    finally:
        REGISTRY._operators.pop("clipped_product", None)
    data = json.loads(capsys.readouterr().out)
    wrong = {finding["signature"] for finding in data["operators"]["clipped_product"]["unsound"]}
    assert wrong == {"S(1), S(0) -> P", "P, B -> P", "B, P -> P"}


# -- command line ----------------------------------------------------------------------------------------------------


def test_command_line(capsys):
    assert run(["check-rules", "matmul", "relu", "--mesh", "2", "--mesh", "2,2", "--json"]) == 0
    printed = capsys.readouterr()
    data = json.loads(printed.out)
    assert set(data["summary"]) >= {"operators", "cases", "combinations", "unsound", "missing", "missing_with_reason"}
    assert data["summary"]["operators"] == 2 and set(data["operators"]) == {"matmul", "relu"}
    assert "2 operators" in printed.err and "matmul\n" in printed.err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["matmull"], "unknown operator 'matmull'. Did you mean matmul?"),
        (["matmul", "--mesh", "2x2"], "'2x2' is not a mesh"),
        (["matmul", "--mesh", "1"], "at least 2 ranks"),
        (["--import", "no_such_module"], "cannot import no_such_module"),
        (["--import", "json"], "json defines no operators"),
    ],
)
def test_wrong_arguments(arguments, says, capsys):
    assert run(["check-rules", *arguments]) == 2
    assert says in capsys.readouterr().err


def test_a_report_speaks_of_one_case():
    """Of one case as of several."""
    whole = check_operator(REGISTRY["neg"], (2,))
    assert str(whole).startswith(f"neg: {whole.cases} cases, {whole.combinations} combinations, ")
    one = dataclasses.replace(whole, cases=1, combinations=1, admitted=1)
    assert str(one).startswith("neg: 1 case, 1 combination, 1 admitted, ")
