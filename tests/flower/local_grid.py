"""A Flower grid in this process: each node is a ClientApp's settings, and a thread at a time."""

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from flwr.app import Context, Error, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from fedpriv.flower.grid import app as client_app

App = Callable[[Message, Context], Message]
_TURN = threading.Lock()


def in_turns(app: App) -> App:
    """An app that, as in a process of Flower's, answers one message at a time.

    Threads that read arrays at once can make `ast.parse` fail before Python 3.11.8 (gh-106905).
    """

    def answer(message: Message, context: Context) -> Message:
        with _TURN:
            return app(message, context)

    return answer


app = in_turns(client_app)


class LocalGrid(Grid):
    """Hands each message to the app of its node, and keeps the reply until it is pulled.

    Args:
        nodes: id → app and settings.
    """

    def __init__(self, nodes: Mapping[int, tuple[App, Mapping[str, object]]]) -> None:
        # What Flower sets at the start of a run, and each message is made with.
        TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1
        self.nodes = dict(nodes)
        self.sent: list[Message] = []
        self._numbers = itertools.count(1)
        self._replies: dict[str, Future[Message]] = {}
        self._pool = ThreadPoolExecutor(max_workers=16)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def set_run(self, run: object) -> None:
        raise NotImplementedError

    @property
    def run(self) -> object:
        raise NotImplementedError

    def create_message(self, *args: object, **kwargs: object) -> Message:
        raise NotImplementedError

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        return [self._replies[name].result(timeout) for name in self.push_messages(messages)]

    def get_node_ids(self) -> Iterable[int]:
        return list(self.nodes)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return list(self._pushed(messages))

    def _pushed(self, messages: Iterable[Message]) -> Iterator[str]:
        for message in messages:
            if message.metadata.dst_node_id not in self.nodes:
                continue  # as the grid of Flower's simulation does
            name = str(next(self._numbers))
            vars(message.metadata)["_message_id"] = name
            self.sent.append(message)
            self._replies[name] = self._pool.submit(self._run, message)
            yield name

    def _run(self, message: Message) -> Message:
        node = message.metadata.dst_node_id
        app, settings = self.nodes[node]
        context = Context(1, node, dict(settings), RecordDict(), {})
        try:
            return app(message, context)
        except Exception as error:
            return Message(Error(code=2, reason=str(error)), reply_to=message)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        ready = [name for name in message_ids if self._replies[name].done()]
        return [self._replies[name].result() for name in ready]
