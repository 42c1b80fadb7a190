"""What planning says of itself: phases, their times, units of work, and what is left."""

from __future__ import annotations

import itertools
import logging
import signal

import pytest

from alpa_lite.plan.progress import FEW, Pace, PhaseTimes, Progress


class Clock:
    """Tells the time that it is set to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_lines_of_text_are_said() -> None:
    said: list[str] = []
    progress = Progress.of(said.append)
    progress("one")
    with progress.during("phase", "two"):
        assert progress.phase == "phase" and progress.doing == "two"
    assert said == ["one", "two"] and progress.phase == ""
    assert Progress.of(progress) is progress
    Progress.of(None)("nobody hears this")


def test_phases_are_timed_without_those_within_them() -> None:
    clock = Clock()
    times = PhaseTimes(clock)
    progress = Progress(None, times)
    clock.now = 5.0  # belongs to none
    with progress.during("stages"):
        clock.now = 7.0
        with progress.during("split"):
            clock.now = 10.0
        clock.now = 11.0
    with pytest.raises(KeyboardInterrupt), progress.during("refine"):
        clock.now = 12.0
        raise KeyboardInterrupt
    assert times.seconds == {"stages": 3.0, "split": 3.0, "refine": 1.0} and progress.phases == ()


def test_nothing_is_promised_before_all_is_known() -> None:
    clock = Clock()
    pace = Pace(clock)
    progress = Progress(None, pace)
    assert pace.left_seconds() is None
    progress.begin("survey", "stages")
    with progress.during("survey"):
        progress.expect("survey", 4)
        for _ in range(4):
            clock.now += 2.0
            progress.did()
            assert pace.left_seconds() is None
    progress.expect("stages", 10)
    assert pace.left_seconds() == pytest.approx(20.0)
    progress.begin("survey", "stages")
    assert pace.left_seconds() is None


def test_what_is_left_shrinks_and_is_revised() -> None:
    clock = Clock()
    pace = Pace(clock)
    progress = Progress(None, pace)
    progress.begin("stages")
    found: list[float] = []
    with progress.during("layers"), progress.during("stages"):
        progress.expect("stages", 20)
        for _ in range(20):
            clock.now += 1.0
            with progress.during("split"):
                clock.now += 1.0
            progress.did()
            left = pace.left_seconds()
            if progress.done["stages"] < FEW:
                assert left is None
            else:
                assert left == pytest.approx(2.0 * (20 - progress.done["stages"]))
                found.append(left or 0.0)
        assert all(b < a for a, b in itertools.pairwise(found)) and found[-1] == 0.0
        progress.expect("stages", 3)
        assert pace.left_seconds() == pytest.approx(6.0)
        clock.now += 1.5
        assert pace.left_seconds() == pytest.approx(4.5)
        clock.now += 100.0  # the unit at work takes long; the others are still to come
        assert pace.left_seconds() == pytest.approx(4.0)
        progress.did()
        assert (pace.left_seconds() or 0.0) > 10.0


def test_known_units_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    progress = Progress()
    progress.begin("stages")
    with progress.during("compile"), caplog.at_level(logging.DEBUG, logger="alpa_lite"):
        report = progress.counting("compile")
        assert progress.left == {"compile": None} and progress.done == {}
        for done, total in ((0, 5), (1, 5), (1, 5), (4, 6)):
            report("stage 0", done, total)
            assert progress.doing == f"stage 0 ({done} of {total})"
            assert progress.done.get("compile", 0) == done and progress.left == {"compile": total - done}
    assert caplog.messages[-1] == progress.doing  # the lines of text are logged too


def test_interrupts_wait_for_the_step_at_hand(default_interrupt: None) -> None:
    progress, before = Progress(), signal.getsignal(signal.SIGINT)
    with progress.interrupts():
        with pytest.raises(KeyboardInterrupt), progress.during("stages"):
            _press()
            progress.did()
        progress.did()  # once is enough
        _press()
        with pytest.raises(KeyboardInterrupt):
            _press()
    progress.did()
    assert signal.getsignal(signal.SIGINT) is before and progress.phases == ()


def _press() -> None:
    """Ctrl-C, in this thread: Python handles it before it goes on."""
    signal.raise_signal(signal.SIGINT)


def test_more_than_expected_is_no_less_than_nothing() -> None:
    progress = Progress()
    progress.begin("stages")
    with progress.during("stages"):
        progress.expect("stages", 1)
        progress.did()
        progress.did()
    assert progress.left == {"stages": 0.0} and progress.done == {"stages": 2}
