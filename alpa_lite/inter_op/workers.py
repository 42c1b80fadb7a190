"""Worker processes that answer questions of the search before it asks them.

The search asks one question after the other, since each depends on the answer to the last. But it can tell which
questions it will probably ask soon, and the machine has more than one core:

    expect    announce questions; each worker takes one after the other                          `Workers.expect`
    take      the answer of a worker, which may still be working on it; None if none has begun   `Workers.take`

If there is no answer, the search computes it itself, with the same result: it ends with the same plan with workers and
without.

Workers are new processes instead of forks: JAX has threads, and drivers of fast networks forbid forking. They start
when planning has taken a while, and end with it. Whatever goes wrong in a worker, planning continues without it.
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

from alpa_lite.errors import PlanError
from alpa_lite.program.collector import rare_collection
from alpa_lite.rules.registry import only_own_rules

START_SECONDS = 1.0
"""Seconds of planning after which workers start: small models are planned before that."""

MAX_WORKERS = 3
"""More workers than this would have nothing to do."""

NUM_WORKERS = "ALPA_LITE_WORKERS"
"""Environment variable for the number of workers, by default one less than there are cores."""

_SERVE = "import sys; sys.path += sys.argv[1:]; from alpa_lite.inter_op.workers import serve; serve()"


def num_workers() -> int:
    """Return the number of workers for this machine; 0 if rules are registered that new processes would not have.

    Raises `PlanError` if the environment variable is no number.
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
    """A question, answered by `answer(memory, *about, rest)`.

    `answer` is a function of a module, which may store values for later questions in the dictionary `memory`. The
    objects in `about` must not change: each is sent to a worker once.
    """

    answer: Callable[..., object]
    about: tuple[object, ...]
    rest: object


class Workers:
    """A number of workers, as a context manager that ends them; `problems` say what went wrong with them."""

    def __init__(self, number: int = 0) -> None:
        """Start no process yet."""
        self.problems: list[str] = []
        self._number, self._closed, self._here = number, threading.Event(), threading.local()
        self._pool: ThreadPoolExecutor | None = None
        self._has_answered = False
        self._processes: list[subprocess.Popen[bytes]] = []
        self._lost: list[subprocess.Popen[bytes]] = []
        self._soon: dict[Hashable, Likely] = {}
        self._later: dict[Hashable, Likely] = {}
        self._answers: dict[Hashable, Future[object]] = {}
        self._numbers: dict[int, tuple[int, object]] = {}
        self._pickled: dict[int, bytes] = {}

    def __reduce__(self) -> tuple[type[Workers], tuple[()]]:
        """Pickle as no workers: a worker has no workers of its own."""
        return Workers, ()

    def __enter__(self) -> Workers:
        """Start the workers, if planning has not ended after `START_SECONDS`."""
        if self._number > 0:
            # One thread per worker: it talks to the process, and its queue is the list of questions.
            self._pool = ThreadPoolExecutor(self._number, thread_name_prefix="alpa_lite workers")
            started = time.monotonic()
            for _ in range(self._number):
                self._pool.submit(self._start, started)
        return self

    def __exit__(self, *_: object) -> None:
        """End the workers, whatever they are doing."""
        self._closed.set()
        # Killed first, since a thread that waits for an answer ends only with the pipe of its process.
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
        """Whether any worker is running."""
        return self._pool is not None and len(self._processes) > len(self._lost)

    def number_of(self, thing: object) -> int:
        """Return a number that stands for this object only."""
        # The object is kept with its number: its id could be given to another one otherwise.
        return self._numbers.setdefault(id(thing), (len(self._numbers), thing))[0]

    def expect(self, questions: Mapping[Hashable, Likely], *, later: bool = False) -> None:
        """Announce questions, the most urgent first; `later`: after all others, and until they are replaced.

        They replace earlier ones: questions that no worker has begun are dropped.
        """
        # Futures that run cannot be cancelled: their answers may still be of use.
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
        """Return the number of an object that questions are about, and pickle it once."""
        number = self.number_of(part)
        if number not in self._pickled:
            self._pickled[number] = pickle.dumps(part, pickle.HIGHEST_PROTOCOL)
        return number

    def take(self, key: Hashable) -> object:
        """Return the answer to an announced question that a worker has begun; otherwise None.

        The very first answer is not waited for: a worker takes long for it, since it has all modules to load.
        """
        # It is answered now, by whom ever: no worker needs to begin with it again.
        self._soon.pop(key, None)
        self._later.pop(key, None)
        answer = self._answers.pop(key, None)
        if answer is None or answer.cancel() or not (self._has_answered or answer.done()):
            return None
        return answer.result()

    def _start(self, since: float) -> None:
        """Start the worker that belongs to this thread."""
        self._here.process, self._here.told = None, set()
        if self._closed.wait(max(0.0, START_SECONDS - (time.monotonic() - since))):
            return
        try:
            self._here.process = subprocess.Popen(
                # Without -P the current directory would come first on the path of the worker.
                [sys.executable, "-P", "-c", _SERVE, *sys.path],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            self._processes.append(self._here.process)
            # `__exit__` may have killed all processes that it knew of just before this one was added.
            if self._closed.is_set():
                self._here.process.kill()
            self._heard_of()  # wait until it is ready
        except (OSError, EOFError, pickle.PickleError) as error:
            self._give_up(repr(error))

    def _ask(self, function: Callable[..., object], parts: Sequence[int], question: object) -> object:
        """Return the answer of the worker of this thread; None if it has none."""
        process: subprocess.Popen[bytes] | None = self._here.process
        if process is None or process.stdin is None:
            return None
        # Steps are large: each worker gets a part once, and its number afterwards.
        new = [(number, self._pickled[number]) for number in parts if number not in self._here.told]
        try:
            pickle.dump((function, parts, new, question), process.stdin, pickle.HIGHEST_PROTOCOL)
            process.stdin.flush()
            problem, answer = self._heard_of()
        except Exception as error:  # whatever it is, planning continues without the answer
            problem, answer = repr(error), None
        if problem:
            self._give_up(problem)
        self._here.told.update(parts)
        self._has_answered = True
        return answer

    def _give_up(self, why: str) -> None:
        """Note that the worker of this thread is of no use any more."""
        self.problems.append(why)
        if self._here.process is not None:
            self._lost.append(self._here.process)
        self._here.process = None

    def _heard_of(self) -> tuple[str, object]:
        """Return the next message of the worker of this thread: a problem or "", and an answer."""
        pipe = self._here.process.stdout
        assert pipe is not None
        return pickle.load(pipe)


@rare_collection()
def serve() -> None:
    """Answer, in a worker process, the questions from standard input until it ends."""
    with suppress(ValueError):
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the process that asks
    questions, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # text that a library prints must not get between the answers
    memory: dict[object, object] = {}
    known: dict[int, object] = {}
    pickle.dump(("", None), answers)  # it is ready
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
