"""Does a service honour its operation keys? Ask it, in its test environment.

Exit status: 0 they are honoured, 1 they are not or it is unclear, 2 bad usage
"""

import argparse
import json
import sys
import time
import uuid
from collections import namedtuple
from http.client import HTTPConnection, HTTPSConnection
from multiprocessing.pool import ThreadPool
from urllib.parse import urlsplit

CONNECTIONS = {"http": HTTPConnection, "https": HTTPSConnection}
JSON = "Content-Type: application/json"
REJECTED = ("400", "409", "412", "422")  # 409 may also mean: in flight
ADVICE = {  # what speaks for a service, and what to do next
    "one job": "same request and key until answered",
    "rejected": "the request must stay the same",
    "a new job": "a new key only for a second job",
}
# The job's id or None, what was said (mostly the status), and the whole answer.
Answer = namedtuple("Answer", "job said body")


def create(service, key, request, hang_up=False):
    """Call over HTTP; return the Answer. Rewrite this for what is no HTTP."""
    connection = service.connection(service.url.netloc)
    path = service.url._replace(scheme="", netloc="", fragment="").geturl()
    headers = {**service.headers, service.key_header: key}
    connection.request("POST", path, request.encode(), headers)
    if hang_up:
        connection.close()
        return Answer(None, "hung up", None)
    response = connection.getresponse()
    said = str(response.status)
    if not said.startswith("2"):  # a redirect is not followed
        return Answer(None, said, None)
    try:
        body = json.loads(response.read(65536))  # more is not read
        job = body[service.id_field]
        if type(job) not in (int, str):
            raise TypeError(job)
    except (ValueError, RecursionError, LookupError, TypeError) as error:
        return Answer(None, f"{said} no id ({type(error).__name__})", None)
    return Answer(job, f"{said} #{ascii(str(job))[1:-1][-4:]}", body)


def call(*arguments):
    """Return what `create` returns within ten seconds, or else silence."""
    with ThreadPool(1) as pool:
        try:
            return pool.apply_async(create, arguments).get(10)
        except Exception as error:  # noqa: BLE001
            return Answer(None, f"silence ({type(error).__name__})", None)


def ask(service):
    """Make eight calls at most; yield each question, its answers, a finding."""
    # A service that cuts keys, or ignores their case, takes these for one.
    stem = str(uuid.uuid4())[:-1]
    key, twin, third = stem + "a", stem + "A", stem + "b"
    first = call(service, key, service.body)
    if first.job is None:
        raise SystemExit(f"error: no job in the first answer: {first.said}")
    again = call(service, key, service.body)
    yield "same key again", [first, again], one_job([first, again])
    if again.job != first.job:
        return  # to ask on would only make more jobs
    other = call(service, key, service.other_body)
    found = one_job([first, other]).replace("one job", "the first answer")
    if other.said in REJECTED:
        found = "rejected"
    yield "other request", [other], found
    pair = ThreadPool(2).starmap(call, [(service, twin, service.body)] * 2)
    told = [answer for answer in pair if answer.said not in REJECTED]
    yield "two at once", pair, one_job(told, but_not=[first, other])
    lost = call(service, third, service.body, True)
    time.sleep(1)  # it may still be running
    retry = call(service, third, service.body)
    found = one_job([retry], but_not=[first, other, *pair])
    yield "hung up, again", [lost, retry], found
    yield "new key", [first, retry], found.replace("one job", "a new job")
    if service.after:
        time.sleep(service.after)
        later = call(service, key, service.body)
        yield "after the wait", [first, later], one_job([first, later])


def one_job(answers, but_not=()):
    """Say whether all answers tell one job, and not the job of another key."""
    jobs = {answer.job for answer in answers}
    if None in jobs or not jobs:
        return "no job's id"
    if len(jobs) > 1:
        return "a second job"
    if jobs & {answer.job for answer in but_not}:
        return "another key's job"
    if any(answer.body != answers[0].body for answer in answers):
        return "the same id, but another answer"
    return "one job"


def main():
    """Ask, print what was seen, and return the exit status."""
    rows = list(ask(parse()))
    line = "| {:14} | {:20} | {:35} |"
    print(line.format("Question", "Seen", "What to do next"))
    print(line.format("-" * 14, "-" * 20, "-" * 35))
    for question, answers, found in rows:
        seen = ", ".join(answer.said.split(" (")[0] for answer in answers)
        advice = ADVICE.get(found, "send nothing: look it up, or ask")
        print(line.format(question, seen, advice))
    bad = [f"{row[0]}: {row[2]}" for row in rows if row[2] not in ADVICE]
    jobs = {answer.job for row in rows for answer in row[1]} - {None}
    good = f"same key: one job, in all that was asked, if just {len(jobs)} are there"
    print("\n" + ("; ".join(bad) or good))
    return 1 if bad else 0


def parse():
    """Return the words of the command line; exit with 2 if they are bad."""
    parser = argparse.ArgumentParser(epilog=__doc__, allow_abbrev=False)
    parser.error = lambda text: parser.exit(2, f"error: {text}\n")
    parser.add_argument("url")
    for name in ("--key-header", "--id-field", "--body", "--other-body"):
        parser.add_argument(name, required=True)
    parser.add_argument("--header", action="append", default=[JSON])
    parser.add_argument("--after", type=float, default=0, metavar="SECONDS")
    parser.add_argument("--yes", action="store_true", help="make the jobs")
    service, unknown = parser.parse_known_args()
    try:
        service.url = url = urlsplit(service.url)
        service.connection = CONNECTIONS[url.scheme]
        service.headers = dict(text.split(": ", 1) for text in service.header)
        same = json.loads(service.body) == json.loads(service.other_body)
    except (LookupError, ValueError, RecursionError):
        parser.error("URL: http(s)://...; header: 'Name: value'; bodies: JSON")
    if same or unknown or "@" in url.netloc or not 0 <= service.after < 1e6:
        parser.error("bodies differ, a URL has no password, headers are quoted")
    print(f"Up to 8 jobs at {url.scheme}://{url.netloc}{url.path}", flush=True)
    if not service.yes and not (sys.stdin.isatty() and input("y/n? ") == "y"):
        parser.error("nothing was sent; to send it, add --yes")
    return service


if __name__ == "__main__":
    raise SystemExit(main())
