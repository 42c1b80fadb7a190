"""The bar of planning: on terminals, late, and with no time where nobody knows one."""

from __future__ import annotations

import io
import time

import pytest
from rich.console import Console

from alpa_lite.inspection.text import progress_bar as bars
from alpa_lite.inspection.text.progress_bar import planning_progress


def _drawn(*, terminal: bool, known: bool, seconds: float = 0.3, quiet: bool = False) -> str:
    """What is on the screen after so long."""
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=120, quiet=quiet)
    with planning_progress(console) as progress:
        progress.begin("stages")
        with progress.during("stages", "stages [at] work"):
            progress.expect("stages", 4000 if known else None)
            for _ in range(4):
                time.sleep(seconds / 4)
                progress.did()
    return out.getvalue()


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bars, "PATIENCE_SECONDS", 0.01)
    monkeypatch.setattr(bars, "REDRAWN_PER_SECOND", 50)


@pytest.mark.usefixtures("at_once")
def test_it_shows_what_is_known() -> None:
    drawn = _drawn(terminal=True, known=True)
    assert "stages [at] work" in drawn and "about" in drawn and "min left" in drawn
    unknown = _drawn(terminal=True, known=False)
    assert "stages [at] work" in unknown and "left" not in unknown


@pytest.mark.usefixtures("at_once")
def test_without_a_terminal_nothing_shows() -> None:
    assert _drawn(terminal=False, known=True) == ""
    assert _drawn(terminal=True, known=True, quiet=True) == ""


def test_what_is_quick_shows_nothing() -> None:
    assert _drawn(terminal=True, known=True) == ""


@pytest.mark.usefixtures("at_once")
def test_it_goes_away_on_errors() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120)
    with pytest.raises(KeyboardInterrupt), planning_progress(console):
        time.sleep(0.1)
        raise KeyboardInterrupt
    assert out.getvalue().endswith("\x1b[?25h\r\x1b[1A\x1b[2K")  # the cursor is back, and the line is empty
