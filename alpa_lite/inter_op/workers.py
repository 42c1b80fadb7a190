"""Worker processes: they answer questions of the search before it asks them.

It asks one after the other, since what it asks next depends on the answer. Yet mostly some questions are known that it
will ask soon, and the machine has more than one core:

    expect    what will likely be asked; each worker takes one question after the other          `Workers.expect`
    take      the answer of a worker, which may still be at it; None if none has begun           `Workers.take`

Who gets None finds the answer itself, and finds the same: a search ends with the same plan with workers and without.

Workers are new processes and no forks: JAX has threads, and drivers of fast networks forbid to fork. They start when
planning has taken a while, and end with it. Whatever goes wrong with one, planning goes on without it.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from alpa_lite.errors import PlanError
from alpa_lite.program.collector import rare_collection
from alpa_lite.rules.registry import only_own_rules

START_SECONDS = 1.0
"""How long planning has taken when workers start: small models are planned before that."""

MAX_WORKERS = 3
"""No more than that find something to do."""

NUM_WORKERS = "ALPA_LITE_WORKERS"
"""Environment variable: how many workers, instead of one for each core but one."""

_SERVE = "import sys; sys.path += sys.argv[1:]; from alpa_lite.inter_op.workers import serve; serve()"


def num_workers() -> int:
    """How many workers this machine has room for; none where rules are registered that they would not know.

    Raises `PlanError` where the environment asks for something else than a number.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    wanted = os.environ.get(NUM_WORKERS, "").strip()
    if wanted and not wanted.isdecimal():
        raise PlanError(
            f"{NUM_WORKERS}={wanted!r} is set in the environment; it must be a number of processes, 0 for none. "
            "Unset it to have one for each core but one."
        )
    number = int(wanted) if wanted else min(cores - 1, MAX_WORKERS)
    return number if only_own_rules() and sys.executable else 0


@dataclass(frozen=True, slots=True)
class Likely:
    """A question: `answer(memory, *about, rest)`, a function of a module, finds the answer, and may keep things for
    later ones in the dictionary `memory`. What it is `about` must not change: a worker is told once."""

    answer: Callable[..., Any]
    about: tuple[object, ...]
    rest: Any


class Workers:
    """So many workers. A context: at its end they are gone.

    `problems`: what went wrong with them.
    """

    def __init__(self, number: int = 0) -> None:
        """Nothing is started yet."""
        self.problems: list[str] = []
        self._number, self._closed, self._here = number, threading.Event(), threading.local()
        self._pool: ThreadPoolExecutor | None = None
        self._has_answered = False
        self._processes: list[subprocess.Popen[bytes]] = []
        self._lost: list[subprocess.Popen[bytes]] = []
        self._soon: dict[Hashable, Likely] = {}
        self._later: dict[Hashable, Likely] = {}
        self._answers: dict[Hashable, Future[Any]] = {}
        self._numbers: dict[int, tuple[int, object]] = {}
        self._pickled: dict[int, bytes] = {}

    def __reduce__(self) -> tuple[type[Workers], tuple[()]]:
        """Workers have none of their own."""
        return Workers, ()

    def __enter__(self) -> Workers:
        """Start them, if planning has not ended in a while."""
        if self._number > 0:
            self._pool = ThreadPoolExecutor(self._number, thread_name_prefix="alpa_lite workers")
            started = time.monotonic()
            for _ in range(self._number):
                self._pool.submit(self._start, started)
        return self

    def __exit__(self, *_: object) -> None:
        """End them, whatever they are at."""
        self._closed.set()
        for process in self._processes:
            process.kill()
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(cancel_futures=True)
        for process in self._processes:
            process.communicate()
        self._soon, self._later = {}, {}
        self._answers.clear()
        self._numbers.clear()
        self._pickled.clear()

    @property
    def at_work(self) -> bool:
        """Whether there are any."""
        return self._pool is not None and len(self._processes) > len(self._lost)

    def number_of(self, thing: object) -> int:
        """A number that stands for a thing, and for nothing else."""
        return self._numbers.setdefault(id(thing), (len(self._numbers), thing))[0]

    def expect(self, questions: Mapping[Hashable, Likely], *, later: bool = False) -> None:
        """These will likely be asked, the first ones first; `later`: after all others, until told otherwise.

        Nothing else will be, so that what no worker has begun with is forgotten.
        """
        for key in [key for key, answer in self._answers.items() if answer.cancel()]:
            del self._answers[key]
        if later:
            self._later = dict(questions)
        else:
            self._soon = dict(questions)
        for key, question in {**self._soon, **self._later}.items() if self.at_work else ():
            if key not in self._answers and self._pool is not None:
                try:
                    numbers = [self._number_of_part(part) for part in question.about]
                except Exception as error:  # what cannot be pickled raises whatever it likes
                    self.problems.append(repr(error))
                else:
                    self._answers[key] = self._pool.submit(self._ask, question.answer, numbers, question.rest)

    def _number_of_part(self, part: object) -> int:
        """The number of what a question is about, once it can be sent."""
        number = self.number_of(part)
        if number not in self._pickled:
            self._pickled[number] = pickle.dumps(part, pickle.HIGHEST_PROTOCOL)
        return number

    def take(self, key: Hashable) -> Any:
        """The answer to a question that was expected, and that a worker has begun with; else None.

        The first answer of all is not waited for: it takes a worker long, which has everything to load for it.
        """
        self._soon.pop(key, None)
        self._later.pop(key, None)
        answer = self._answers.pop(key, None)
        if answer is None or answer.cancel() or not (self._has_answered or answer.done()):
            return None
        return answer.result()

    def _start(self, since: float) -> None:
        """Start the worker of this thread."""
        self._here.process, self._here.told = None, set()
        if self._closed.wait(max(0.0, START_SECONDS - (time.monotonic() - since))):
            return
        try:
            self._here.process = subprocess.Popen(
                [sys.executable, "-P", "-c", _SERVE, *sys.path],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            self._processes.append(self._here.process)
            if self._closed.is_set():
                self._here.process.kill()
            self._heard_of()  # that it is ready
        except (OSError, EOFError, pickle.PickleError) as error:
            self._give_up(repr(error))

    def _ask(self, function: Callable[..., Any], parts: Sequence[int], question: Any) -> Any:
        """The answer of the worker of this thread; None where it has none."""
        process: subprocess.Popen[bytes] | None = self._here.process
        if process is None or process.stdin is None:
            return None
        new = [(number, self._pickled[number]) for number in parts if number not in self._here.told]
        try:
            pickle.dump((function, parts, new, question), process.stdin, pickle.HIGHEST_PROTOCOL)
            process.stdin.flush()
            problem, answer = self._heard_of()
        except Exception as error:  # whatever it is, planning goes on without
            problem, answer = repr(error), None
        if problem:
            self._give_up(problem)
        self._here.told.update(parts)
        self._has_answered = True
        return answer

    def _give_up(self, why: str) -> None:
        """The worker of this thread is of no use any more."""
        self.problems.append(why)
        if self._here.process is not None:
            self._lost.append(self._here.process)
        self._here.process = None

    def _heard_of(self) -> Any:
        """What the worker of this thread says next."""
        pipe = self._here.process.stdout
        assert pipe is not None
        return pickle.load(pipe)


@rare_collection()
def serve() -> None:
    """What a worker does: answer the questions from its standard input until that ends."""
    with suppress(ValueError):
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for who asks
    questions, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints is no answer
    memory: dict[Any, Any] = {}
    known: dict[int, object] = {}
    pickle.dump(None, answers)
    answers.flush()
    while True:
        try:
            function, parts, new, question = pickle.load(questions)
        except EOFError:
            return
        try:
            known |= {number: pickle.loads(part) for number, part in new}
            reply = "", function(memory, *(known[part] for part in parts), question)
        except Exception as error:
            reply = repr(error), None
        pickle.dump(reply, answers, pickle.HIGHEST_PROTOCOL)
        answers.flush()
