"""Which services does `ask_a_service.py` take for one that honours its keys?

Crash model: nobody dies. Real HTTP servers around the lab's `create_job` each break one
promise, or behave as a published API does. Some lose, delay or garble their answers.

Found: each broken promise is named, and none of these services is told "one job", with
one limit. A service that makes a job and tells no one of it can't be seen through its
answers, so the verdict says how many jobs there must be, and that number gives it away.
"""

import json
import threading
import unittest
import uuid
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from retry_lab import KeyPayloadConflict, create_job
from tests.support import ERROR_LINE, ROOT, LabTest, run, side_by_side

PROGRAM = ROOT / "tests" / "experiments" / "ask_a_service.py"
SECRET = "s3cret"
WORDS = ("--key-header", "Idempotency-Key", "--id-field", "id", "--yes")
BODIES = ("--body", '{"report": "weekly"}', "--other-body", '{"report": "daily"}')
HEADER = ("--header", f"Authorization: Bearer {SECRET}")
GOOD = "same key: one job, in all that was asked, if just 3 are there"
FIRST = "error: no job in the first answer: "


def print_nothing(*_: object) -> None: ...


class Service(ThreadingHTTPServer):
    """Answers each call as `behaviour(service, key, report)` says: status and id."""

    daemon_threads = False  # so that closing it waits for the calls in flight

    def __init__(self, behaviour: "Callable[..., tuple]", database: str) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.behaviour, self.database = behaviour, database
        self.calls: list[str] = []
        self.second_came = threading.Event()
        self.both = threading.Barrier(2, timeout=10)

    handle_error = print_nothing  # of a caller that has hung up

    def __enter__(self):
        threading.Thread(target=self.serve_forever, args=[0.05]).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    timeout = 10

    def do_POST(self) -> None:  # it tells the secrets, to see that they stay unprinted
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        key, service = self.headers["Idempotency-Key"], self.server
        service.calls.append(key)
        status, answer = service.behaviour(service, key, request["report"])
        if isinstance(answer, int):
            told = self.headers.get("Authorization", "") + self.path
            answer = {"id": answer, "heard": told}
        if not isinstance(answer, bytes):
            answer = json.dumps(answer).encode()
        self.send_response(status, SECRET)
        self.send_header("Location", "/elsewhere")
        self.end_headers()
        self.wfile.write(answer)

    log_message = print_nothing


def honours(service: Service, key: str, report: str) -> "tuple[int, object]":
    try:
        return 201, create_job(service.database, key, report)
    except KeyPayloadConflict:
        return 422, None


def ignores(service: Service, key: str, report: str) -> "tuple[int, object]":
    return honours(service, str(uuid.uuid4()), report)


def in_flight(service: Service, key: str, report: str) -> "tuple[int, object]":
    if key.endswith("A"):  # the key of the two calls at once
        if service.calls.count(key) == 2:
            service.second_came.set()
            return 409, None
        service.second_came.wait(10)
    return honours(service, key, report)


def looks_before_it_locks(service: Service, key: str, report: str) -> tuple:
    if key.endswith("A"):
        service.both.wait()  # both calls have looked, and found nothing
        key = str(uuid.uuid4())
    return honours(service, key, report)


SECOND = "same key again: a second job"
LATE = "after the wait: "
SAME = "the same id, but another answer"
OTHERS = "another key's job"
# What a service does with a call, the jobs it then has, and the last line of output.
# fmt: off
SERVICES = [
    (honours, 3, GOOD),
    (in_flight, 3, GOOD),
    (looks_before_it_locks, 4, "two at once: a second job"),
    # It ignores keys; replays the first answer, or makes a job, for another request.
    (ignores, 2, SECOND),
    (lambda s, k, r: honours(s, k, "weekly"), 3, "other request: the first answer"),
    (lambda s, k, r: honours(s, k + r, r), 4, "other request: a second job"),
    # The key is a hash of the request; is compared without case; is cut.
    (lambda s, k, r: honours(s, r, r), 2, ("other request: a second job; two at once: "
     f"{OTHERS}; hung up, again: {OTHERS}; new key: {OTHERS}")),
    (lambda s, k, r: honours(s, k.lower(), r), 2, f"two at once: {OTHERS}"),
    (lambda s, k, r: honours(s, k[:8], r), 1,
     f"two at once: {OTHERS}; hung up, again: {OTHERS}; new key: {OTHERS}"),
    # It keeps a 500 for a key; makes the job and answers 500; rejects each retry.
    (lambda s, k, r: (500, 0) if k.endswith("b") else honours(s, k, r), 2,
     "hung up, again: no job's id; new key: no job's id"),
    (lambda s, k, r: (500, honours(s, k, r)[1]), 1, FIRST + "500"),
    (lambda s, k, r: (409, 0) if s.calls.count(k) > 1 else honours(s, k, r), 1,
     "same key again: no job's id"),
    # In the end it forgets a key; it rejects it as expired.
    (lambda s, k, r: honours(s, k + "x" * (len(s.calls) > 7), r), 4,
     LATE + "a second job"),
    (lambda s, k, r: (412, 0) if len(s.calls) > 7 else honours(s, k, r), 3,
     LATE + "no job's id"),
    # Another id each time; another answer each time; no id; a redirect; a page.
    (lambda s, k, r: (201, honours(s, k, r) and len(s.calls)), 1, SECOND),
    (lambda s, k, r: (201, {"id": honours(s, k, "")[1], "at": str(uuid.uuid4())}), 3,
     (f"same key again: {SAME}; other request: {SAME}; two at once: {SAME}; "
     f"after the wait: {SAME}")),
    (lambda s, k, r: (201, {}), 0, FIRST + "201 no id (KeyError)"),
    (lambda s, k, r: (307, 0), 0, FIRST + "307"),
    (lambda s, k, r: (200, b"<html>"), 0, FIRST + "200 no id (JSONDecodeError)"),
    # The limit: a job that no answer tells. There are four now, not the three told.
    (lambda s, k, r: honours(
        s, k + "x" * (k.endswith("b") and s.calls.count(k) == 1), r), 4, GOOD),
]
# fmt: on


class AskAService(LabTest):
    def ask(self, number: int) -> "tuple[int, str, int, int]":
        """Return the program's exit status and output, and the calls and jobs made."""
        database = self.new_database(f"{number}.sqlite")
        with Service(SERVICES[number][0], database) as service:
            url = f"http://127.0.0.1:{service.server_port}/jobs?token={SECRET}"
            words = (PROGRAM, url, *WORDS, *BODIES, *HEADER, "--after", "0.1")
            done = run(*words, timeout=30)
        jobs = len(self.rows(database)[0])
        return done.returncode, done.stdout + done.stderr, len(service.calls), jobs

    def test_each_service_gets_its_verdict(self) -> None:
        ends = side_by_side(self.ask, range(len(SERVICES)))
        for (_, jobs, verdict), (status, said, calls, made) in zip(SERVICES, ends):
            with self.subTest(verdict):
                self.assertEqual(said.splitlines()[-1], verdict)
                self.assertEqual((status, made), (0 if verdict == GOOD else 1, jobs))
                self.assertLessEqual(calls, 8)
                self.assertNotIn(SECRET, said)
                self.assertTrue(said.isascii())
                table = [line for line in said.splitlines() if line[:1] == "|"]
                self.assertTrue(all(len(line) == 79 for line in table), said)

    def test_bad_usage_is_one_line_and_sends_nothing(self) -> None:
        url = f"http://127.0.0.1:9/?{SECRET}"
        for words in (
            [url, *WORDS[:-1]],  # without --yes
            [url.replace("//", f"//me:{SECRET}@"), *WORDS],
            [url, *WORDS, *HEADER[:1], *HEADER[1].split()],
            [url, *WORDS, "--header", SECRET],
            [url, *WORDS, "--body", SECRET],
            [url, *WORDS, "--body", BODIES[-1]],
            [url, *WORDS, "--after", "nan"],
        ):
            done = run(PROGRAM, *BODIES, *words, timeout=30)
            self.assertEqual(done.returncode, 2, words)
            self.assertRegex(done.stderr, ERROR_LINE)
            self.assertNotIn(SECRET, done.stdout + done.stderr)


if __name__ == "__main__":
    unittest.main()
