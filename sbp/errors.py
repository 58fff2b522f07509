"""The errors a user can cause. Each names the place and says what was expected and what to do."""


class SbpError(Exception):
    """Base of every error that input can cause; the command line prints it without a traceback.

    `exit_code` is what the command line exits with: 2 bad input, 3 infeasible, 4 time limit without a solution.
    """

    exit_code = 2


class LayoutError(SbpError):
    """A layout that cannot be parsed, or does not fit its tensor or mesh."""


class MeshError(SbpError):
    """A mesh that does not fit its ranks."""


class RuleError(SbpError):
    """A rule that cannot be parsed, or does not fit the operator's arguments."""


class GraphError(SbpError):
    """A graph that is not well formed: unknown value, wrong shape, cycle."""


class FrontendError(SbpError):
    """A model of another framework that cannot be imported."""


class ClusterError(SbpError):
    """A cluster description that is incomplete or contradictory."""


class ProblemError(SbpError):
    """A layout problem whose numbers are malformed."""


class PlanError(SbpError):
    """A plan file that cannot be read, or a plan that does not fit what it is applied to."""


class InfeasibleError(SbpError):
    """No plan satisfies the memory limit and the pins."""

    exit_code = 3


class TimeLimitError(SbpError):
    """The time limit passed before any plan was found."""

    exit_code = 4


class PipelineError(SbpError):
    """A pipeline or a schedule that is contradictory, or two that do not fit each other."""
