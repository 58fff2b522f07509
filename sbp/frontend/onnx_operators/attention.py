"""ONNX's attention."""

from __future__ import annotations

from sbp.frontend.onnx_operators.node import onnx_translation
from sbp.frontend.translation import reshaped
from sbp.ops import library as ops


@onnx_translation("Attention")
def _(node, q, k, v, mask=None, *past):
    """Opset 23, of (batch, heads, length, width) tensors."""
    if past or node.outputs > 1 or node.get("softcap", 0.0) or len(q.shape) != 4:
        raise NotImplementedError("Attention with past keys, softcap, or heads in one dimension")
    options = {"causal": bool(node.get("is_causal", 0)), "scale": node.get("scale")}
    if mask is None:
        return ops.attention(q, k, v, **options)[0]
    if mask.dtype != "bool":
        raise NotImplementedError("Attention with numbers added to the scores")
    return ops.masked_attention(q, k, v, reshaped(mask, (*(1,) * (4 - len(mask.shape)), *mask.shape)), **options)[0]
