"""Local training of many users in torch, for the in-process transport.

Read `transport` first. `roads` decides whether users train alone (`alone`) or together
(`side_by_side`, `lanes`, `products`), and `trainer` sums their contributions.
"""

from fedpriv.engine.measuring import SimulationOnlyDiagnostics, check_metrics
from fedpriv.engine.task import Task
from fedpriv.engine.task_checks import check_task
from fedpriv.engine.transport import InProcessTransport, device_named

__all__ = [
    "InProcessTransport",
    "SimulationOnlyDiagnostics",
    "Task",
    "check_metrics",
    "check_task",
    "device_named",
]
