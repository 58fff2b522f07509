"""Random pipelines for property tests: uneven chunks, empty segments, early and late tasks, meetings, shared links."""

from hypothesis import strategies as st

from sbp.planner.pipeline import COMPUTE, P2P, PHASES, Pipeline, Segment, Task

SECONDS = st.sampled_from([0.0, 0.1, 0.3, 0.7, 1.0, 1.1, 2.5, 1e-3])
STREAMS = (COMPUTE, "tp", "dp", P2P)


@st.composite
def tasks(draw, most=4, meets=""):
    count = draw(st.integers(0, most))
    found = []
    for at in range(count):
        inputs = draw(st.sets(st.integers(0, at - 1), max_size=2)) if at else ()
        stream = draw(st.sampled_from(STREAMS))
        early = not inputs and draw(st.integers(0, 4)) == 0
        late = draw(st.integers(0, 4)) == 0
        allocates, frees = draw(st.integers(0, 3)), draw(st.integers(0, 3))
        meeting = meets if at == 0 and draw(st.booleans()) else ""
        found.append(
            Task(f"{at}", stream, draw(SECONDS), tuple(sorted(inputs)), allocates, frees, early, late, meeting)
        )
    return tuple(found)


@st.composite
def segments(draw, phase, meets=""):
    made = draw(tasks(meets=meets))
    if phase not in PHASES[:2]:
        return Segment(phase, made)
    after = draw(st.none() | st.integers(0, len(made) - 1)) if made else None
    return Segment(phase, made, draw(st.integers(0, 1)), draw(SECONDS), after)


@st.composite
def pipelines(draw, most_chunks=2, phases=None):
    stages, chunks = draw(st.integers(1, 3)), draw(st.integers(1, most_chunks))
    micro_batches = draw(st.integers(1, 3))
    phases = phases or PHASES[: draw(st.integers(1, 3))]
    kinds = {phase: [draw(segments(phase)) for _ in range(2)] for phase in phases}
    keys = [(chunk, phase) for chunk in range(stages * chunks) for phase in phases]
    pick = {key: draw(st.sampled_from(kinds[key[1]])) for key in keys}
    first = {(0, "forward"): draw(segments("forward"))} if draw(st.booleans()) else {}
    last = {(0, phases[-1]): draw(segments(phases[-1]))} if len(phases) > 1 and draw(st.booleans()) else {}
    once = [
        tuple(draw(segments(phase, meets=phase)) for _ in range(stages)) if draw(st.booleans()) else ()
        for phase in ("before", "after")
    ]
    links = draw(st.sampled_from([{}, {"dp": "nic", P2P: "nic"}, {"tp": "one", "dp": "one", P2P: "one"}]))
    return Pipeline(
        stages,
        chunks,
        micro_batches,
        pick,
        *once,
        first,
        last,
        links,
        draw(st.booleans()),
        draw(st.sampled_from([0.0, 0.25, 0.4])),
        tuple(draw(st.integers(0, 5)) for _ in range(stages)) if draw(st.booleans()) else (),
    )


def name_for(draw_name, pipeline):
    return draw_name if pipeline.chunks == 1 or draw_name == "gpipe" else "interleaved"
