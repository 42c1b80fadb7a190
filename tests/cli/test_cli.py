"""The command line: every command, its JSON, and its errors."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa_lite as al
from alpa_lite import cli
from alpa_lite.api import plan_cache
from alpa_lite.cli import file_commands, machine_commands, step_commands
from alpa_lite.cli.exit_codes import Exit
from alpa_lite.cli.user_files import load_example
from alpa_lite.runtime.calibrate import calibrate as calibrating
from tests.cli.schema import documented
from tests.cli.steps import step_module
from tests.runtime.calibrate.test_calibrate import simulate

MODULE = (
    step_module(layers=4, width=64, samples=32)
    + """
def wrong():
    return train_step

def bare():
    return train_step, example()[1][1]

def few():
    return train_step, example()[1][:2]

def text():
    def train_text(x):
        return "x", x
    return train_text, example()[1][1:2]

def raising():
    return 1 / 0

def train_if(x):
    if x.sum() > 0: return x
    return -x

def untraceable():
    return train_if, example()[1][1:2]
"""
)


UNEQUAL = """
def unequal():
    sizes = [1024 + 32 * (7 * i % 160) for i in range(161)]
    step = lambda params, x: train_step_of(lambda p: jnp.mean(layers(p, x) ** 2), params)
    return step, ([jax.ShapeDtypeStruct(two, jnp.float16) for two in zip(sizes, sizes[1:])],
                  jax.ShapeDtypeStruct((4096, sizes[0]), jnp.float16))

def layers(params, x):
    for w in params:
        x = jnp.tanh(x @ w)
    return x

def train_step_of(loss, params):
    value, grads = jax.value_and_grad(loss)(params)
    return [p - 0.1 * g for p, g in zip(params, grads)], value
"""
"""Many layers, none like another, whose plan takes its time."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the module of a user, who works in it."""
    path = tmp_path_factory.mktemp("work")
    (path / "users_model.py").write_text(MODULE)
    return path


@pytest.fixture
def at_work(folder, monkeypatch):
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture(scope="module")
def plans(folder):
    """Two saved plans: data parallel, and a pipeline."""
    paths = []
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, *options in (["data_parallel"], ["pipeline", "--option", "pipeline=2"]):
            paths.append(str(folder / f"{name}.json"))
            arguments = ["--planner", name, *options, "--cluster", "p3.16xlarge", "--output", paths[-1]]
            assert cli.main(["plan", "users_model:example", *arguments]) == 0
    return paths


def run(capsys, *arguments):
    """Exit code, standard output and standard error of a command."""
    capsys.readouterr()
    code = cli.main(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def run_json(capsys, *arguments):
    code, out, _ = run(capsys, *arguments, "--json")
    assert code == 0
    return documented(arguments[0], json.loads(out))


def test_what_the_user_prints_is_not_in_the_json(tmp_path, capsys):
    path = tmp_path / "prints.py"
    path.write_text(
        "print('imported')\nimport numpy as np\n"
        "def example():\n    print('called')\n    return step, (np.ones((8, 8), np.float32),)\n"
        "def step(x):\n    print('traced')\n    return (x @ x).sum()\n"
    )
    words = ["plan", f"{path}:example", "--cluster", "p3.16xlarge", "--planner", "data_parallel", "--no-cache"]
    code, out, err = run(capsys, *words, "--json")
    assert code == 0 and json.loads(out)["kind"] == "plan"
    assert "imported" in err and "called" in err and "traced" in err
    code, out, _ = run(capsys, *words)
    assert code == 0 and "imported" in out and "traced" in out


def test_all_rows_are_printed(tmp_path, capsys):
    path = tmp_path / "many.py"
    path.write_text(
        "import numpy as np\nNAMES = [chr(97 + i) * 3 for i in range(20)]\n"
        "def example():\n    shapes = {n: np.ones((4 + i, 4), np.float32) for i, n in enumerate(NAMES)}\n"
        "    return step, (shapes, np.ones((8, 4), np.float32))\n"
        "def step(x, batch):\n    return x, (batch @ sum(v.sum(0) for v in x.values())).sum()\n"
    )
    words = ["plan", f"{path}:example", "--cluster", "p3.16xlarge", "--planner", "data_parallel", "--no-cache"]
    (_, short, _), (_, whole, _) = run(capsys, *words), run(capsys, *words, "--all")
    names = [chr(97 + i) * 3 for i in range(20)]
    assert not all(f"/{name} " in short for name in names) and "more" in short
    assert all(f"/{name} " in whole for name in names)


def test_plan_prints_and_saves(plans, capsys):
    code, out, _ = run(capsys, "explain", plans[0])
    assert code == 0
    assert "data parallel" in out and "Stages" in out
    assert al.Plan.load(plans[0]).cluster.num_devices == 8


def test_plan_json_and_hosts(at_work, capsys):
    summary = run_json(
        capsys, "plan", "users_model:example", "--cluster", "p3.16xlarge", "--num-hosts", "2", "--planner", "fsdp"
    )
    assert summary["num_devices"] == 16 and summary["name"] == "FSDP"
    command = ("plan", "users_model:example", "--cluster", "p3.16xlarge:2", "--planner", "fsdp")
    assert run_json(capsys, *command)["num_devices"] == 16


def test_a_plan_that_was_made_before_says_so(at_work, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("ALPA_LITE_CACHE", str(tmp_path))
    monkeypatch.setattr(plan_cache, "only_own_rules", lambda: True)  # other tests register some
    command = ["plan", "users_model:example", "--cluster", "p3.16xlarge", "--planner", "fsdp"]
    assert "from the cache" not in run(capsys, *command)[1]
    assert "from the cache" in run(capsys, *command)[1]
    assert run_json(capsys, *command)["cached"] is True
    assert run_json(capsys, *command, "--no-cache")["cached"] is False


def test_a_saved_plan_is_replayed(plans, at_work, capsys):
    summary = run_json(capsys, "plan", "users_model:example", "--planner", plans[0], "--cluster", "p3.16xlarge")
    assert len(summary["stages"]) == 1


def test_explain(plans, capsys, tmp_path):
    page = tmp_path / "plan.html"
    code, out, _ = run(capsys, "explain", plans[1], "stage 1", "--html", str(page))
    assert code == 0
    assert "devices 4..7" in out
    assert page.read_text().startswith("<!doctype html>")
    assert run_json(capsys, "explain", plans[1], "stage 1")["kind"] == "stage"
    assert run_json(capsys, "explain", plans[1])["num_microbatches"] > 1


def test_diff(plans, capsys):
    code, out, _ = run(capsys, "diff", *plans)
    assert code == 0
    assert "per step (predicted)" in out
    assert len(run_json(capsys, "diff", *plans)["seconds"]) == 2


def test_simulate(plans, capsys, tmp_path):
    path, page = tmp_path / "trace.json", tmp_path / "plan.html"
    code, out, _ = run(capsys, "simulate", plans[1], "--trace", str(path), "--html", str(page))
    assert code == 0
    assert '"title":"predicted"' in page.read_text()
    assert "predicted step" in out
    assert json.loads(path.read_text())["traceEvents"]
    assert run_json(capsys, "simulate", plans[1])["makespan_seconds"] > 0


def test_simulate_and_measure_the_program_of_a_step(plans, capsys, tmp_path):
    step, both = ["--step", "users_model:example"], tmp_path / "both.json"
    code, out, _ = run(capsys, "simulate", plans[1], *step)
    assert code == 0 and "simulated step" in out and "peak" in out
    simulated = run_json(capsys, "simulate", plans[1], *step)
    assert {time["kind"] for time in simulated["times"]} >= {"RUN", "SEND", "PLACE"}
    page = tmp_path / "plan.html"
    code, out, _ = run(capsys, "simulate", plans[1], *step, "--measure", "--trace", str(both), "--html", str(page))
    assert '"title":"simulated"' in page.read_text() and '"title":"measured"' in page.read_text()
    assert code == 0 and "stage 1 forward+backward" in out and "measured" in out
    events = json.loads(both.read_text())["traceEvents"]
    spans = {
        process: [e["name"] for e in events if e["ph"] == "X" and e["pid"] == number]
        for number, process in enumerate(PROCESSES, 1)
    }
    assert sorted(spans["predicted"]) == sorted(name for name in spans["measured"] if not name.startswith(BETWEEN))
    rows = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert rows >= {"stage 0", "stage 1", "stage 0 receives", "stage 1 receives"}
    for option in ("--measure", "--profile"):
        code, _, err = run(capsys, "simulate", plans[1], option)
        assert code == 1 and option in err and "--step" in err


def test_profile_the_program_of_a_step(plans, capsys):
    step = ["--step", "users_model:example", "--profile"]
    code, out, _ = run(capsys, "simulate", plans[1], *step)
    assert code == 0 and "median of the runs" in out and "Largest differences from the prediction" in out
    found = run_json(capsys, "simulate", plans[1], *step)
    assert {"times", "tasks", "allocated_bytes", "differences"} <= found.keys()
    products = [row for row in found["differences"] if row["what"] == "dot_general"]
    assert products and all("users_model.py:" in row["source"] and row["kernels"] for row in products)


PROCESSES = ("predicted", "measured")
BETWEEN = ("PLACE", "ZEROS", "CONCAT")
"""Instructions that take time on a device, and none in a simulation."""


def test_doctor(capsys):
    code, out, _ = run(capsys, "doctor")
    assert code == 0
    assert "HiGHS" in out and "jaxlib" in out
    assert run_json(capsys, "doctor", "--quick")["self_test"] is None


@pytest.fixture
def calibrated(monkeypatch):
    """A simulated machine in the place of this one."""
    found = simulate(noise=0.05)
    monkeypatch.setattr(al, "calibrate", lambda **options: found)
    return found


def test_calibrate_writes_a_cluster(calibrated, tmp_path, capsys):
    path = tmp_path / "mine.json"
    code, out, _ = run(capsys, "calibrate", "--out", str(path))
    assert code == 0
    assert al.cluster(str(path)) == calibrated.cluster
    assert f"Written to {path}." in out.replace("\n", "") and "predicted / measured" in out
    data = run_json(capsys, "calibrate", "--out", str(path))
    assert data["path"] == str(path)
    assert len(data["measurements"]) == len(calibrated.measurements)
    assert data["cluster"]["sources"]["fingerprint"] == "these devices"


def test_calibrate_writes_where_local_cluster_looks(calibrated, tmp_path, monkeypatch, capsys, devices):
    found = replace(calibrated, fingerprint=calibrating.fingerprint(devices))
    monkeypatch.setattr(al, "calibrate", lambda **options: found)
    monkeypatch.setattr(calibrating, "cache_folder", lambda: tmp_path)
    assert "measured quickly" in run_json(capsys, "doctor", "--quick")["calibration"]
    assert run(capsys, "calibrate")[0] == 0
    assert al.local_cluster() == calibrated.cluster
    (path,) = tmp_path.iterdir()
    assert run_json(capsys, "doctor", "--quick")["calibration"] == str(path)
    path.write_text("{")
    diagnosis = run_json(capsys, "doctor", "--quick")
    assert "cannot be used" in diagnosis["calibration"] and "Run `alpa-lite calibrate` again" in diagnosis["advice"][0]


def test_calibrate_virtual_devices_in_a_process_of_its_own(monkeypatch):
    calls = []
    monkeypatch.setattr(machine_commands, "run_module", lambda *started: calls.append(started) or 0)
    assert cli.main(["calibrate", "--devices", "4", "--seconds", "9", "--out", "mine.json", "--json"]) == 0
    ((name, words, environment),) = calls
    assert (name, words) == ("alpa_lite.cli", ["calibrate", "--seconds", "9.0", "--out", "mine.json", "--json"])
    assert "device_count=4" in environment["XLA_FLAGS"]


def test_launch_runs_a_program_in_processes(at_work, capsys):
    (at_work / "job.py").write_text("import os, sys; print('device_count=2' in os.environ['XLA_FLAGS'], sys.argv[1:])")
    command = ["launch", "--processes", "2", "--devices-per-process", "2", "job.py", "--steps", "3"]
    code, out, _ = run(capsys, *command)
    assert code == 0 and sorted(out.splitlines()) == ["[0] True ['--steps', '3']", "[1] True ['--steps', '3']"]
    (at_work / "job.py").write_text("import os, sys; sys.exit(int(os.environ['ALPA_LITE_PROCESS_ID']) * 3)")
    code, out, err = run(capsys, "launch", "--json", "--processes", "2", "-m", "job", "--steps", "3")
    assert code == 3 and "process 1 ended with exit code 3" in err
    found = documented("launch", json.loads(out))
    assert found["failed"] == 1 and found["codes"][1] == 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["launch", "--processes", "2", "nowhere.py"], "'nowhere.py' is not a file"),
        (["launch", "--processes", "2"], "nothing to launch"),
        (["launch", "--processes", "0", "users_model.py"], "at least one is needed"),
        (["launch", "--processes", "1", "--devices-per-process", "0", "users_model.py"], "at least one device"),
        (["explain", "missing.json"], "cannot be read as a plan"),
        (["explain", "users_model.py"], "cannot be read as a plan"),
        (["plan", "users_model"], "MODULE:FUNCTION"),
        (["plan", "no_such_module:example"], "no module 'no_such_module'"),
        (["plan", "users_model:nothing"], "no function 'nothing'"),
        (["plan", "users_model:wrong"], "(train_step, args)"),
        (["plan", "users_model:example", "--cluster", "p3.17xlarge"], "Did you mean"),
        (["plan", "users_model:example", "--num-hosts", "2"], "--cluster"),
        (["plan", "users_model:example", "--planner", "magic", "--cluster", "p3.16xlarge"], "no planner 'magic'"),
        (["plan", "users_model:example", "--option", "depth=2", "--cluster", "p3.16xlarge"], "Its options are"),
        (["plan", "users_model:train_step", "--cluster", "p3.16xlarge"], "takes arguments (params, x, y)"),
        (["plan", "users_model:bare", "--cluster", "p3.16xlarge"], "of a single one (state,)"),
        (["plan", "users_model:few", "--cluster", "p3.16xlarge"], "missing a required argument: 'y'"),
        (["plan", "users_model:text", "--cluster", "p3.16xlarge"], "train_text returns a str at 0, which is no array"),
        (["plan", "users_model:raising", "--cluster", "p3.16xlarge"], "ZeroDivisionError: division by zero"),
        (["plan", "users_model:untraceable", "--cluster", "p3.16xlarge"], "in train_if: if x.sum() > 0: return x"),
        (
            [
                "plan",
                "users_model:example",
                "--cluster",
                "p3.16xlarge",
                "--planner",
                "pipeline",
                "--option",
                "pipeline=0",
            ],
            "at least 1",
        ),
        (["plan", "users_model:example", "--cluster", "p3.16xlarge", "--option", "num_layers=0"], "at least 1"),
        (["plan", "users_model:example", "--num-microbatches", "5", "--cluster", "p3.16xlarge"], "5"),
        (["plan", "users_model:example", "--cluster", "p3.16xlarge", "--bandwidth-scale", "0"], "above 0"),
        (
            ["plan", "users_model:example", "--cluster", "p3.16xlarge", "--cluster", "p4d.24xlarge", "--output", "x"],
            "2 t",
        ),
        (["plan", "users_model:example", "--cluster", "p3.16xlarge", "--pins", "nowhere.yaml"], "cannot be read"),
    ],
)
def test_errors_are_sentences(at_work, capsys, arguments, words):
    code, out, err = run(capsys, *arguments)
    assert code == 1
    assert words in err and "Traceback" not in err
    assert not out


def test_unknown_subject_is_a_sentence(plans, capsys):
    code, _, err = run(capsys, "explain", plans[0], "no/such/thing")
    assert code == 1
    assert "no/such/thing" in err


@pytest.mark.parametrize(
    "arguments",
    [
        ["dance"],
        ["diff", "a.json"],
        ["doctor", "--loud"],
        [],
        ["calibrate", "--devices", "0"],
        ["calibrate", "--seconds", "-1"],
        ["solve", "x.json", "--timeout", "nan"],
        ["bench", "--batch", "0"],
        ["bench", "--devices", "-1"],
        ["demo", "--steps", "0"],
        ["plan", "users_model:example", "--num-microbatches", "many"],
        ["explain", "plan.json", "stage 0", "--time"],
    ],
)
def test_wrong_usage_exits_with_2(capsys, arguments):
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert "usage" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["demo", "bench"])
def test_programs_of_the_benchmarks_run_in_processes_of_their_own(monkeypatch, capsys, name):
    calls = []

    def fake(module, words, environment, *, read):
        calls.append((module, words))
        read('{"steps": 5}')
        return 3

    monkeypatch.setattr(machine_commands, "run_module", fake)
    assert cli.main([name, "--steps", "5", "--json"]) == 3
    assert calls == [(f"alpa_lite.cli.{name}", ["--steps", "5", "--json"])]
    assert json.loads(capsys.readouterr().out) == {"schema": f"alpa-lite/{name}", "version": 1, "steps": 5}


def test_every_planner_has_a_name():
    classes = {value for value in vars(al.planners).values() if isinstance(value, type)}
    planners = {c for c in classes if issubclass(c, al.planners.Planner) and c is not al.planners.Planner}
    # Settings of trainers have their names, and the settings after a colon.
    others = {al.planners.Custom, al.planners.Replay, al.planners.TrainerConfiguration}
    assert planners - others == set(step_commands.PLANNERS.values())


def test_a_decorated_step_is_planned_as_it_is(tmp_path, monkeypatch):
    (tmp_path / "decorated_model.py").write_text(
        "import alpa_lite as al, users_model\nstep = al.parallelize(users_model.train_step)\n"
        "def example():\n    return step, users_model.example()[1]\n"
    )
    (tmp_path / "users_model.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    step, args, kwargs = load_example("decorated_model:example")
    shapes = jax.eval_shape(step, *args)
    assert shapes[1].dtype == jnp.float32 and not kwargs


@pytest.mark.skipif(sys.platform == "win32", reason="there are no pseudo terminals")
def test_an_interrupted_plan_is_the_best_so_far(tmp_path, default_interrupt):
    """A real Ctrl-C on a terminal, once the bar shows that the search is under way."""
    (tmp_path / "large.py").write_text(MODULE + UNEQUAL)
    command = [sys.executable, "-m", "alpa_lite.cli", "plan", "large:unequal", "--cluster", "p3.16xlarge"]
    environment = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[2]), "COLUMNS": "120", "TERM": "xterm"}
    screen, terminal = os.openpty()
    running = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=terminal)
    try:
        seen, deadline = b"", time.monotonic() + 120
        while b"survey" not in seen and running.poll() is None and time.monotonic() < deadline:
            if select.select([screen], [], [], 1.0)[0]:
                seen += os.read(screen, 4096)
        assert b"survey" in seen
        running.send_signal(signal.SIGINT)
        asked = time.monotonic()
        out, _ = running.communicate(timeout=60)
    finally:
        running.kill()
        os.close(screen)
        os.close(terminal)
    assert running.returncode == 0 and time.monotonic() - asked < 30
    text = " ".join(out.decode().split())
    assert "auto (" in text and "gap" in text and "solution interrupted" in text, seen


def problem_file(folder, num_nodes=60):
    """A file with a problem that no exact method solves at once."""
    rng = np.random.default_rng(0)
    edges = [sorted(rng.choice(num_nodes, 2, replace=False).tolist()) for _ in range(6 * num_nodes)]
    costs = rng.integers(0, 1000, (len(edges), 144)).tolist()
    nodes = {"intervals": [[0, 1]] * num_nodes, "costs": [[0] * 12] * num_nodes, "usages": [[1] * 12] * num_nodes}
    path = folder / "hard.json"
    path.write_text(
        json.dumps({"problem": {"name": "hard", "nodes": nodes, "edges": {"nodes": edges, "costs": costs}}})
    )
    return path


def test_solve(tmp_path, capsys):
    path, out = problem_file(tmp_path, 5), tmp_path / "solution.json"
    assert cli.main(["solve", str(path), "--out", str(out)]) == 0
    assert capsys.readouterr().out.startswith("optimal  cost")
    assert cli.main(["solve", str(path), "--json", "--solver", "search", "--seed", "3", "--rounds", "4"]) == 0
    found = documented("solve", json.loads(capsys.readouterr().out))
    assert found["cost"] == json.loads(out.read_text())["cost"]
    assert cli.main(["solve", str(tmp_path / "nowhere.json")]) == 1
    assert "cannot be read" in capsys.readouterr().err


def test_solve_explains_and_draws_the_front(tmp_path, capsys):
    nodes = {"intervals": [[0, 2], [1, 3]], "costs": [[0, 5], [0, 2]], "usages": [[9, 4], [8, 3]]}
    path = tmp_path / "small.json"

    def write(limit):
        edges = {"nodes": [[0, 1]], "costs": [[0, 0, 0, 0]]}
        path.write_text(json.dumps({"problem": {"nodes": nodes, "edges": edges, "usage_limit": limit}}))

    write(6)
    assert cli.main(["solve", str(path)]) == Exit.INFEASIBLE
    printed = capsys.readouterr()
    assert "infeasible" in printed.out
    assert "need at least 7 bytes" in printed.err
    write(100)
    assert cli.main(["solve", str(path), "--pareto", "8", "--json"]) == 0
    front = documented("solve", json.loads(capsys.readouterr().out))["pareto"]
    assert [(point["peak_bytes"], point["cost"]) for point in front] == [(7, 7), (12, 2), (17, 0)]
    assert cli.main(["solve", str(path), "--pareto", "8"]) == 0
    assert capsys.readouterr().out.count("peak") == 4
    assert cli.main(["solve", str(path), "--pareto", "1"]) == 1


def test_solve_ends_with_the_best_so_far_on_interrupt(tmp_path, monkeypatch):
    path, out = problem_file(tmp_path), tmp_path / "solution.json"

    def interrupt(progress):
        if progress.doing == "round 2":
            os.kill(os.getpid(), signal.SIGINT)

    def solve_file(*args, control, **kwargs):
        @contextmanager
        def interrupted():
            with control() as given:
                yield replace(given, report=interrupt)

        return solve_file_of_package(*args, control=interrupted, **kwargs)

    solve_file_of_package = file_commands.solve_file
    monkeypatch.setattr(file_commands, "solve_file", solve_file)
    handler = signal.getsignal(signal.SIGINT)
    assert cli.main(["solve", str(path), "--solver", "search", "--timeout", "600", "--out", str(out)]) == 0
    assert signal.getsignal(signal.SIGINT) is handler
    found = json.loads(out.read_text())
    assert found["status"] == "feasible"
    assert len(found["choices"]) == 60
    assert found["bound"] <= found["cost"]
