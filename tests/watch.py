"""How does a test see a process's SQL statements go by, and stop it at one of them?

    with watched(print): ...                       # every statement, and every close
    python -m tests.watch COMMIT SCRIPT [ARG ...]  # SCRIPT, held just before its COMMIT

SQLite's own trace is the seam: no program is changed. The second form says on stderr
what it has come to, and goes on when its stdin is closed, or ends after LIMIT.
"""

import contextlib
import faulthandler
import functools
import runpy
import sqlite3
import sys
from collections.abc import Callable, Iterator

LIMIT = 30  # seconds in which whatever a test waits for has happened, or never will


@contextlib.contextmanager
def watched(watch: "Callable[[str], object]") -> "Iterator[None]":
    """Call `watch` with each SQL statement just before SQLite begins it, or "close".

    This holds for each connection that sqlite3.connect opens meanwhile. `watch` may wait
    or end the process; what it raises is swallowed.
    """

    class Watched(sqlite3.Connection):
        def __init__(self, *arguments: object, **options: object) -> None:
            super().__init__(*arguments, **options)
            self.set_trace_callback(lambda sql: watch(" ".join(sql.split())))

        def close(self) -> None:
            watch("close")
            super().close()

    connect = sqlite3.connect
    sqlite3.connect = functools.partial(connect, factory=Watched)
    try:
        yield
    finally:
        sqlite3.connect = connect


def held_command(place: str, script: object, *arguments: object) -> "list[str]":
    """Return the command, for the project's folder, that runs `script` up to `place`."""
    command = [sys.executable, "-B", "-S", "-m", "tests.watch", place, script]
    return [str(word) for word in (*command, *arguments)]


if __name__ == "__main__":
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    place, script, *arguments = sys.argv[1:]
    sys.argv = [script, *arguments]

    def hold(statement: str) -> None:
        if statement.startswith(place):
            print(place, file=sys.stderr, flush=True)
            sys.stdin.read()

    with watched(hold):
        runpy.run_path(script, run_name="__main__")
