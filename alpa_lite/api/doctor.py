"""Report whether this machine is ready: versions, devices, solver, harmful settings, virtual CPU devices, self-test.

The self-test takes some seconds: it plans a small step for a described cluster, runs a step on this machine, and
compares the result with `jax.jit`.
"""

from __future__ import annotations

import os
import platform
import re
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from alpa_lite import _jax
from alpa_lite._jax import Array
from alpa_lite.api.parallelize import cluster, parallelize
from alpa_lite.api.parallelize import plan as make_plan
from alpa_lite.errors import UnusableFileWarning
from alpa_lite.inspection.text.tables import Table, render
from alpa_lite.planners.auto import Auto
from alpa_lite.planners.data_parallel import DataParallel
from alpa_lite.runtime.calibrate.calibrate import QUICK_KEY, fingerprint, local_cluster, path_for
from alpa_lite.text import show_count
from cost_models.cluster import cluster_sources

LIMIT_SECONDS = 10.0
"""Seconds without progress after which the self-test takes a step to hang, and fails."""

Leaf = TypeVar("Leaf")

# Well above the effect of adding float32 numbers in another order, well below that of a wrong collective.
_TOLERANCE = 1e-4
_WIDTH = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfTest:
    """The result of the self-test.

    planned    the planning that worked, in words
    ran        the execution that worked, in words
    seconds    the time of the whole test, in seconds
    error      the failure in a sentence; empty if everything worked
    """

    planned: str
    ran: str
    seconds: float
    error: str

    def __str__(self) -> str:
        return self.error or f"{self.planned}; {self.ran}; {self.seconds:.1f} s in all"


def self_test() -> SelfTest:
    """Plan a step and run one; a failure of any kind is reported, not raised."""
    start, parts = time.perf_counter(), {"planned": "", "ran": ""}
    error = ""
    try:
        parts["planned"] = _planned()
        parts["ran"] = _ran()
    except Exception as failure:  # whatever fails on this machine is what the test is there to tell
        error = f"The self-test failed: {type(failure).__name__}: {failure}"
    return SelfTest(**parts, seconds=time.perf_counter() - start, error=error)


def _step(params: Sequence[Array], x: Array) -> tuple[list[jax.Array], jax.Array]:
    def loss(params: Sequence[Array]) -> jax.Array:
        y = x
        for w in params:
            y = jnp.tanh(y @ w)
        return jnp.mean(y**2)

    value, gradients = jax.value_and_grad(loss)(params)
    return [p - 0.1 * g for p, g in zip(params, gradients, strict=True)], value


def _arguments(make: Callable[[tuple[int, int]], Leaf], num_samples: int) -> tuple[list[Leaf], Leaf]:
    return [make((_WIDTH, _WIDTH)) for _ in range(2)], make((num_samples, _WIDTH))


def _planned() -> str:
    """Plan from shapes alone, with the full search."""
    shapes = _arguments(lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32), 64)
    # A plan from the cache would prove nothing about the solver.
    host = cluster("p3.16xlarge")
    # A step of this size is best on one device, and a warning that says so would be none about this machine.
    make_plan(_step, *shapes, cluster=host, planner=Auto(idle_devices=False), cache=False)
    return f"plans a step for {host.num_devices} described devices"


def _ran() -> str:
    """Run one step on all devices of this process and compare it with `jax.jit`."""
    devices = jax.devices()
    # `local_cluster()` might measure the devices first, which takes longer than this test.
    described = replace(cluster("p3.16xlarge", num_hosts=1), name="these devices", devices_per_host=len(devices))
    rng = np.random.default_rng(0)
    # Eight samples for each device, so that any number of devices divides the batch.
    arguments = _arguments(lambda shape: rng.normal(size=shape).astype(np.float32), 8 * len(devices))
    step = parallelize(_step, cluster=described, planner=DataParallel(), cache=False, watchdog_seconds=LIMIT_SECONDS)
    found, expected = jax.device_get((step(*arguments), jax.jit(_step)(*arguments)))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        if not np.allclose(a, b, rtol=_TOLERANCE, atol=_TOLERANCE):
            raise ArithmeticError(
                f"a step on {len(devices)} devices differs from jax.jit by {np.max(np.abs(np.subtract(a, b))):.3g}"
            )
    return f"runs it on {show_count(len(devices), 'device')} as jax.jit does"


PACKAGES = ("alpa_lite", "jax", "jaxlib", "numpy", "scipy", "pulp", "highspy", "networkx", "rich", "pyyaml")
_DEVICE_COUNT = "--xla_force_host_platform_device_count"
_WARN_STUCK = "--xla_cpu_collective_call_warn_stuck_timeout_seconds"
_TERMINATE_STUCK = "--xla_cpu_collective_call_terminate_timeout_seconds"


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The findings about this machine.

    versions             version of Python and of each package, by name
    devices              platform and kind of each JAX device
    solver_seconds       the time that HiGHS takes for a tiny integer program, in seconds
    solver_error         the solver's failure in a sentence; empty if it works
    settings             the relevant environment variables that are set
    calibration          where the description of these devices comes from
    compilation_cache    where JAX stores executables
    advice               sentences that say what to change
    self_test            the result of the self-test; None if it was skipped
    """

    versions: dict[str, str]
    devices: tuple[str, ...]
    solver_seconds: float
    solver_error: str
    settings: dict[str, str]
    calibration: str
    compilation_cache: str
    advice: tuple[str, ...]
    self_test: SelfTest | None = None

    @property
    def healthy(self) -> bool:
        """Whether planning works here, and running too if that was tested."""
        return not self.solver_error and not (self.self_test is not None and self.self_test.error)

    def __str__(self) -> str:
        solver = self.solver_error or f"solves a tiny integer program in {1e3 * self.solver_seconds:.0f} ms"
        rows = [
            *self.versions.items(),
            *((f"device {i}", device) for i, device in enumerate(self.devices)),
            ("HiGHS", solver),
            *self.settings.items(),
            ("calibration", self.calibration),
            ("compilation cache", self.compilation_cache),
            *([("self-test", str(self.self_test))] if self.self_test is not None else []),
        ]
        table = Table(title="This machine", columns=("what", "found"), rows=tuple(rows))
        return render([], [table]) + "\n\n" + render(self.advice or ("All is well.",))

    def to_json(self) -> dict[str, object]:
        """Return plain data for JSON."""
        return {**asdict(self), "healthy": self.healthy}


def diagnose(*, test: bool = True) -> Diagnosis:
    """Examine this process: its packages, its devices (this starts JAX), the solver and the environment.

    test: whether to plan and run a small step as well, which takes some seconds.
    """
    devices = tuple(f"{device.platform} {device.device_kind}" for device in jax.devices())
    start = time.perf_counter()
    error = solver_error()
    elapsed = time.perf_counter() - start
    calibration, unusable = calibration_found()
    return Diagnosis(
        versions={"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
        devices=devices,
        solver_seconds=elapsed,
        solver_error=error,
        settings={name: os.environ[name] for name in ("JAX_PLATFORMS", "XLA_FLAGS", "NPROC") if name in os.environ},
        calibration=calibration,
        compilation_cache=compilation_cache(),
        advice=(
            *filter(None, [error, unusable]),
            *device_advice(devices, os.environ),
            # Options of JAX come and go with its versions: one that is missing does no harm.
            *flag_advice(os.environ, {name: getattr(jax.config, name, None) for name in _HARMFUL_CONFIG}),
        ),
        self_test=self_test() if test else None,
    )


_HARMFUL_CONFIG: Mapping[str, tuple[Sequence[object], str]] = {
    "jax_disable_jit": ((True,), "nothing is compiled, so that steps cannot be parallelized"),
    "jax_debug_nans": ((True,), "every step waits for its values and keeps its inputs"),
    "jax_debug_infs": ((True,), "every step waits for its values and keeps its inputs"),
    "jax_check_tracer_leaks": ((True,), "tracing takes many times as long"),
    "jax_enable_x64": ((True,), "numbers without a type take 8 bytes, and matrix units do not multiply float64"),
    "jax_default_matmul_precision": (
        ("highest", "float32", "BF16_BF16_F32_X9", "F32_F32_F32"),
        "matrix products of float32 run at a fraction of the speed",
    ),
    "jax_transfer_guard": (
        ("disallow", "disallow_explicit", "log", "log_explicit"),
        "transfers of arrays are refused or logged",
    ),
}
"""Harmful options of JAX: the values that do harm, and the effect."""

_HARMFUL_FLAGS: Mapping[str, str] = {
    "--xla_backend_optimization_level=0": "code is not optimised",
    "--xla_disable_hlo_passes": "some optimisations are missing",
    "--xla_dump_to": "every program is written to disk",
    "--xla_gpu_deterministic_ops=true": "faster kernels are left out",
    "--xla_gpu_exclude_nondeterministic_ops=true": "faster kernels are left out",
    "--xla_gpu_autotune_level=0": "kernels are not chosen by measuring them",
    "--xla_gpu_enable_latency_hiding_scheduler=false": "collectives are not hidden behind work",
    "--xla_cpu_multi_thread_eigen=false": "each program runs on one core",
}
"""Harmful flags in XLA_FLAGS, and the effect of each."""

_HARMFUL_VARIABLES: Mapping[str, tuple[str, str]] = {
    "XLA_PYTHON_CLIENT_ALLOCATOR": ("platform", "every array is allocated by the driver, which is slow"),
    "XLA_PYTHON_CLIENT_PREALLOCATE": ("false", "memory fragments, so that plans near the limit may not fit"),
    "CUDA_LAUNCH_BLOCKING": ("1", "the host waits for each kernel"),
    "NCCL_P2P_DISABLE": ("1", "devices of a host exchange data through its memory"),
}
"""Harmful environment variables: the value that does harm, and its effect."""


def flag_advice(environment: Mapping[str, str], config: Mapping[str, object]) -> tuple[str, ...]:
    """Return one sentence for each setting of JAX, of XLA and of the environment that costs time or memory."""
    found = [
        f"{name} is {config[name]!r}: {how}. Remove it unless you are debugging."
        for name, (values, how) in _HARMFUL_CONFIG.items()
        if config.get(name) in values
    ]
    flags = environment.get("XLA_FLAGS", "").split()
    for flag, how in _HARMFUL_FLAGS.items():
        # Compared by their beginnings, since some flags are followed by a path or a list of passes.
        found += [f"XLA_FLAGS has {given}: {how}. Take it out." for given in flags if given.startswith(flag)]
    for name, (value, how) in _HARMFUL_VARIABLES.items():
        if environment.get(name, "").lower() == value:
            found.append(f"{name} is {value}: {how}. Unset it.")
    return tuple(found)


def compilation_cache() -> str:
    """Say where JAX stores compiled executables for the next start, or how to make it store them."""
    folder = _jax.compilation_cache_folder()
    if not folder:
        return "off; jax.config.update('jax_compilation_cache_dir', folder) before the first step turns it on"
    least = getattr(jax.config, "jax_persistent_cache_min_compile_time_secs", 0.0)
    return f"{folder}, for what takes {least:g} s or more to compile (jax_persistent_cache_min_compile_time_secs)"


def calibration_found() -> tuple[str, str]:
    """Return the source of the description that `local_cluster()` gives, and what is wrong with it (mostly empty)."""
    path = path_for(fingerprint(jax.devices()))
    # Without a file, `local_cluster()` would measure the devices, which this report does not wait for.
    if not path.exists():
        return f"none yet, devices will be measured quickly; `alpa-lite calibrate` writes {path}", ""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", UnusableFileWarning)
        # Called for its warning about a file that cannot be used; then it measures the devices instead.
        local_cluster()
    unusable = [str(each.message) for each in told if issubclass(each.category, UnusableFileWarning)]
    if unusable:
        return f"{path} cannot be used", unusable[0]
    quick = cluster_sources(str(path)).get(QUICK_KEY)
    return str(path) + (f", {quick}, quickly; `alpa-lite calibrate` measures more" if quick else ""), ""


def solver_error() -> str:
    """Solve max x + 2y with x + y <= 1.5 in whole numbers; return "" if the answer is right, else the failure."""
    remedy = "Reinstall the solver: pip install --force-reinstall highspy 'pulp<4'."
    try:
        import pulp

        problem = pulp.LpProblem("doctor", pulp.LpMaximize)
        x, y = (problem.add_variable(name, 0, 1, pulp.LpInteger) for name in "xy")
        problem += x + 2 * y
        # The linear relaxation has its optimum 2.5 at x = 0.5: only a solver that branches returns 2.
        problem += x + y <= 1.5
        status = problem.solve(pulp.HiGHS(msg=False))
        right = status == pulp.LpStatusOptimal and round(pulp.value(problem.objective)) == 2
    except Exception as error:  # any failure of the solver or of its package is what this function is to report
        return f"HiGHS does not run: {error}. {remedy}"
    return "" if right else f"HiGHS runs but gives a wrong answer (status {status}). {remedy}"


def virtual_cpu_environment(num_devices: int) -> dict[str, str]:
    """Return environment variables for `num_devices` virtual CPU devices that cannot hang; set them before JAX starts.

    XLA's CPU client must have more threads than device tasks in flight (NPROC), and a collective that is stuck
    nevertheless ends the process with a message instead of waiting for ever.
    """
    return {
        "JAX_PLATFORMS": "cpu",
        # A device that waits in a collective blocks a thread, while others still need threads to get there.
        "NPROC": str(4 * num_devices),
        # In seconds; collectives between the devices of one process take milliseconds unless they are stuck.
        "XLA_FLAGS": f"{_DEVICE_COUNT}={num_devices} {_WARN_STUCK}=5 {_TERMINATE_STUCK}=20",
    }


def steady_memory_environment() -> dict[str, str]:
    """Return environment variables under which the C library's memory management does not disturb timings on CPU.

    glibc returns large arrays to the system and pages them in again at the next step. In a step of tens of milliseconds
    this takes up to half of the time, and varies by chance. Other C libraries do not read these variables.
    """
    return {
        "MALLOC_ARENA_MAX": "1",
        # 1 TiB is larger than any array: none gets a mapping of its own, and no memory is returned.
        "MALLOC_MMAP_THRESHOLD_": str(1 << 40),
        "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    }


def virtual_environment(num_devices: int) -> dict[str, str]:
    """Return this process's environment with `num_devices` virtual CPU devices and steady timings."""
    return {**os.environ, **virtual_cpu_environment(num_devices), **steady_memory_environment()}


def device_advice(devices: Sequence[str], environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return sentences on how to get virtual devices, and on settings under which they cannot hang."""
    if not all(device.startswith("cpu") for device in devices):
        return ()
    wanted = virtual_cpu_environment(max(8, len(devices)))
    if len(devices) == 1:
        return (
            "JAX sees one CPU device. Plans for described clusters work (al.cluster); to run plans here, start Python "
            f'with XLA_FLAGS="{wanted["XLA_FLAGS"]}" NPROC={wanted["NPROC"]}.',
        )
    advice: list[str] = []
    threads = environment.get("NPROC", "")
    if not re.fullmatch(r"\d+", threads) or int(threads) < 4 * len(devices):
        given = threads or f"not set ({os.cpu_count()} processors)"
        advice.append(
            f"NPROC is {given}: with {len(devices)} virtual devices XLA's thread pool can run full and hang. "
            f"Start Python with NPROC={4 * len(devices)}."
        )
    if _TERMINATE_STUCK not in environment.get("XLA_FLAGS", ""):
        advice.append(
            f"A stuck collective would wait for a long time: add {_TERMINATE_STUCK}=20 to XLA_FLAGS to get an error."
        )
    return tuple(advice)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
