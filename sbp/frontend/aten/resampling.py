"""Images in other sizes, read at other places, and cut into windows."""

from __future__ import annotations

from typing import Any

from sbp.frontend.translation import Context, reshaped, translation
from sbp.ops import library as ops

_MODES = {
    "nearest1d": "nearest", "nearest2d": "nearest", "nearest3d": "nearest", "linear1d": "linear",
    "bilinear2d": "bilinear", "trilinear3d": "trilinear", "bicubic2d": "bicubic",
}  # fmt: skip


def _upsample(mode: str) -> Any:
    """Overloads say the size or the scale factors (`vec`), or the size and what factors it was made with."""

    def translate(context: Context, x: Any, size: Any = None, *arguments: Any, **options: Any) -> Any:
        rest = list(arguments)
        aligned = options.get("align_corners", False)
        if not mode.startswith("nearest") and rest:
            aligned = rest.pop(0)
        factors = rest[0] if rest and isinstance(rest[0], (list, tuple)) else rest
        factors = factors or options.get("scale_factors") or [
            options[name] for name in ("scales", "scales_d", "scales_h", "scales_w") if name in options
        ]  # fmt: skip
        if factors and None not in factors:  # distances of pixels are by the factor, not by the rounded size
            return ops.interpolate(x, scale_factor=tuple(factors), mode=mode, align_corners=bool(aligned))
        return ops.interpolate(x, size=tuple(context.shape[2:]), mode=mode, align_corners=bool(aligned))

    return translate


for _name, _mode in _MODES.items():
    translation(f"aten.upsample_{_name}")(_upsample(_mode))
for _rank in (1, 2, 3):
    translation(f"aten._upsample_nearest_exact{_rank}d")(_upsample("nearest-exact"))


@translation("aten.grid_sampler_2d", "aten.grid_sampler")
def _(context, x, grid, mode, padding, aligned):
    if mode == 2:
        raise NotImplementedError("grid_sample with mode='bicubic'")
    return ops.grid_sample(x, grid, ("bilinear", "nearest")[mode], ("zeros", "border", "reflection")[padding], aligned)


@translation("aten.im2col")
def _(context, x, kernel, dilation, padding, stride):
    whole = x if len(x.shape) == 4 else reshaped(x, (1, *x.shape))
    made = ops.unfold(whole, tuple(kernel), stride=tuple(stride), padding=tuple(padding), dilation=tuple(dilation))
    return reshaped(made, context.shape)


@translation("aten.col2im")
def _(context, x, size, kernel, dilation, padding, stride):
    whole = x if len(x.shape) == 3 else reshaped(x, (1, *x.shape))
    sides = {"stride": tuple(stride), "padding": tuple(padding), "dilation": tuple(dilation)}
    return reshaped(ops.fold(whole, tuple(size), tuple(kernel), **sides), context.shape)
