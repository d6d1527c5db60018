"""Local training of many users at once in torch, behind the in-process transport."""

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
