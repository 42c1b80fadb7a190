"""The harness of every test that runs on JAX: eight virtual CPU devices, with settings under which they cannot hang.

The variables must be set before JAX is first imported, hence at import time here: pytest imports this file before any
test module. Two settings guard against deadlocks of XLA's CPU collectives: the client's thread pool (NPROC) must be
larger than the number of device tasks in flight, and a collective that is stuck all the same aborts within 20 seconds.
Tests that need other settings (another device count, several processes) start a subprocess. XLA's own passes run as
ever; LLVM optimises little, for that took half of the time of most tests. What was compiled once in a run is taken from
a folder of that run wherever the same is compiled again: in another test, worker or process.
"""

import gc
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.sampling import mark_cases

NUM_DEVICES = 8
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "microsoft-edge")
MAX_MAPS = 20_000
"""A third of the memory maps that Linux allows a process. Each program that XLA compiles takes several, and where they
run out its compiler crashes."""

# What the user's programs have planned is no business of tests, nor the other way round.
os.environ["ALPA_LITE_CACHE"] = "off"
os.environ["ALPA_LITE_WORKERS"] = "0"  # tests run side by side already

if "jax" in sys.modules:
    raise RuntimeError("JAX was imported before the test harness; run pytest without the plugin that imports it.")

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["NPROC"] = str(4 * NUM_DEVICES)
os.environ["XLA_FLAGS"] = " ".join(
    [
        f"--xla_force_host_platform_device_count={NUM_DEVICES}",
        "--xla_cpu_collective_call_warn_stuck_timeout_seconds=5",
        "--xla_cpu_collective_call_terminate_timeout_seconds=20",
        "--xla_backend_optimization_level=0",
    ]
)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"


class _NamesFailures:
    """Names what fails at once: a run takes long, and what it says at its end is lost where it is ended before."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal = self._config.pluginmanager.getplugin("terminalreporter")
        if report.failed and terminal is not None:
            terminal.ensure_newline()
            terminal.write_line(f"FAILED {report.nodeid} ({report.when}, {report.duration:.0f} s)", red=True)
            crash = getattr(report.longrepr, "reprcrash", None)
            terminal.write_line((crash.message if crash else str(report.longrepr))[:1000])


def pytest_configure(config: pytest.Config) -> None:
    """One folder of compiled programs for all workers of a run: they are told of it by their environment."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_NamesFailures(config))
        folder = os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="compiled-")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave cases out of runs of whole files, unless single tests are named on the command line."""
    if not any("::" in argument for argument in config.args):
        mark_cases(items)


settings.register_profile(
    "alpa_lite",
    derandomize=True,
    deadline=None,
    max_examples=50,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("alpa_lite")


@pytest.fixture(scope="module")
def browser():
    """A headless Chromium."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (the extra dev has it)")
    with playwright.sync_playwright() as started:
        own = Path(started.chromium.executable_path)
        found = str(own) if own.exists() else next(filter(None, map(shutil.which, BROWSERS)), None)
        if found is None:
            pytest.skip(f"no Chromium was found: none of {', '.join(BROWSERS)} is on the path")
        # Chromium has no sandbox for root, as which containers run.
        flags = ["--no-sandbox"] if os.getuid() == 0 else []
        launched = started.chromium.launch(executable_path=found, args=flags)
        yield launched
        launched.close()


@pytest.fixture(scope="session")
def devices():
    """The eight virtual CPU devices."""
    import jax

    found = jax.devices()
    assert len(found) == NUM_DEVICES, f"JAX was imported before the test harness was set up: it sees {found}."
    return found


@pytest.fixture(autouse=True)
def few_programs():
    """Let go of compiled programs before there are too many of them."""
    yield
    maps = Path("/proc/self/maps")
    if "jax" in sys.modules and maps.exists() and maps.read_bytes().count(b"\n") > MAX_MAPS:
        sys.modules["jax"].clear_caches()
        gc.collect()


@pytest.fixture(scope="module")
def compiled_afresh():
    """Without the run's folder of compiled programs, as a user's process is by default.

    Where JAX keeps what it compiles, equal stages are compiled one by one, instead of once and then loaded for the
    devices of the others.
    """
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


@pytest.fixture
def default_interrupt():
    """Ctrl-C interrupts, here and in what is started: shells start what runs in the background with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
