"""Local training of many users at once in torch, behind the in-process transport."""

from fedpriv.engine.task import Task, check_task
from fedpriv.engine.transport import InProcessTransport, device_named

__all__ = ["InProcessTransport", "Task", "check_task", "device_named"]
