"""The line of progress: on terminals and in notebooks, late, within its columns, and with times that only fall."""

from __future__ import annotations

import io
import itertools
import os
import pty
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alpa_lite.inspection.text import progress_bar as bars
from alpa_lite.inspection.text.progress_bar import (
    PHASES,
    Countdown,
    Display,
    NotebookLine,
    PlanningBar,
    Shown,
    TerminalLine,
    display_at_hand,
    shown_progress,
)
from alpa_lite.plan.progress import Progress


class Paper:
    """A display that keeps all lines."""

    def __init__(self, width: int = 120) -> None:
        self.width, self.is_unicode = width, True
        self.lines: list[str] = []

    def show(self, line: str) -> None:
        self.lines.append(line)


def _drawn(*, known: bool, display: Display | None, seconds: float = 0.3) -> None:
    progress = Progress(None, PlanningBar(lambda: display))
    with progress.during("plan"):
        progress.begin("stages")
        with progress.during("stages", "stages [at] work"):
            progress.expect("stages", 4000 if known else None)
            for _ in range(4):
                time.sleep(seconds / 4)
                progress.did()


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bars, "PATIENCE_SECONDS", 0.01)
    monkeypatch.setattr(bars, "REDRAWN_PER_SECOND", 50)


@pytest.mark.usefixtures("at_once")
def test_it_shows_what_is_known_and_goes_away() -> None:
    known, unknown = Paper(), Paper()
    _drawn(known=True, display=known)
    _drawn(known=False, display=unknown)
    assert "planning: choosing shardings" in known.lines[-2] and "stages [at] work" in known.lines[-2]
    assert "min left" in known.lines[-2] and known.lines[-1] == ""
    assert all("left" not in line and "━" not in line for line in unknown.lines) and unknown.lines[-1] == ""


@pytest.mark.usefixtures("at_once")
def test_it_goes_away_on_errors_and_its_thread_ends() -> None:
    paper, before = Paper(), threading.active_count()
    progress = Progress(None, PlanningBar(lambda: paper))
    with pytest.raises(KeyboardInterrupt), progress.during("trace"):
        time.sleep(0.1)
        raise KeyboardInterrupt
    assert len(paper.lines) > 1 and paper.lines[-1] == ""
    assert threading.active_count() == before


@pytest.mark.usefixtures("at_once")
def test_a_terminal_that_is_gone_does_not_matter() -> None:
    stream = io.StringIO()
    stream.close()
    _drawn(known=True, display=TerminalLine(stream=stream))


@pytest.mark.usefixtures("at_once")
def test_of_plans_made_at_once_one_line_is_shown_until_it_is_removed() -> None:
    shown: list[tuple[str, str]] = []
    drawn = {name: threading.Event() for name in ("first", "second", "inner")}
    over = threading.Event()

    def bar(name: str) -> PlanningBar:
        def show(line: str) -> None:
            shown.append((name, line))
            drawn[name].set()

        return PlanningBar(lambda: SimpleNamespace(width=120, is_unicode=True, show=show))

    def first_plan() -> None:
        with Progress(None, bar("first")).during("plan"):
            over.wait(10)

    beside = threading.Thread(target=first_plan)
    beside.start()
    assert drawn["first"].wait(10)
    with Progress(None, bar("second")).during("plan"):
        with Progress(None, bar("inner")).during("plan"):
            time.sleep(0.2)
        over.set()
        beside.join()
        assert drawn["second"].wait(10)
    # Each is removed before the next is drawn, and the inner one never is.
    lines = [(name, [line for _, line in some]) for name, some in itertools.groupby(shown, key=lambda each: each[0])]
    assert [name for name, _ in lines] == ["first", "second"]
    assert all(some[-1] == "" and all(some[:-1]) for _, some in lines)


def test_what_is_quick_shows_nothing() -> None:
    paper = Paper()
    _drawn(known=True, display=paper)
    assert paper.lines == []


@pytest.mark.usefixtures("at_once")
def test_nothing_is_drawn_over_the_prompt_of_a_debugger(monkeypatch: pytest.MonkeyPatch) -> None:
    import bdb

    assert bdb.__name__ in bars.DEBUGGERS
    paper = Paper()
    # A frame of a module named as the debugger is.
    scope = {"__name__": "pdb", "drawn": lambda: _drawn(known=True, display=paper)}
    exec("drawn()", scope)
    assert paper.lines == [""]


def test_without_a_terminal_nothing_shows(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bars, "PATIENCE_SECONDS", 0.01)
    assert display_at_hand() is None
    with shown_progress("plan"):
        time.sleep(0.1)
    assert capfd.readouterr() == ("", "")
    monkeypatch.setattr(sys, "stderr", None)
    assert display_at_hand() is None


def test_a_terminal_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setenv("COLUMNS", "33")
        monkeypatch.setenv("TERM", "xterm")
        found = display_at_hand()
        assert isinstance(found, TerminalLine) and found.width == 33
        found.show("a line")
        found.show("")
        # A terminal may hand over in parts what was written at once.
        shown, wanted = b"", b"\ra line\x1b[K\r\x1b[K"
        while len(shown) < len(wanted):
            shown += os.read(ours, 100)
        assert shown == wanted
        monkeypatch.setenv("TERM", "dumb")
        assert display_at_hand() is None
    os.close(ours)


def test_a_notebook_updates_one_output(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, object]] = []
    handle = SimpleNamespace(update=lambda data, raw: seen.append(("update", data["text/plain"])))

    def display(data: dict[str, str], *, raw: bool, display_id: bool) -> object:
        seen.append(("display", data["text/plain"]))
        return handle

    shell = SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))
    found = display_at_hand()
    assert isinstance(found, NotebookLine)
    for line in ("one", "two", ""):
        found.show(line)
    assert seen == [("display", "one"), ("update", "two"), ("update", "")]


TIMES = st.floats(0, 1e5)


@given(
    st.builds(
        Shown,
        words=st.sampled_from([f"planning: {words}" for words in PHASES.values()]),
        share=st.none() | st.floats(0, 1.5),
        elapsed=TIMES,
        left=st.none() | TIMES,
        doing=st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z", "M", "Lo", "So"]), max_size=80),
    ),
    st.integers(10, 130),
    st.booleans(),
)
def test_the_line_leaves_a_column_free(shown: Shown, width: int, is_unicode: bool) -> None:
    line = shown.line(width, "*", is_unicode=is_unicode)
    assert len(line) < width and line.startswith("* planning"[: width - 1])
    assert is_unicode or line.isascii()


def test_eighty_columns_have_room_for_the_time_that_is_left() -> None:
    for words in PHASES.values():
        line = Shown(words=f"planning: {words}", share=0.5, elapsed=3725, left=3300, doing="x").line(80, "⠋")
        assert "62:05" in line and "about 55 min left" in line and "━━━" in line


@given(st.lists(st.tuples(st.floats(0, 10), st.none() | st.floats(0, 1000)), min_size=1))
def test_the_time_left_never_grows(events: list[tuple[float, float | None]]) -> None:
    now = 0.0
    countdown = Countdown(clock=lambda: now)
    before: float | None = None
    for passed, estimate in events:
        now += passed
        left = countdown.left_seconds(estimate)
        if before is not None:
            # It falls by the time that passes at least, as far as it can.
            assert left is not None and left <= max(0.0, before - passed) + 1e-6
        if estimate is not None:
            assert left is not None and left <= estimate + 1e-6
        before = left
