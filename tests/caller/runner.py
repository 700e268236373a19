"""The caller's half, to carry home: one note per operation, settled first.

A model that is told "no answer" calls the tool again: a retry, or a new wish?
The runner need not know. Before it sends anything new, it sends what has no
answer once more, with the noted key and request.

turn   one message of the model, with some calls: 'message-3'
call   one request in a turn: 'weekly'; each is an operation of its own
note   the runner's record of an operation: its key, and what was heard

Each conversation has a file of notes. Open it in the thread that uses it, by
sqlite3.connect(path, isolation_level=None), and executescript(NOTES). That is
its lock too, held until the connection ends; a person who decides needs it.
Save the model's message before its turn is taken, under the turn's name. After
a restart take the turn again, until its texts are saved too. The message's own
id is a good name, and a counter is none: no name may be used twice. What
take_turn raises must end the run: it is no text for the model.
A loop that awaits has `async def` at take_turn and settle, and `await` where
they call settle and send.
"""

import logging
import time
import uuid
from collections.abc import Callable
from sqlite3 import Connection, Row

NOTES = """PRAGMA locking_mode = EXCLUSIVE;
BEGIN EXCLUSIVE;  -- "database is locked": another process takes a turn
CREATE TABLE IF NOT EXISTS notes (
    turn TEXT NOT NULL,
    place INTEGER NOT NULL,  -- of the call in its turn
    request TEXT NOT NULL,
    key TEXT NOT NULL UNIQUE,
    retention REAL NOT NULL,  -- seconds for which the key is surely valid
    -- sent: perhaps done; ended: what came of it is known; closed: also told
    state TEXT NOT NULL CHECK (state IN ('planned', 'sent', 'ended', 'closed')),
    heard TEXT,  -- what came of it so far, as it is told
    first_sent REAL,
    said TEXT,  -- what the model was told about this call
    PRIMARY KEY (turn, place)
);
COMMIT;"""
OF_TURN = "turn = ? ORDER BY place"
# One at most: nothing new is sent until the model was told what came of it.
EARLIER = "turn != ? AND state IN ('sent', 'ended')"
UNKNOWN = "state = 'sent' AND said IS NOT NULL"
# The model is told a status word, what came of its call, and what to do.
ADVICE = {
    "done": "Call again only if another one is wanted.",
    "rejected": "Nothing was made. Repeat it only if the reason allows that.",
    "unknown": "Assume neither that this was done nor that it was not. The "
    "same call again makes no second one: it asks about this one, while that "
    "is safe. If it stays unknown, tell the user that a person has to look.",
    "not sent": "Nothing was sent for this call. Repeat it if still wanted.",
}
LOG = logging.getLogger(__name__)
Check = Callable[[str], float]
Send = Callable[[str, str], "str | int"]


class Rejected(Exception):
    """The service rejected a request, and did nothing for its key."""


class Conflict(Exception):
    """The key is on record for another request: an attempt got through."""


def take_turn(
    notes: Connection, turn: str, calls: list[str], check: Check, send: Send
) -> list[str]:
    """Take one turn of the model; return what it is told about each call.

    `check(request)` returns for how many seconds the service surely keeps a
    receipt, or raises for what can't be sent: no such tool, text it can't take.
    `send(key, request)` makes one attempt, within a time limit, and returns its
    answer or raises Rejected or Conflict. Any other Exception is silence, also
    a group with Rejected in it, and so is a return of neither int nor text; all
    are logged as errors, for they may be mistakes. A `send` that repeats after
    a silence must not raise Rejected. A cancelled task ends the turn here.
    What has no answer is sent once more in the next turn, while its key is
    valid, until a person decides. A turn that was told says the same again and
    sends nothing. One that was interrupted goes on, with its noted keys.
    Raises ValueError if the turn had other calls, and RuntimeError if another
    turn must be taken again first, or given to `tell`.
    """
    plan(notes, turn, calls, check)
    if any(note["said"] is None for note in read(notes, OF_TURN, turn)):
        # Nothing new is sent in a turn that begins with an earlier operation.
        for note in read(notes, EARLIER, turn) or read(notes, OF_TURN, turn):
            if not settle(notes, note["key"], send):
                break  # the calls behind a silence are withheld
        tell(notes, turn)
    return [note["said"] for note in read(notes, OF_TURN, turn)]


def plan(notes: Connection, turn: str, calls: list[str], check: Check) -> None:
    """Note each call, with a key of its own, before any of them is sent."""
    notes.execute("BEGIN")  # all notes, or none
    with notes:
        noted = read(notes, OF_TURN, turn)
        if noted:  # before a restart, and those keys must stand
            if [note["request"] for note in noted] != [*map(storable, calls)]:
                raise ValueError(f"turn {turn!r} had other calls")
            return
        for note in read(notes, "said IS NULL"):
            raise RuntimeError(f"before {turn!r}, take {note['turn']!r} again")
        for place, request in enumerate(calls):
            state, heard, retention = "planned", None, 0.0
            try:
                request.encode()  # or SQLite can't take it
                retention = check(request)
            except Exception as reason:
                LOG.warning("can't be sent: %.80r", request, exc_info=True)
                state, heard = "ended", storable(f"rejected: {reason!r}")
            note = (turn, place, storable(request), uuid.uuid4().hex)
            add = "INSERT INTO notes VALUES (?, ?, ?, ?, ?, ?, ?, NULL, NULL)"
            notes.execute(add, (*note, retention, state, heard))


def settle(notes: Connection, key: str, send: Send) -> bool:
    """Make an attempt unless there is an answer; return whether there is."""
    (note,) = read(notes, "key = ?", key)
    if note["state"] == "planned":
        sent = """UPDATE notes SET state = 'sent', first_sent = ?,
            heard = 'unknown: no answer' WHERE key = ?"""
        with notes:  # before the send: after it, "planned" might mean "sent"
            notes.execute(sent, (time.time(), key))
    elif note["state"] != "sent":
        return True
    elif not 0 <= time.time() - note["first_sent"] < note["retention"]:
        heard = "unknown: its key may have expired"  # a person has to look
        with notes:
            notes.execute("UPDATE notes SET heard=? WHERE key=?", (heard, key))
        return False
    try:
        answer = send(key, note["request"])
        if not (type(answer) is int or isinstance(answer, str) and answer):
            raise TypeError(f"send returned {answer!r}")
        heard = f"done: {answer}"
    except Conflict as reason:
        heard = f"unknown: its key is on record for another request: {reason}"
    except Rejected as reason:
        heard = f"rejected: {reason}"
        if note["state"] == "sent":  # it says nothing about the one before it
            heard = f"unknown: the last attempt was {heard}"
    except Exception as error:  # a death, a time-out, "locked": all are silence
        LOG.exception("no answer for key %s", key)
        heard = f"unknown: no answer ({type(error).__name__})"
    state = "sent" if heard.startswith("unknown") else "ended"
    with notes:  # only now: noted before, a death would pass for an answer
        hear = "UPDATE notes SET state=?, heard=? WHERE key=? AND state='sent'"
        notes.execute(hear, (state, storable(heard), key))
    return state == "ended"


def tell(notes: Connection, turn: str) -> None:
    """Withhold what was not sent, and note what the model is told.

    A person calls this for a turn that can't be taken again, since its message
    was lost. What was sent is unknown then; an answer stands only in the notes.
    """
    notes.execute("BEGIN")  # all texts, or none
    with notes:
        earlier = first = next(iter(read(notes, EARLIER, turn)), None)
        for call in read(notes, f"said IS NULL AND {OF_TURN}", turn):
            outcome, state = call["heard"], "closed"
            if call["state"] == "sent":
                first, state = call, "sent"  # the calls behind it are withheld
            elif call["state"] == "planned":
                equal = earlier and call["request"] == earlier["request"]
                outcome = withheld_for(first, equal)
                if equal:
                    earlier = None  # one operation answers one call
                # By the text of this call the earlier one is told as well.
                told = "UPDATE notes SET state = 'closed' WHERE state = 'ended'"
                notes.execute(told)
            text = f"{outcome}. {ADVICE[outcome.split(':')[0]]}"
            say = "UPDATE notes SET said = ?, state = ? WHERE key = ?"
            notes.execute(say, (text, state, call["key"]))


def withheld_for(first: "Row | None", equal: bool) -> str:
    """Return the outcome of a call that was not sent because of `first`."""
    if first is None:
        return "not sent: its turn was given up"
    if equal and first["heard"].startswith("done"):
        return f"{first['heard']}, which answers your earlier call as well"
    came = f"your earlier call {first['request']!r:.80} is {first['heard']}"
    if first["state"] == "sent":
        came += ", and both are one" if equal else ", and has to come first"
    return f"not sent: {came}"


def decide(notes: Connection, key: str, found: str) -> None:
    """Write down what a person found out about a note that is UNKNOWN.

    `found` is told with the next turn: "done: job 7"; or "not done", and then
    it can't be done later either; or "unknown: a second call may make another".
    """
    if found.split(":")[0] not in ("done", "not done", "unknown"):
        raise ValueError(f"done, not done or unknown? {found!r}")
    decision = "UPDATE notes SET state = 'ended', heard = ? WHERE key = ? AND "
    with notes:
        if notes.execute(decision + UNKNOWN, (found, key)).rowcount != 1:
            raise ValueError(f"no unknown operation has the key {key!r}")


def read(notes: Connection, where: str, *values: str) -> list[Row]:
    """Return the notes that `where` names, as rows whatever `notes` makes."""
    cursor = notes.cursor()
    cursor.row_factory = Row
    select = f"SELECT * FROM notes WHERE {where}"
    return cursor.execute(select, values).fetchall()


def storable(text: str) -> str:
    """Return `text` with what UTF-8 has no bytes for escaped."""
    return text.encode("utf-8", "backslashreplace").decode()
