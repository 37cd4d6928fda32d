"""Recording in a program that was started without memtrace: what runs inside it, from now on.

``memtrace attach`` has the program's interpreter run a short script, which calls :func:`begin`. A watcher's order
``detach`` ends it: hooks, history, thread, socket and what was added to ``sys.path`` are gone then. PyTorch can't
detach the observer of errors; it stays, and does nothing. So do imported modules.
"""

from __future__ import annotations

import atexit
import sys
from pathlib import Path

from memtrace.errors import NoAnswerError
from memtrace.record import backend as backend_module
from memtrace.record import recorder as recorder_module
from memtrace.record.live import LiveServer, let_watchers_in
from memtrace.record.recorder import Recorder, RecordOptions

SCRIPT = """
import sys
def attach():
    try:
        if "torch" not in sys.modules:
            raise RuntimeError("the program has not imported PyTorch")
        added = []
        try:
            import memtrace.record.attach
        except ImportError:
            sys.path.append({root!r})
            added.append({root!r})
        from memtrace.record.attach import begin
        begin({folder!r}, {sockets!r}, {stacks!r}, {on_alarm!r}, added)
    except BaseException as error:
        with open({failed!r}, "w") as out:
            out.write(type(error).__name__ + ": " + str(error)[:400])
attach()
"""


def begin(folder: str, sockets: str, stacks: str, on_alarm: str, added: list[str]) -> None:
    """Record this process live until it ends or a watcher detaches. Runs in the main thread, between two byte codes.

    Recordings go to ``folder``, the socket to ``sockets``; ``added`` was put into ``sys.path`` for this. Raises
    NoAnswerError where it is recorded already, MissingDependencyError where it can't be.
    """
    if recorder_module.active() is not None:
        raise NoAnswerError("the program is recorded already")
    backend = backend_module.get()
    backend.require()
    stem = Path(sys.argv[0]).stem if sys.argv and sys.argv[0] else "attached"
    inner = let_watchers_in(Recorder(RecordOptions(Path(folder), stem, stacks=stacks, live=True, on_alarm=on_alarm)))
    server = inner.live
    assert isinstance(server, LiveServer)

    def end() -> None:
        inner.conclude(None)
        atexit.unregister(end)
        for entry in added:
            if entry in sys.path:
                sys.path.remove(entry)

    server.folder, server.on_detach = Path(sockets), end
    atexit.register(end)
    inner.follow()
    backend.when_ready(inner.begin)
