"""The errors a user can cause. Each names the place and says what was expected and what to do.

Every class has an example that fails, and the same one set right (`help(sbp.errors.LayoutError)`); tests run them.
"""


class SbpError(Exception):
    """Base of every error that input can cause; the command line prints it without a traceback.

    `exit_code` is what the command line exits with: 2 bad input, 3 infeasible, 4 time limit without a solution.
    """

    exit_code = 2


class LayoutError(SbpError):
    """A layout that cannot be parsed, or does not fit its tensor or mesh.

    Examples
    --------
    >>> import sbp
    >>> sbp.ones((4, 6), "S(2)", 2)
    Traceback (most recent call last):
        ...
    sbp.errors.LayoutError: ...: layout (S(2)) splits dimension 2, but the shape [4, 6] has 2 dimensions...
    >>> sbp.ones((4, 6), "S(1)", 2)
    <GlobalTensor f32[4,6] (S(1)) on mesh(x=2)>
    """


class MeshError(SbpError):
    """A mesh that does not fit its ranks.

    Examples
    --------
    >>> from sbp import Mesh
    >>> Mesh.parse("dp=2,tp")
    Traceback (most recent call last):
        ...
    sbp.errors.MeshError: 'dp=2,tp' is not a mesh; write sizes such as 2,8 or named ones such as dp=2,tp=8.
    >>> Mesh.parse("dp=2,tp=4").size
    8
    """


class RuleError(SbpError):
    """A rule that cannot be parsed, or does not fit the operator's arguments.

    Examples
    --------
    >>> import sbp
    >>> sbp.ones((4, 6)) @ sbp.ones((5, 3))
    Traceback (most recent call last):
        ...
    sbp.errors.RuleError: operator matmul(f32[4,6], f32[5,3]): input 1 of shape [5, 3] has 5 where dimension k ... is 6
    >>> sbp.ones((4, 6)) @ sbp.ones((6, 3))
    <GlobalTensor f32[4,3] (B) on mesh(x=1)>
    """


class GraphError(SbpError):
    """A graph that is not well formed: unknown value, wrong shape, cycle.

    Examples
    --------
    >>> from sbp.models import build
    >>> build("gpt2", layers=0)
    Traceback (most recent call last):
        ...
    sbp.errors.GraphError: GPTConfig: layers must be a whole number of at least 1, got 0.
    >>> build("gpt2", layers=1).count_parameters()
    46473216
    """


class FrontendError(SbpError):
    """A model of another framework that cannot be imported."""


class ClusterError(SbpError):
    """A cluster description that is incomplete or contradictory.

    Examples
    --------
    >>> from sbp import Cluster
    >>> Cluster.preset("a100-80gb")
    Traceback (most recent call last):
        ...
    sbp.errors.ClusterError: no cluster preset is called 'a100-80gb'; did you mean a100-80g? Known are ...
    >>> Cluster.preset("a100-80g", nodes=2).size
    16
    """


class ProblemError(SbpError):
    """A layout problem whose numbers are malformed.

    Examples
    --------
    >>> from sbp.planner.problem import ProblemBuilder
    >>> builder = ProblemBuilder("two nodes")
    >>> first, second = builder.add_node([1, 2]), builder.add_node([3, 4])
    >>> builder.add_edge(first, first, [[0, 1], [1, 0]])
    Traceback (most recent call last):
        ...
    sbp.errors.ProblemError: edge 0: both ends are node 0; put the cost on the node
    >>> builder.add_edge(first, second, [[0, 1], [1, 0]])
    >>> builder.build().node_count
    2
    """


class PlanError(SbpError):
    """A plan file that cannot be read, or a plan that does not fit what it is applied to.

    Examples
    --------
    >>> import sbp
    >>> options = dict(batch=8, mesh=(4,), time_limit=10)
    >>> sbp.auto_parallel("tiny-mlp", "cpu", pins={"layers.0.wight": "S(0)"}, **options)
    Traceback (most recent call last):
        ...
    sbp.errors.PlanError: pin 'layers.0.wight' matches no value of tiny-mlp; near names: layers.0.weight, ...
    >>> plan = sbp.auto_parallel("tiny-mlp", "cpu", pins={"layers.0.weight": "S(0)"}, **options)
    >>> print(plan.layouts["layers.0.weight"])
    (S(0))
    """


class InfeasibleError(SbpError):
    """No plan satisfies the memory limit and the pins.

    Examples
    --------
    >>> import sbp
    >>> options = dict(batch=8, mesh=(4,), time_limit=10)
    >>> sbp.auto_parallel("tiny-mlp", "cpu", memory_limit=1000, **options)
    Traceback (most recent call last):
        ...
    sbp.errors.InfeasibleError: tiny-mlp does not fit on cpu (4 devices of 1,000 bytes usable each): even cut into ...
    >>> sbp.auto_parallel("tiny-mlp", "cpu", memory_limit=10**6, **options).memory.peak_bytes < 10**6
    True
    """

    exit_code = 3


class TimeLimitError(SbpError):
    """The time limit passed before any plan was found; raise `time_limit` (--time-limit), or the memory limit.

    That takes a tight memory limit besides: without one a plan is known in a moment, and is stated with its gap.

    Examples
    --------
    >>> import sbp
    >>> sbp.auto_parallel("tiny-mlp", "h100", mesh=(2, 4), time_limit=10.0).gap >= 0
    True
    """

    exit_code = 4


class PipelineError(SbpError):
    """A pipeline or a schedule that is contradictory, or two that do not fit each other.

    Examples
    --------
    >>> from sbp.planner.schedule import schedule_named
    >>> schedule_named("1f2b", stages=4, chunks=1, micro_batches=8)
    Traceback (most recent call last):
        ...
    sbp.errors.PipelineError: no schedule is called '1f2b'; did you mean 1f1b? Known are ...
    >>> schedule_named("1f1b", stages=4, chunks=1, micro_batches=8).in_flight()
    (4, 3, 2, 1)
    """
