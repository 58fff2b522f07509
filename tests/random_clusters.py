"""Strategies for property tests: presets and random clusters, and meshes on them."""

from dataclasses import replace

from hypothesis import strategies as st

from sbp.mesh import Mesh
from sbp.planner.cluster import Cluster, Device, Tier, presets

DEVICE = Device("Chip", {"f32": 1e13, "bf16": 1e14}, 2**34, 1e12, 0.5, 1e-6)


@st.composite
def tiers(draw, name="link", span=None):
    """A tier with any constants that are accepted."""
    rate, short = st.floats(1e8, 1e12), st.floats(0, 1e-3)
    sizes = st.dictionaries(st.integers(2, 8), rate, max_size=3)
    tier = Tier(
        name,
        span,
        draw(short),
        draw(rate),
        draw(st.floats(0.01, 1)),
        draw(short),
        draw(st.floats(0, 1e-6)),
        group_bandwidths=tuple(draw(sizes).items()),
        gather_bandwidths=tuple(draw(sizes).items()),
        exchange_bandwidths=tuple(draw(sizes).items()),
        links=draw(st.none() | st.integers(1, 16)),
    )
    gains = draw(st.dictionaries(st.integers(2, 8), st.floats(1, 2), max_size=2))
    summed = tuple((size, gain * tier.bandwidth(size)) for size, gain in sorted(gains.items()))
    return replace(tier, all_reduce_bandwidths=summed)


@st.composite
def clusters(draw, most_nodes=5):
    """A preset of some nodes, or a cluster of two or three random tiers."""
    nodes = draw(st.integers(1, most_nodes))
    if draw(st.booleans()):
        return Cluster.preset(draw(st.sampled_from(presets())), nodes=nodes)
    per_node = draw(st.integers(1, 8))
    found = [draw(tiers("bus", per_node))]
    if draw(st.booleans()):
        found.append(draw(tiers("rack", 2 * per_node)))
    return Cluster("drawn", DEVICE, nodes, per_node, (*found, draw(tiers("net", None))))


@st.composite
def placed(draw):
    """A cluster, a mesh on it and an axis."""
    cluster = draw(clusters())
    shape, left = [], cluster.size
    for _ in range(draw(st.integers(1, 3))):
        shape.append(draw(st.integers(1, left)))
        left //= shape[-1]
    axis = draw(st.integers(0, len(shape) - 1))
    return cluster, Mesh(tuple(shape)), axis
