"""ONNX models as graphs: operators against ONNX's reference implementation, exported models against PyTorch."""

import numpy as np
import pytest

onnx = pytest.importorskip("onnx", reason="imports ONNX models")

from onnx import TensorProto, helper, numpy_helper  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402

from sbp.errors import FrontendError  # noqa: E402
from sbp.frontend.onnx import import_onnx, onnx_translation  # noqa: E402
from sbp.initial import draw_all  # noqa: E402
from sbp.interpreter import evaluate  # noqa: E402
from sbp.ops import library as ops  # noqa: E402
from sbp.planner.auto_parallel import auto_parallel  # noqa: E402

RANDOM = np.random.default_rng(0)


def array(*shape, low=None, high=None):
    if high is not None:
        return RANDOM.integers(low, high, shape)
    return RANDOM.standard_normal(shape).astype(np.float32)


X, Y, P = array(4, 6), array(4, 6), np.abs(array(4, 6)) + 0.5
IMAGE, VOLUME = array(2, 3, 8, 8), array(1, 2, 4, 4, 4)
I64 = np.int64


def case(op, *inputs, constants=(), outputs=1, opset=18, **attributes):
    """An operator, arrays that are fed, and arrays that are initializers (None: an absent input)."""
    return pytest.param(op, inputs, constants, outputs, opset, attributes, id=f"{op}-{len(inputs)}-{attributes}"[:60])


OPERATORS = [
    *(case(op, X) for op in ("Neg", "Abs", "Exp", "Tanh", "Sigmoid", "Relu", "Softplus", "Erf", "Sign", "Sin", "Cos",
                             "HardSwish", "Floor", "Identity", "Elu", "Selu", "LeakyRelu", "HardSigmoid", "Atan")),
    *(case(op, P) for op in ("Sqrt", "Log", "Reciprocal")),
    *(case(op, X, Y) for op in ("Add", "Sub", "Mul", "Div", "Max", "Min", "Sum", "Mean", "Greater", "LessOrEqual")),
    case("Gelu", X, opset=20), case("Gelu", X, opset=20, approximate="tanh"),
    case("Div", array(4, low=-9, high=9), constants=(np.array(2, I64),)), case("Pow", P, constants=(np.float32(1.5),)),
    case("Pow", P, Y), case("Clip", X, constants=(np.float32(-0.5), np.float32(0.5))),
    case("Where", X > 0, X, Y), case("Cast", X, to=TensorProto.INT64), case("Not", X > 0), case("And", X > 0, Y > 0),
    case("Reshape", X, constants=(np.array([0, 2, -1], I64),)), case("Flatten", IMAGE, axis=2),
    case("Transpose", IMAGE, perm=[0, 2, 3, 1]), case("Squeeze", X[None], constants=(np.array([0], I64),)),
    case("Unsqueeze", X, constants=(np.array([0, 2], I64),)),
    case("Expand", X[:1], constants=(np.array([3, 4, 1], I64),)),
    case("Tile", X, constants=(np.array([2, 1], I64),)), case("Concat", X, Y, axis=-1),
    case("Split", X, constants=(np.array([2, 4], I64),), outputs=2, axis=1),
    case("Split", X, outputs=3, axis=1, num_outputs=3),
    case("Slice", X, constants=(np.array([1, -1], I64), np.array([3, -7], I64), np.array([0, 1], I64), np.array([1,
         -2], I64))),
    case("Slice", X, constants=(np.array([2], I64), np.array([100], I64), np.array([1], I64))),
    case("Pad", X, constants=(np.array([1, 0, 0, 2], I64), np.float32(3))),
    case("Trilu", X, constants=(np.array(1, I64),)),
    case("Pad", IMAGE, constants=(np.array([0, 0, 1, 2, 0, 0, 2, 1], I64),), mode="reflect"),
    case("DepthToSpace", array(1, 8, 2, 3), blocksize=2),
    case("DepthToSpace", array(1, 8, 2, 3), blocksize=2, mode="CRD"),
    case("Gather", X, array(3, 2, low=0, high=4)), case("Gather", X, constants=(np.array(2, I64),), axis=1),
    case("Gather", X, array(3, low=-6, high=6), axis=1), case("GatherElements", X, array(4, 6, low=0, high=6), axis=1),
    case("GatherND", X, constants=(np.array([[0, 1], [3, 5]], I64),)),
    case("OneHot", array(3, low=0, high=5), constants=(np.array(5, I64), np.array([0.5, 2.0], np.float32))),
    *(case(op, X, constants=(np.array([1], I64),)) for op in ("ReduceMean", "ReduceMax", "ReduceL2", "ReduceProd")),
    case("ReduceSum", X, keepdims=0), case("ReduceSum", IMAGE, constants=(np.array([-1, 1], I64),), keepdims=0),
    case("ReduceLogSumExp", X), case("ArgMax", X, axis=1, keepdims=0), case("ArgMin", X, axis=0),
    case("TopK", X, constants=(np.array([2], I64),), outputs=2),
    case("CumSum", X, constants=(np.array(1, I64),), reverse=1),
    case("MatMul", X, Y.T.copy()), case("MatMul", array(2, 3, 4), array(4)), case("MatMul", array(4), array(2, 4, 3)),
    case("Gemm", X, Y, array(4), transB=1, alpha=0.5, beta=2.0), case("Gemm", X, Y, transA=1),
    case("Einsum", X, Y, equation="ij, kj -> ik"),
    case("Conv", IMAGE, array(4, 3, 3, 3), array(4), pads=[1, 1, 1, 1], strides=[2, 2]),
    case("Conv", IMAGE, array(6, 1, 3, 2), group=3, dilations=[2, 1], auto_pad="SAME_UPPER"),
    case("Conv", IMAGE, array(4, 3, 2, 2), pads=[0, 1, 1, 0]), case("Conv", VOLUME, array(3, 2, 2, 2, 2)),
    case("ConvTranspose", IMAGE, array(3, 2, 3, 3), array(2), strides=[2, 2], pads=[1, 1, 1, 1], output_padding=[1, 1]),
    case("MaxPool", IMAGE, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1]),
    case("MaxPool", IMAGE, kernel_shape=[2, 2], strides=[2, 2], pads=[0, 0, 1, 1]),
    case("AveragePool", IMAGE, kernel_shape=[2, 2], strides=[2, 2]), case("GlobalAveragePool", IMAGE),
    case("AveragePool", IMAGE, kernel_shape=[3, 3], pads=[1, 1, 1, 1], count_include_pad=1),
    case("GlobalMaxPool", IMAGE),
    case("Resize", IMAGE, constants=(None, np.array([1, 1, 2, 2], np.float32)), mode="nearest", nearest_mode="floor",
         coordinate_transformation_mode="asymmetric"),
    case("Resize", IMAGE, constants=(None, None, np.array([2, 3, 16, 12], I64)), mode="linear"),
    case("Softmax", X), case("LogSoftmax", X, axis=0),
    case("LayerNormalization", X, array(6), array(6), axis=-1), case("LayerNormalization", IMAGE, array(8, 8), axis=2),
    case("BatchNormalization", IMAGE, array(3), array(3), array(3), np.abs(array(3))),
    case("InstanceNormalization", IMAGE, array(3), array(3)),
    case("GroupNormalization", array(2, 4, 3), array(4), array(4), num_groups=2, opset=21),
    case("RMSNormalization", X, array(6), opset=23),
    case("Attention", array(1, 4, 3, 2), array(1, 2, 5, 2), array(1, 2, 5, 2), opset=23, is_causal=1),
]  # fmt: skip


def model_of(nodes, inputs, constants, outputs, opset):
    """A model of nodes; `inputs` are arrays by name, of which only types are kept."""
    declared = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
        for name, value in inputs.items()
    ]
    kept = [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    made = [helper.make_tensor_value_info(name, TensorProto.UNDEFINED, None) for name in outputs]
    graph = helper.make_graph(nodes, "model", declared, made, kept)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def compare(model, feeds, tolerance=1e-5):
    imported = import_onnx(model)
    found = evaluate(imported.graph, {**draw_all(imported.graph), **imported.state_arrays(), **feeds}, floating=None)
    expected = ReferenceEvaluator(model).run(None, feeds)
    for name, value in zip((item.name for item in model.graph.output), expected):
        got = found[imported.outputs[name]]
        assert got.shape == np.shape(value) and got.dtype == np.asarray(value).dtype
        np.testing.assert_allclose(got, value, rtol=tolerance, atol=tolerance)
    return imported


@pytest.mark.parametrize("op, inputs, constants, outputs, opset, attributes", OPERATORS)
def test_operators_equal_the_reference(op, inputs, constants, outputs, opset, attributes):
    fed = {f"x{at}": value for at, value in enumerate(inputs)}
    held = {f"c{at}": value for at, value in enumerate(constants) if value is not None}
    names = [*fed, *("" if value is None else f"c{at}" for at, value in enumerate(constants))]
    made = [f"y{at}" for at in range(outputs)]
    compare(model_of([helper.make_node(op, names, made, **attributes)], fed, held, made, opset), fed)


def test_softmax_of_old_models_is_over_all_further_dimensions():
    """As opset 11 defines it; the reference implementation knows the newer meaning only."""
    model = model_of([helper.make_node("Softmax", ["x"], ["y"], axis=2)], {"x": IMAGE}, {}, ["y"], 11)
    (found,) = evaluate(import_onnx(model).graph, {"x": IMAGE}).values()
    flat = np.exp(IMAGE.reshape(6, 64).astype(np.float64))
    np.testing.assert_allclose(found, (flat / flat.sum(1, keepdims=True)).reshape(IMAGE.shape))


def test_shapes_computed_in_the_model_are_known_at_import():
    """Shape, Gather, Concat, Reshape: how exporters write x.view(x.shape[0], -1)."""
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Gather", ["shape", "zero"], ["first"]),
        helper.make_node("Unsqueeze", ["first", "axis"], ["lead"]),
        helper.make_node("Concat", ["lead", "rest"], ["target"], axis=0),
        helper.make_node("Reshape", ["x", "target"], ["y"]),
    ]
    held = {"zero": np.array(0, I64), "axis": np.array([0], I64), "rest": np.array([-1], I64)}
    imported = compare(model_of(nodes, {"x": IMAGE}, held, ["y"], 18), {"x": IMAGE})
    assert [node.op for node in imported.graph.nodes] == ["reshape"]
    assert imported.graph.sources == ("x",)


def linear_model(batch="batch"):
    nodes = [
        helper.make_node("Gemm", ["x", "w", "b"], ["h"], name="/fc1/Gemm", transB=1),
        helper.make_node("Relu", ["h"], ["r"], name="/Relu"),
        helper.make_node("MatMul", ["r", "v"], ["y"], name="/fc2/MatMul"),
    ]
    held = {"w": array(8, 6), "b": array(8), "v": array(8, 3)}
    model = model_of(nodes, {"x": X}, held, ["y"], 18)
    del model.graph.input[:]
    model.graph.input.append(helper.make_tensor_value_info("x", TensorProto.FLOAT, [batch, 6]))
    return model, held


def test_training_a_model_with_a_symbolic_batch():
    model, held = linear_model()
    imported = import_onnx(
        model, sizes={"batch": 16}, loss=lambda y, t: ops.cross_entropy(y, t), targets={"t": "i64[16]"},
        optimizer="sgd", precision="mixed",
    )  # fmt: skip
    graph = imported.graph
    assert set(graph.parameters) == set(held) and graph.values["x"].shape == (16, 6)
    assert {node.module for node in imported.forward.nodes} >= {"fc1", "fc2", "loss"}
    assert all(np.array_equal(imported.state_arrays()[name], held[name]) for name in held)
    plan = auto_parallel(graph, "cpu", nodes=1, mesh=(4,), pins={"x": "S(0)"})
    assert plan.verify().passed


@pytest.mark.parametrize(
    "sizes, options, says",
    [
        ({}, {}, "symbolic dimension 'batch'; give sizes="),
        ({"batch": 4}, {"optimizer": "sgd"}, "without a loss"),
    ],
)
def test_what_is_missing_is_said(sizes, options, says):
    with pytest.raises(FrontendError, match=says):
        import_onnx(linear_model()[0], sizes=sizes, **options)


def test_one_error_lists_unknown_operators(tmp_path):
    nodes = [
        helper.make_node("NonMaxSuppression", ["x", "x"], ["y"], name="nms"),
        helper.make_node("MaxPool", ["x"], ["z"], name="pool", kernel_shape=[2], ceil_mode=1),
    ]
    model = model_of(nodes, {"x": array(1, 2, 4)}, {}, ["y", "z"], 18)
    with pytest.raises(FrontendError) as caught:
        import_onnx(model)
    text = str(caught.value)
    assert "2 operators" in text and "NonMaxSuppression (nms)" in text and "ceil_mode" in text
    assert "onnx_translation" in text
    file = tmp_path / "broken.onnx"
    file.write_bytes(b"no model")
    with pytest.raises(FrontendError, match="is no ONNX model"):
        import_onnx(file)
    with pytest.raises(FrontendError, match="there is no file"):
        import_onnx(tmp_path / "absent.onnx")


def test_users_register_translations():
    try:

        @onnx_translation("Det")
        def _(node, x):
            return ops.sum(x)

        model = model_of([helper.make_node("Det", ["x"], ["y"])], {"x": X}, {}, ["y"], 18)
        assert [node.op for node in import_onnx(model).graph.nodes] == ["sum"]
    finally:
        del onnx_translation._entries["Det"]


@pytest.mark.parametrize("name", ["nanoGPT", "ResNet-50"])
def test_exported_models_equal_pytorch(name, tmp_path):
    torch = pytest.importorskip("torch", reason="exports PyTorch models")
    pytest.importorskip("onnxscript", reason="torch.onnx.export needs it")
    import torch_models as models

    example = models.PLAIN[name]()
    module = example.module.eval()
    file = tmp_path / "model.onnx"
    torch.onnx.export(module, (example.inputs,), str(file), verbose=False)
    imported = import_onnx(file)
    (given,) = imported.inputs
    feeds = {**draw_all(imported.graph), **imported.state_arrays(), given: example.inputs.numpy()}
    (output,) = evaluate(imported.graph, feeds).values()
    expected = module(example.inputs).detach().numpy()
    np.testing.assert_allclose(output, expected, atol=1e-4 * abs(expected).max())
