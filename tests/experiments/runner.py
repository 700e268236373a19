"""The caller's half, to carry home: one note per operation, settled first.

A model that is told "no answer" calls the tool again. Is that a retry, or a
second wish? The runner need not know. Before it sends anything new, it sends
what has no answer yet once more, with the noted key and the noted request.

conversation   turns that come one after the other: 'chat-7'
turn           one message of the model, named before it comes here: 'turn-3'
call           one request in a turn: 'weekly'; each is its own operation
note           the runner's record of an operation: its key, what was heard

Start reading at take_turn. Before you call it, save the model's message with
its name and its calls, and hold a lock for its conversation, one that ends with
the process that holds it. decide wants that lock too. `notes` is a connection
of their own, on which NOTES was run once.
"""

import logging
import sqlite3
import uuid
from collections import namedtuple
from collections.abc import Callable

NOTES = """CREATE TABLE IF NOT EXISTS notes (
    conversation TEXT NOT NULL,
    turn TEXT NOT NULL,
    place INTEGER NOT NULL,  -- of the call in its turn
    request TEXT NOT NULL,
    key TEXT NOT NULL UNIQUE,
    state TEXT NOT NULL CHECK (state IN
        ('planned', 'sent', 'answered', 'rejected', 'withheld', 'closed')),
    answer TEXT,  -- such as 'job 1', or why it was rejected
    first_sent REAL,
    said TEXT,  -- what the model was told about this call
    told_in TEXT,  -- the turn in which it was told how the operation ended
    PRIMARY KEY (conversation, turn, place),
    CHECK ((state IN ('answered', 'rejected')) = (answer IS NOT NULL))
)"""

# What the model is told starts with a status word that a program can read.
# Then comes the outcome, then what to do.
DONE = "done: {answer}. Call again only if another one is wanted."
DONE_EARLIER = (
    "done: {answer}. This answers your earlier call with the same request, "
    "which had no answer until now; nothing more was made for this call. "
    "Call again only if another one is wanted."
)
REJECTED = (
    "rejected: {answer}. Nothing was made for this call. Do not repeat it "
    "unchanged, unless the reason says that it can succeed later."
)
UNKNOWN = (
    "unknown: no answer came, so this may or may not have been done. "
    "Assume neither. You may make the same call again, in the same words: it "
    "makes no second, and asks about this one where that is still safe. If it "
    "stays unknown, tell the user that a person has to look."
)
NOT_SENT = (
    "not sent: your earlier call {request!r} had to be settled first, and it "
    "is {outcome}. Nothing was made for this call. Make it again if it is "
    "still wanted."
)
NOT_SENT_YET = (
    "not sent: your earlier call {request!r} is still unknown, and nothing "
    "else is sent before it is settled. Nothing was made for this call. Repeat "
    "the earlier call first. If it stays unknown, tell the user that a person "
    "has to look."
)
# Two more say what a person decided.
NOT_DONE = (
    "not sent: a person found that your earlier call with the same request "
    "was not carried out. Nothing was made for this call. Make it again if it "
    "is still wanted."
)
CLOSED = (
    "unknown: a person could not find out whether this was done. It will not "
    "be asked about again, so the same call may now make a second one. Make "
    "it only if the user accepts that."
)

# What each state of an operation means for its call, and in a few words.
TEXTS = {
    "answered": DONE,
    "rejected": REJECTED,
    "sent": UNKNOWN,
    "withheld": NOT_DONE,
    "closed": CLOSED,
}
OUTCOMES = {
    "answered": "done: {answer}",
    "rejected": "rejected: {answer}",
    "withheld": "not done, as a person found",
    "closed": "unknown for good: calling that again may make a second one",
}
DECISIONS = {"done": "answered", "not done": "withheld", "unknown": "closed"}

LOG = logging.getLogger(__name__)
Note = namedtuple("Note", "key request state answer first_sent said")
READ = "SELECT key, request, state, answer, first_sent, said FROM notes WHERE "


class Rejected(Exception):
    """The service rejected a request.

    `looked_up` is true only if the service looked the key up, and no earlier
    attempt with this key can still succeed, as with a conflict.
    """

    def __init__(self, reason: str, looked_up: bool = False) -> None:
        super().__init__(reason)
        self.looked_up = looked_up


def take_turn(
    notes: sqlite3.Connection,
    conversation: str,
    turn: str,
    calls: "list[str]",
    send: "Callable[[str, str], str]",
    now: float,
    retention: float,
) -> "list[str]":
    """Take one turn of the model; return what it is told about each call.

    `send(key, request)` makes an attempt, within a time limit of its own. It
    returns the service's answer or raises Rejected; anything else is silence.
    `now` is the wall-clock time, and `retention` for how long the service
    surely keeps a receipt, both in seconds.
    Taken again after a restart, a turn that was told says the same again and
    sends nothing; one that was interrupted goes on with its noted keys.
    Raises ValueError if the turn had other calls, and RuntimeError if another
    turn of the conversation has not been told to its end.
    """
    plan(notes, conversation, turn, calls)
    if any(note.said is None for note in of_turn(notes, conversation, turn)):
        earlier = untold(notes, conversation, turn)
        if earlier:
            # Nothing new is sent in a turn that begins like that.
            settle(notes, earlier.key, send, now, retention)
        else:
            for note in of_turn(notes, conversation, turn):
                if not settle(notes, note.key, send, now, retention):
                    break  # the calls behind a silence are withheld
        tell(notes, conversation, turn)
    return [note.said for note in of_turn(notes, conversation, turn)]


def plan(
    notes: sqlite3.Connection, conversation: str, turn: str, calls: "list[str]"
) -> None:
    """Note each call, with a key of its own, before any of them is sent."""
    for request in calls:
        # A request that can't be sent must not be noted: it would block others.
        request.encode()  # your tool's own checks belong here as well
    with notes:
        notes.execute("BEGIN IMMEDIATE")
        noted = of_turn(notes, conversation, turn)
        if noted:  # before a restart, and those keys must stand
            if [note.request for note in noted] != list(calls):
                raise ValueError(f"{turn} had other calls: {noted}")
            return
        unfinished = "conversation = ? AND said IS NULL"
        if notes.execute(READ + unfinished, (conversation,)).fetchone():
            raise RuntimeError(f"before {turn}, take the turn before it again")
        insert = """INSERT INTO notes
            (conversation, turn, place, request, key, state)
            VALUES (?, ?, ?, ?, ?, 'planned')"""
        for place, request in enumerate(calls):
            key = uuid.uuid4().hex
            notes.execute(insert, (conversation, turn, place, request, key))


def settle(
    notes: sqlite3.Connection,
    key: str,
    send: "Callable[[str, str], str]",
    now: float,
    retention: float,
) -> bool:
    """Make an attempt unless there is an answer; return whether there is one."""
    with notes:
        notes.execute("BEGIN IMMEDIATE")
        note = Note(*notes.execute(READ + "key = ?", (key,)).fetchone())
        if note.state == "planned":
            # Before the send: after it, "planned" might mean "sent".
            sent = """UPDATE notes SET state = 'sent', first_sent = ?
                WHERE key = ?"""
            notes.execute(sent, (now, key))
        elif note.state != "sent":
            return note.state in ("answered", "rejected")
        elif now - note.first_sent > retention:
            return False  # the key may be as good as new: a person has to look

    state = "answered"
    try:
        answer = send(key, note.request)
        answer.encode()  # an answer that can't be noted is silence as well
    except Rejected as rejection:
        # After a silence it says nothing about the attempt before it, unless
        # the service looked the key up, and so knows of that attempt.
        if note.state == "sent" and not rejection.looked_up:
            return False
        state, answer = "rejected", str(rejection)
    except Exception:  # a death, a time-out, "locked": all are silence
        LOG.warning("no answer to %s", key, exc_info=True)
        return False
    with notes:  # only now: noted before, a death would pass for an answer
        heard = """UPDATE notes SET answer = ?, state = ?
            WHERE key = ? AND state = 'sent'"""
        notes.execute(heard, (answer, state, key))
    return True


def tell(notes: sqlite3.Connection, conversation: str, turn: str) -> None:
    """Withhold what was not sent, and note what the model is told."""
    at = (conversation, turn)
    with notes:
        notes.execute("BEGIN IMMEDIATE")
        if all(note.said for note in of_turn(notes, *at)):
            return  # another process took this turn as well, and was faster
        withhold = """UPDATE notes SET state = 'withheld'
            WHERE conversation = ? AND turn = ? AND state = 'planned'"""
        notes.execute(withhold, at)
        calls = of_turn(notes, *at)
        for note, text in zip(calls, texts(calls, untold(notes, *at))):
            say = "UPDATE notes SET said = ? WHERE key = ?"
            notes.execute(say, (text, note.key))
        told = """UPDATE notes SET told_in = ?
            WHERE conversation = ? AND told_in IS NULL AND state != 'sent'"""
        notes.execute(told, (turn, conversation))


def texts(calls: "list[Note]", earlier: "Note | None") -> "list[str]":
    """Return what the model is told of each call, and so of the earlier one."""
    said = []
    came_first = earlier  # what a withheld call had to wait for
    for call in calls:
        if call.state != "withheld":
            said.append(TEXTS[call.state].format(answer=call.answer))
            came_first = call
        elif earlier and call.request == earlier.request:
            text = TEXTS[earlier.state]
            if earlier.state == "answered":
                text = DONE_EARLIER
            said.append(text.format(answer=earlier.answer))
            earlier = None  # one operation answers one call
        elif came_first.state == "sent":
            said.append(NOT_SENT_YET.format(request=came_first.request))
        else:
            outcome = OUTCOMES[came_first.state]
            outcome = outcome.format(answer=came_first.answer)
            text = NOT_SENT.format(request=came_first.request, outcome=outcome)
            said.append(text)
    return said


def decide(
    notes: sqlite3.Connection,
    key: str,
    found: str,
    answer: "str | None" = None,
) -> None:
    """Write down what a person found out about an operation that is unknown.

    `found` is "done", and then there is an answer; or "not done", and then it
    can't be done later either; or "unknown". The next call is told. Raises
    ValueError for anything else, and if the key's operation is not unknown.
    """
    if found not in DECISIONS or (found == "done") != (answer is not None):
        raise ValueError(f"can't write down {found!r} with answer {answer!r}")
    decision = """UPDATE notes SET state = ?, answer = ?
        WHERE key = ? AND state = 'sent' AND said IS NOT NULL"""
    with notes:
        done = notes.execute(decision, (DECISIONS[found], answer, key))
        if done.rowcount != 1:
            raise ValueError(f"no unknown operation has the key {key}")


def of_turn(
    notes: sqlite3.Connection, conversation: str, turn: str
) -> "list[Note]":
    """Return the notes of a turn, in the order of its calls."""
    where = "conversation = ? AND turn = ? ORDER BY place"
    rows = notes.execute(READ + where, (conversation, turn))
    return [Note(*row) for row in rows]


def untold(
    notes: sqlite3.Connection, conversation: str, turn: str
) -> "Note | None":
    """Return the operation of an earlier turn whose end was not told, if any.

    There is one at most: until it has been told, nothing new is sent.
    """
    where = "conversation = ? AND turn != ? AND told_in IS NULL"
    row = notes.execute(READ + where, (conversation, turn)).fetchone()
    return Note(*row) if row else None
