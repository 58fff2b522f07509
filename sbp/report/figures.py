"""A plan as interactive figures (plotly, the extra `viz`), for notebooks and as a page of its own."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from sbp.errors import PlanError, SbpError
from sbp.layout import Layout, Split
from sbp.planner.memory import KINDS
from sbp.report import colours
from sbp.report.summary import Summary, summarize
from sbp.report.units import BYTES, SECONDS, bytes_text, seconds_text, unit_for

if TYPE_CHECKING:
    from sbp.planner.plan import Plan

MOST_POINTS = 1500
"""Memory over time is drawn at no more places than these; of each stretch left out the highest is kept."""

MOST_LABELS = 64
"""Devices beyond which a grid shows their boxes by colour and on hovering only."""

SCRIPTS: Mapping[str, Any] = MappingProxyType({"inline": True, "beside": "directory", "cdn": "cdn"})
"""Where a page has plotly's script from, and plotly's own word for it."""


class FigureError(SbpError):
    """Figures cannot be drawn."""


@dataclass(frozen=True, eq=False)
class PlanFigures:
    """The figures of a plan; a notebook shows all of them, `save` writes one page that needs nothing else.

    Attributes
    ----------
    layouts
        The module tree by mesh axis: an area per group of equal parameters, by their bytes, coloured by SBP.
    tensor
        One tensor over the device grid: which rank holds which box.
    time
        Step-time breakdown.
    memory
        Memory over the operations of the step, stacked by kind.
    """

    layouts: Any
    tensor: Any
    time: Any
    memory: Any

    def __iter__(self) -> Iterator[Any]:
        return iter((self.layouts, self.tensor, self.time, self.memory))

    def show(self) -> None:
        """Show all, in the notebook or the browser."""
        for figure in self:
            figure.show()

    def _ipython_display_(self) -> None:
        self.show()

    def __repr__(self) -> str:
        return "<figures of a plan: layouts, tensor, time, memory; save(path) writes a page>"

    def to_html(self, plotlyjs: str = "inline") -> str:
        """A page with all figures.

        Parameters
        ----------
        plotlyjs
            Where the page has plotly's script of 4.8 MB from: "inline", it is part of the page, which opens anywhere;
            "beside", from `plotly.min.js` in the page's folder; "cdn", from the network.
        """
        if plotlyjs not in SCRIPTS:
            raise FigureError(f"plotlyjs is one of {', '.join(SCRIPTS)}, got {plotlyjs!r}.")
        first = SCRIPTS[plotlyjs]
        parts = [
            figure.to_html(full_html=False, include_plotlyjs=False if number else first)
            for number, figure in enumerate(self)
        ]
        return f'<!doctype html><html><head><meta charset="utf-8"></head><body>{"".join(parts)}</body></html>\n'

    def save(self, path: str | Path, plotlyjs: str = "inline") -> None:
        """Write `to_html` to a file; with "beside" also the script, which all pages of the folder share."""
        page = self.to_html(plotlyjs)
        try:
            Path(path).write_text(page, encoding="utf-8")
            if plotlyjs == "beside":
                from plotly.offline import get_plotlyjs

                Path(path).with_name("plotly.min.js").write_text(get_plotlyjs(), encoding="utf-8")
        except OSError as error:
            raise FigureError(f"cannot write the figures to {path}: {error.strerror or error}.") from None


def plan_figures(plan: Plan, value: str | None = None) -> PlanFigures:
    """All figures of a plan.

    Parameters
    ----------
    value
        The tensor of the second figure; default the largest parameter that is split.

    Raises
    ------
    FigureError
        Plotly is not installed.
    PlanError
        The plan has no such value.
    """
    summary = summarize(plan)
    return PlanFigures(
        layout_figure(plan, summary), tensor_figure(plan, value), time_figure(summary), memory_figure(plan)
    )


def _plotly() -> Any:
    try:
        import plotly.graph_objects as graph_objects
    except ImportError:
        raise FigureError("figures need plotly; install it with `pip install 'sbp[viz]'`.") from None
    return graph_objects


def layout_figure(plan: Plan, summary: Summary | None = None) -> Any:
    """Parameters as a tree of modules, once per mesh axis: area is bytes, colour is the SBP they are stored in."""
    go = _plotly()
    rows = [row for row in (summary or summarize(plan)).layouts if row.kind == "parameter"]
    columns = plan.mesh.ndim
    figure = go.Figure()
    used: dict[str, str] = {}
    for axis, axis_name in enumerate(plan.mesh.names):
        labels, ids, parents, sizes, shades, hovers = [], [], [], [], [], []
        root = f"{axis_name} ({plan.mesh.shape[axis]})"
        inner: dict[tuple[str, ...], list[int]] = {}
        for row in rows:
            path = _path(row.names)
            whole = sum(plan.graph.values[name].type.bytes for name in row.members)
            for depth in range(len(path)):
                inner.setdefault(path[:depth], []).append(whole)
            sbp = Layout.parse(row.stored)[axis]
            used[str(sbp)] = colours.sbp_colour(sbp)
            labels.append(f"{path[-1]}  {sbp}")
            ids.append(".".join(path) + f"|{row.stored}|{row.type}")
            parents.append(".".join(path[:-1]) or root)
            sizes.append(whole)
            shades.append(colours.sbp_colour(sbp))
            hovers.append(f"{row.names}<br>{row.type} {row.stored}<br>{row.count} tensors, {bytes_text(whole)}")
        for path, parts in inner.items():
            labels.append(path[-1] if path else root)
            ids.append(".".join(path) or root)
            parents.append((".".join(path[:-1]) or root) if path else "")
            sizes.append(sum(parts))
            shades.append("#e8e8e8")
            hovers.append(f"{'.'.join(path) or root}<br>{bytes_text(sum(parts))}")
        width = 1 / columns
        figure.add_trace(
            go.Treemap(
                labels=labels,
                ids=ids,
                parents=parents,
                values=sizes,
                branchvalues="total",
                marker={"colors": shades, "line": {"width": 1}, "pad": {"t": 20, "l": 2, "r": 2, "b": 2}},
                hovertext=hovers,
                hoverinfo="text",
                domain={"x": [axis * width + 0.005, (axis + 1) * width - 0.005]},
                tiling={"pad": 1},
                root={"color": "#ffffff"},
            )
        )
    for text, colour in sorted(used.items()):
        figure.add_trace(
            go.Scatter(
                x=[None], y=[None], mode="markers", name=text, marker={"color": colour, "size": 12, "symbol": "square"}
            )
        )
    figure.update_layout(
        title=f"Stored layout of parameters by mesh axis, {plan.mesh}",
        height=460,
        showlegend=True,
        legend={"orientation": "h", "y": -0.02},
        margin={"l": 20, "r": 20, "t": 50, "b": 40},
        plot_bgcolor="white",
        xaxis={"visible": False},
        yaxis={"visible": False},
    )
    return figure


def _path(names: str) -> tuple[str, ...]:
    """Parts of a group's name, a layer's number with what it numbers: `h.{0..11}`, `mlp`, `fc`, `weight`."""
    path: list[str] = []
    for part in names.split(", ")[0].split("."):
        # `{0..11}` was cut at its dots as well.
        open_set = path and path[-1].count("{") > path[-1].count("}")
        if path and (open_set or part[:1].isdecimal() or part[:1] == "{"):
            path[-1] += "." + part
        else:
            path.append(part)
    return tuple(path)


def tensor_figure(plan: Plan, value: str | None = None) -> Any:
    """Which rank holds which box of a tensor: the device grid on the left, the tensor cut into its boxes on the right.

    Boxes have one colour on both sides. Of a tensor of many dimensions the right side shows the two that are cut most.
    """
    go = _plotly()
    name = _largest_split(plan) if value is None else value
    if name not in plan.graph.values:
        raise PlanError(f"the plan has no value {name!r}; plan.layouts lists all of them.")
    from plotly.subplots import make_subplots

    layout, tensor, mesh = plan.layouts[name], plan.graph.values[name], plan.mesh
    shards = [layout.shard(tensor.shape, mesh.shape, place) for place in mesh.coordinates()]
    boxes = {box: number for number, box in enumerate(dict.fromkeys((s.offset, s.shape) for s in shards))}
    number_of = [boxes[(shard.offset, shard.shape)] for shard in shards]
    # Devices: the last mesh axis runs to the right, all others together downwards; a single axis folds by nodes.
    wide = mesh.shape[-1] if mesh.ndim > 1 else math.gcd(mesh.size, plan.cluster.devices_per_node)
    grid = np.array(number_of).reshape(-1, wide)
    texts = [
        f"rank {rank}" + (f"<br>{_box_text(shard.offset, shard.shape)}" if mesh.size <= 16 and wide <= 4 else "")
        for rank, shard in enumerate(shards)
    ]
    hovers = [
        f"rank {rank} at {dict(zip(mesh.names, place))}<br>{_box_text(shard.offset, shard.shape)}, "
        f"{math.prod(shard.shape)} elements"
        + (" (a part of the sum, maximum or minimum)" if layout.has_partial else "")
        for (rank, shard), place in zip(enumerate(shards), mesh.coordinates())
    ]
    figure = make_subplots(1, 2, subplot_titles=("devices", "tensor"), column_widths=[0.5, 0.5])
    scale, top = _scale(len(boxes))
    style = {"colorscale": scale, "zmin": -0.5, "zmax": top, "showscale": False, "xgap": 2, "ygap": 2}
    figure.add_trace(
        go.Heatmap(
            z=grid,
            text=np.array(texts).reshape(-1, wide) if mesh.size <= MOST_LABELS else None,
            texttemplate="%{text}" if mesh.size <= MOST_LABELS else None,
            customdata=np.array(hovers).reshape(-1, wide),
            hovertemplate="%{customdata}<extra></extra>",
            **style,
        ),
        1,
        1,
    )
    _draw_tensor(figure, go, layout, tensor.shape, boxes, number_of, style)
    last = mesh.names[-1] if mesh.ndim > 1 else "device of the node" if wide > 1 else mesh.names[0]
    rest = " x ".join(mesh.names[:-1]) if mesh.ndim > 1 else "row of devices"
    figure.update_xaxes(title=last, dtick=1 if wide <= 16 else None, row=1, col=1)
    figure.update_yaxes(title=rest, autorange="reversed", dtick=1 if grid.shape[0] <= 16 else None, row=1, col=1)
    figure.update_layout(
        title=f"{name}: {tensor.type} {layout} on {mesh}",
        height=min(900, max(360, 40 * grid.shape[0] + 140)),
        margin={"l": 60, "r": 20, "t": 80, "b": 50},
    )
    return figure


def _largest_split(plan: Plan) -> str:
    names = plan.graph.parameters or plan.graph.sources
    if not names:
        raise PlanError(f"{plan.graph.name} has no parameters and no inputs to draw; name a value.")

    def rank(name: str) -> tuple[int, int]:
        sizes = plan.graph.values[name].type.bytes
        return sum(isinstance(sbp, Split) for sbp in plan.layouts[name]), sizes

    return max(names, key=rank)


def _box_text(offset: tuple[int, ...], shape: tuple[int, ...]) -> str:
    return "[" + ", ".join(f"{start}:{start + size}" for start, size in zip(offset, shape)) + "]" if shape else "scalar"


def _scale(count: int) -> tuple[list[list[Any]], float]:
    """One flat colour per box, distinct as long as there are few, and the upper end of the scale."""
    palette = [
        f"hsl({round(360 * (0.58 + number * 0.381966)) % 360},55%,{66 - 12 * (number % 3)}%)" for number in range(count)
    ]
    steps: list[list[Any]] = []
    for number, colour in enumerate(palette):
        steps += [[number / count, colour], [(number + 1) / count, colour]]
    return steps, count - 0.5


def _draw_tensor(
    figure: Any,
    go: Any,
    layout: Layout,
    shape: tuple[int, ...],
    boxes: dict[tuple[tuple[int, ...], tuple[int, ...]], int],
    number_of: list[int],
    style: dict[str, Any],
) -> None:
    """The tensor's two most split dimensions as rows and columns, box by box."""
    dims = sorted({sbp.axis for sbp in layout if isinstance(sbp, Split)})[:2]
    dims += [dim for dim in range(len(shape)) if dim not in dims][: max(0, min(2, len(shape)) - len(dims))]
    dims = sorted(dims)
    spans = {dim: sorted({(o[dim], o[dim] + s[dim]) for o, s in boxes if s[dim]}) for dim in dims}
    row_spans = spans[dims[0]] if dims else [(0, 1)]
    column_spans = spans[dims[1]] if len(dims) > 1 else [(0, 1)]
    ranks: dict[int, list[int]] = {}
    for rank, number in enumerate(number_of):
        ranks.setdefault(number, []).append(rank)
    cells = np.full((len(row_spans), len(column_spans)), -1)
    texts = np.full(cells.shape, "", dtype=object)
    for (offset, size), number in boxes.items():
        if 0 in size:
            continue
        i = row_spans.index((offset[dims[0]], offset[dims[0]] + size[dims[0]])) if dims else 0
        j = column_spans.index((offset[dims[1]], offset[dims[1]] + size[dims[1]])) if len(dims) > 1 else 0
        if cells[i, j] < 0:
            cells[i, j], texts[i, j] = number, _ranks_text(ranks[number])
    figure.add_trace(
        go.Heatmap(
            z=cells,
            x=[0, *(stop for _, stop in column_spans)] if len(dims) > 1 else [0, 1],
            y=[0, *(stop for _, stop in row_spans)] if dims else [0, 1],
            text=texts,
            texttemplate="%{text}" if cells.size <= MOST_LABELS else None,
            hovertemplate="held by %{text}<extra></extra>",
            **style,
        ),
        1,
        2,
    )
    figure.update_xaxes(
        title=f"dimension {dims[1]}" if len(dims) > 1 else "", showticklabels=len(dims) > 1, row=1, col=2
    )
    figure.update_yaxes(title=f"dimension {dims[0]}" if dims else "", autorange="reversed", row=1, col=2)


def _ranks_text(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    steps = {b - a for a, b in zip(ranks, ranks[1:])}
    if len(ranks) > 3 and len(steps) == 1:
        step = steps.pop()
        return f"ranks {ranks[0]} to {ranks[-1]}" + (f" by {step}" if step > 1 else "")
    shown = ", ".join(map(str, ranks[:8]))
    return f"ranks {shown}" + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


def time_figure(summary: Summary) -> Any:
    """Compute by phase, collectives by mesh axis, what of them is exposed, and the step, in seconds."""
    go = _plotly()
    figure = go.Figure()
    unit, size = unit_for(summary.step_seconds, SECONDS)

    def bar(row: str, name: str, seconds: float, colour: str, count: int | None = None) -> None:
        counted = f", {count} operations" if count else ""
        figure.add_trace(
            go.Bar(
                y=[row],
                x=[seconds / size],
                name=name,
                orientation="h",
                marker_color=colour,
                legendgroup=name,
                showlegend=name not in named,
                hovertemplate=f"{row}: {name}<br>{seconds_text(seconds)}{counted}<extra></extra>",
            )
        )
        named.add(name)

    named: set[str] = set()
    bar("step", "compute", summary.compute_seconds, "#777777")
    bar("step", "exposed collectives", summary.exposed_seconds, "#d55e00")
    for item in summary.time:
        if item.kind == "collective":
            axis, _, kind = item.name.partition(": ")
            bar(f"collectives along {axis}", kind, item.seconds, colours.COLLECTIVES[kind], item.count)
        else:
            phase = item.name if item.kind == "compute" else "local"
            bar("compute", item.name, item.seconds, colours.PHASES[phase], item.count)
    figure.update_layout(
        barmode="stack",
        title=f"Step time {seconds_text(summary.step_seconds)}, FLOP utilisation {summary.utilisation:.1%}",
        xaxis_title=unit,
        height=320 + 30 * len(summary.boxing_seconds),
        legend={"orientation": "h", "y": -0.25},
        margin={"l": 20, "r": 20, "t": 50, "b": 80},
    )
    figure.update_yaxes(autorange="reversed")
    return figure


def memory_figure(plan: Plan) -> Any:
    """Memory per device over the operations of the step, stacked by kind, with the limit and the phases."""
    go = _plotly()
    profile = plan.memory_profile
    chosen = _sampled(profile.total)
    unit, size = unit_for(profile.peak_bytes, BYTES)
    figure = go.Figure()
    for number, kind in enumerate(KINDS):
        sizes = profile.by_kind[number][chosen]
        if sizes.any():
            figure.add_trace(
                go.Scatter(
                    x=chosen,
                    y=sizes / size,
                    name=kind,
                    stackgroup="memory",
                    mode="lines",
                    line={"width": 0.5, "color": colours.KINDS[kind], "shape": "hv"},
                    hovertemplate=f"{kind}: %{{y:.3f}} {unit}<extra></extra>",
                )
            )
    peak, limit = profile.peak_bytes, plan.memory.limit_bytes
    if limit is not None and limit < 2 * peak:
        figure.add_hline(
            y=limit / size, line={"dash": "dash", "color": "#d55e00"}, annotation_text=f"limit {bytes_text(limit)}"
        )
    before = None
    for at, operation in enumerate(plan.physical.operations):
        if operation.phase != before:
            figure.add_vline(x=at, line={"width": 1, "dash": "dot"}, annotation_text=operation.phase)
            before = operation.phase
    figure.update_layout(
        title=f"Memory per device, peak {bytes_text(peak)}" + (f" of {bytes_text(limit)}" if limit else ""),
        xaxis_title="operation of the step",
        yaxis_title=unit,
        hovermode="x unified",
        height=400,
        margin={"l": 60, "r": 20, "t": 70, "b": 40},
    )
    return figure


def _sampled(total: np.ndarray) -> np.ndarray:
    """Indices to draw: all, or the highest of each of `MOST_POINTS` stretches, and both ends."""
    count = len(total)
    if count <= MOST_POINTS:
        return np.arange(count)
    edges = np.linspace(0, count, MOST_POINTS + 1).astype(int)
    highest = [a + int(np.argmax(total[a:b])) for a, b in zip(edges, edges[1:]) if b > a]
    return np.unique([0, *highest, count - 1])
