"""`alpa-lite plan` and `alpa-lite check` on a user's step."""

import json
import subprocess
import sys

import pytest

import alpa_lite as al
from alpa_lite import cli
from alpa_lite.cli.exit_codes import Exit
from tests.cli.schema import documented
from tests.cli.steps import step_module

MODULE = step_module(layers=2, width=2048, samples=256)


@pytest.fixture(autouse=True)
def at_work(tmp_path, monkeypatch):
    (tmp_path / "what_if_model.py").write_text(MODULE)
    (tmp_path / "checked_model.py").write_text(step_module(layers=2, width=16, samples=32) + WRONG)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(capsys, *arguments):
    capsys.readouterr()
    code = cli.main(["plan", "what_if_model.py:example", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def run_json(capsys, *arguments):
    code, out, _ = run(capsys, *arguments, "--json")
    assert code == 0
    return documented("plan", json.loads(out))


DATA = ("--planner", "data_parallel")


def test_clusters_side_by_side(capsys):
    clusters = ("--cluster", "p3.16xlarge", "--cluster", "p4d.24xlarge")
    code, out, _ = run(capsys, *clusters, *DATA)
    assert code == 0 and "p3.16xlarge" in out and "p4d.24xlarge" in out and "1.00×" in out
    found = run_json(capsys, *clusters, *DATA)
    alone = [run_json(capsys, "--cluster", name, *DATA)["step_seconds"] for name in clusters[1::2]]
    assert found["kind"] == "clusters"
    assert [each["plan"]["step_seconds"] for each in found["clusters"]] == alone


def test_a_cluster_that_is_too_small_is_a_row(capsys):
    clusters = ("--cluster", "p3.16xlarge", "--cluster", "p4d.24xlarge", "--memory", "1MB")
    code, out, _ = run(capsys, *clusters, *DATA)
    assert code == Exit.INFEASIBLE and "none" in out and "1 MB" not in out
    code, _, err = run(capsys, "--cluster", "p3.16xlarge", "--memory", "1MB", *DATA)
    assert code == Exit.INFEASIBLE and "does not fit" in err


SHARDED = """
import jax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec as P

def sharded():
    rows = NamedSharding(AbstractMesh((2, 4), ("data", "model")), P("data"))
    train_step, arguments = example()
    return lambda params, x, y: train_step(params, jax.lax.with_sharding_constraint(x, rows), y), arguments
"""


def test_shardings_that_the_step_names(at_work, capsys):
    (at_work / "sharded_model.py").write_text(MODULE + SHARDED)
    found = {}
    for mode in ("hint", "pin", "ignore"):
        command = ["plan", "sharded_model.py:sharded", "--cluster", "p3.16xlarge", "--user-shardings", mode, "--json"]
        capsys.readouterr()
        assert cli.main(command) == 0
        found[mode] = documented("plan", json.loads(capsys.readouterr().out))
    assert [use["wanted"] for use in found["hint"]["user_shardings"]] == ["[data, -]"]
    assert all(use["follows"] for use in found["pin"]["user_shardings"])
    assert found["pin"]["stages"][0]["mesh"] == {"data": 2, "model": 4}
    assert found["ignore"]["user_shardings"] == []


def test_memory_and_bandwidth(capsys):
    here = run_json(capsys, "--cluster", "p3.16xlarge", *DATA)
    changed = run_json(capsys, "--cluster", "p3.16xlarge", *DATA, "--memory", "8GiB", "--bandwidth-scale", "0.5")
    assert changed["stages"][0]["capacity_bytes"] == 8 * 2**30
    assert "0.5 × bandwidth" in changed["cluster"]
    assert changed["step_seconds"] > here["step_seconds"]


def test_a_saved_plan_has_no_other_predictions(capsys, at_work):
    path = str(at_work / "plan.json")
    assert run(capsys, "--cluster", "p3.16xlarge", *DATA, "--output", path)[0] == 0
    code, _, err = run(capsys, "--planner", path, "--cluster", "p3.16xlarge", "--memory", "8GB")
    assert code == Exit.ERROR and "keeps its own predictions" in err


PINNED = ("--cluster", "p3.16xlarge", "--planner", "on_mesh", "--option", "axes=x:8")


def test_what_pins_cost(capsys, at_work):
    (at_work / "pins.yaml").write_text("params/0: [x, null]\n")
    code, out, _ = run(capsys, *PINNED, "--pins", "pins.yaml")
    assert code == 0 and "Your pin" in out and "per step" in out
    found = run_json(capsys, *PINNED, "--pins", "pins.yaml")
    free = run_json(capsys, *PINNED)
    assert found["stages"][0]["specs"]["params/0"] == "[x, -]"
    assert found["free_step_seconds"] == free["step_seconds"]
    assert found["pins_cost_fraction"] == pytest.approx(found["step_seconds"] / free["step_seconds"] - 1)
    assert found["pins_cost_fraction"] > -0.01


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("params/0: [x, null\n", "line 2: this is not YAML"),
        ("# nothing\n", "line 1: a file of pins holds a mapping"),
        ("params/0: [x]\nparams/9: [x]\n", "line 2: There is no argument 'params/9' to pin"),
        ("\nparams/0: x\n", "line 2: the pin of 'params/0' is not a list"),
        ("params/0: [3, null]\n", "line 1: the pin of 'params/0' has the entry 3"),
        ("params/0: [x]\nparams/0: [x]\n", "line 2: 'params/0' is pinned on line 1 already"),
        ("params/0: [x, x, x]\n", "line 1: The pin of 'params/0' has 3 dims"),
    ],
)
def test_bad_pins_are_sentences_with_their_line(capsys, at_work, text, words):
    (at_work / "pins.yaml").write_text(text)
    code, out, err = run(capsys, *PINNED, "--pins", "pins.yaml")
    assert code == Exit.ERROR and not out
    assert words in err and "pins.yaml, " in err


def test_pins_need_a_planner_that_takes_them(capsys, at_work):
    (at_work / "pins.yaml").write_text("params/0: [x]\n")
    code, _, err = run(capsys, "--cluster", "p3.16xlarge", *DATA, "--pins", "pins.yaml")
    assert code == Exit.ERROR and "takes none: use auto or on_mesh" in err


def test_pins_never_run_what_a_file_says(capsys, at_work):
    (at_work / "pins.yaml").write_text("params/0: !!python/object/apply:os.mkdir [pwned]\n")
    code, _, err = run(capsys, *PINNED, "--pins", "pins.yaml")
    assert code == Exit.ERROR and "line 1" in err
    assert not (at_work / "pwned").exists()


def test_an_output_that_cannot_be_written(capsys):
    code, _, err = run(capsys, "--cluster", "p3.16xlarge", *DATA, "--output", "nowhere/plan.json")
    assert code == Exit.ERROR and "nowhere/plan.json cannot be written" in err


def test_passes_are_written_to_a_folder_of_one_plan(capsys, tmp_path):
    plan = ("--cluster", "p3.16xlarge", *DATA, "--dump-passes")
    run_json(capsys, *plan, str(tmp_path / "passes"))
    index = (tmp_path / "passes" / "index.txt").read_text()
    assert "00-from-jaxpr.txt" in index and (tmp_path / "passes" / "00-from-jaxpr.txt").is_file()
    code, _, err = run(capsys, *plan, str(tmp_path / "more"), "--cluster", "dgx-1")
    assert code == Exit.ERROR and "--dump-passes is for one plan" in err and not (tmp_path / "more").exists()


def test_a_plan_is_exported_for_one_cluster(capsys, tmp_path):
    plan = ("--cluster", "p3.16xlarge", *DATA, "--export")
    run_json(capsys, *plan, f"megatron={tmp_path / 'flags'}")
    assert "--global-batch-size 256\n" in (tmp_path / "flags").read_text()
    run_json(capsys, *plan, f"jax={tmp_path / 'parallel.py'}", "--num-microbatches", "1")
    text = (tmp_path / "parallel.py").read_text()
    compile(text, "parallel.py", "exec")
    assert "def parallel(step, *args" in text
    code, _, err = run(capsys, *plan, f"jx={tmp_path / 'other'}")
    assert code == Exit.ERROR and "Did you mean 'jax'?" in err and not (tmp_path / "other").exists()
    with pytest.raises(SystemExit):
        run(capsys, *plan, "jax")


def test_the_plan_is_that_of_the_library(capsys):
    from alpa_lite.cli.user_files import load_example

    step, args, _ = load_example("what_if_model.py:example")
    plan = al.plan(step, *args, cluster="p3.16xlarge", planner=al.planners.DataParallel())
    assert run_json(capsys, "--cluster", "p3.16xlarge", *DATA)["step_seconds"] == plan.prediction.step_seconds


def compare(capsys, *arguments):
    capsys.readouterr()
    code = cli.main(["compare", "what_if_model.py:example", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_planners_side_by_side(capsys, at_work):
    path = str(at_work / "mine.json")
    run(capsys, "--cluster", "p3.16xlarge", "--planner", "fsdp", "--output", path)
    named = ("megatron:--micro-batch-size 8 --use-distributed-optimizer", "hybrid:pipeline=2:data=4", path)
    code, out, _ = compare(capsys, *named, "--cluster", "p3.16xlarge")
    assert code == 0 and "megatron settings (dp8 × zero1)" in out and "2 pipeline × 4 data" in out
    code, out, _ = compare(capsys, *named, "--cluster", "p3.16xlarge", "--json")
    found = documented("compare", json.loads(out))
    assert code == 0 and [each["problem"] for each in found["plans"]] == [None] * 3
    alone = run_json(capsys, "--cluster", "p3.16xlarge", "--planner", "hybrid:pipeline=2:data=4")
    assert found["plans"][1]["plan"]["step_seconds"] == alone["step_seconds"]
    assert min(each["slower"] for each in found["plans"]) == 1.0


def test_comparisons_without_a_plan_are_told(capsys, at_work):
    code, out, _ = compare(capsys, "data_parallel", "fsdp", "--cluster", "p3.16xlarge", "--memory", "1MB")
    assert code == Exit.INFEASIBLE and out.count("has no plan") == 2
    code, _, err = compare(capsys, "fsdp", "--cluster", "p3.16xlarge", "--cluster", "dgx-1")
    assert code == Exit.ERROR and "--cluster was given 2 times" in err
    path = str(at_work / "mine.json")
    run(capsys, "--cluster", "p3.16xlarge", *DATA, "--output", path)
    code, _, err = compare(capsys, path, "--cluster", "p3.16xlarge", "--memory", "8GB")
    assert code == Exit.ERROR and "keeps its own predictions" in err


JITTED = """

from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

def sharding(*spec):
    return NamedSharding(AbstractMesh((2, 4), ("data", "model")), PartitionSpec(*spec))

jitted = jax.jit(train_step, in_shardings=(sharding(None, "model"), sharding("data"), sharding("data")))

def as_jitted():
    return jitted, example()[1]

def write(path):
    lowered = jitted.trace(*example()[1]).lower(lowering_platforms=("cpu",))
    path.write_text(lowered.as_text())
"""


@pytest.fixture
def program(at_work):
    """The text of a jitted step, whose module has the step too."""
    module = at_work / "jitted_model.py"
    module.write_text((at_work / "what_if_model.py").read_text() + JITTED)
    made = {}
    exec(module.read_text(), made)
    made["write"](at_work / "step.txt")
    return "step.txt"


def test_a_program_is_imported(capsys, at_work, program):
    words = ["import", program, "--step", "jitted_model.py:example", "--cluster", "p3.16xlarge"]
    capsys.readouterr()
    assert cli.main([*words, "--json", "--output", "mine.json"]) == 0
    found = documented("import", json.loads(capsys.readouterr().out))
    assert (found["kind"], found["name"]) == ("plan", "as compiled")
    assert al.Plan.load("mine.json").prediction.step_seconds == found["step_seconds"]
    assert cli.main([*words, "--json", "--num-microbatches", "2"]) == 0
    assert documented("import", json.loads(capsys.readouterr().out))["num_microbatches"] == 2
    named = ["jitted", f"compiled:{program}", f"compiled:program={program}:inside=cheapest"]
    step = ["jitted_model.py:as_jitted", "--cluster", "p3.16xlarge", "--json"]
    assert cli.main(["compare", *step, *named]) == 0
    seconds = [each["plan"]["step_seconds"] for each in json.loads(capsys.readouterr().out)["plans"]]
    assert seconds[0] == seconds[1] == found["step_seconds"] >= seconds[2]


def test_what_cannot_be_imported(capsys, at_work, program):
    (at_work / "flags.sh").write_text("--micro-batch-size 8")
    for words, why in (
        (["none.txt"], "There is no file 'none.txt' to import"),
        (["flags.sh", "--cluster", "dgx-1"], "--cluster was given 2 times"),
        ([program, "--num-hosts", "2"], "is partitioned for 8 devices, but p3.16xlarge has 16"),
        ([program, "--as", "deepspeed"], "The deepspeed settings"),
    ):
        assert cli.main(["import", *words, "--step", "jitted_model.py:example", "--cluster", "p3.16xlarge"]) == 1
        assert why in capsys.readouterr().err
    assert cli.main(["import", "flags.sh", "--step", "jitted_model.py:example", "--cluster", "p3.16xlarge"]) == 0
    assert "megatron settings" in capsys.readouterr().out


WRONG = """

import alpa_lite as al
import itertools

counts = itertools.count(1)

def drifting(params, x, y):
    new, value = train_step(params, x, y)
    return new, value * next(counts)

def wrong():
    return (drifting, *example()[1:])

def decorated():
    options = {"cluster": "p3.16xlarge", "planner": al.planners.DataParallel(), "num_microbatches": 4}
    return (al.parallelize(train_step, batch_argnums=("x", "y"), **options), *example()[1:])
"""


def run_check(capsys, function, *arguments):
    capsys.readouterr()
    code = cli.main(["check", f"checked_model.py:{function}", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


PLANNED = ("--cluster", "p3.16xlarge", "--planner", "hybrid", "--option", "pipeline=2", "--option", "data=4")


def test_a_right_step(capsys, devices):
    code, out, err = run_check(capsys, "example", *PLANNED, "--num-microbatches", "4")
    assert code == Exit.DONE and not err
    assert (
        "gives what jax.jit gives: 3 outputs" in out
        and "0/1" in out
        and "arguments were drawn" in " ".join(out.split())
    )
    code, out, _ = run_check(capsys, "example", *PLANNED, "--num-microbatches", "4", "--json")
    found = documented("check", json.loads(out))
    assert code == Exit.DONE and found["ok"] and found["num_microbatches"] == 4 and found["drawn"]
    assert [leaf["name"] for leaf in found["leaves"]] == ["0/0", "0/1", "1"]


def test_a_wrong_step(capsys, devices):
    code, out, err = run_check(capsys, "wrong", *PLANNED)
    assert code == Exit.ERROR and "DIFFERS" in out and "1 (float32[]) is off by" in err and "Traceback" not in err
    code, out, err = run_check(capsys, "wrong", *PLANNED, "--json")
    found = documented("check", json.loads(out))
    assert code == Exit.ERROR and not found["ok"] and "is off by" in err
    assert [leaf["name"] for leaf in found["leaves"] if not leaf["ok"]] == ["1"]


def test_the_options_of_a_decorated_step_count(capsys, devices):
    code, out, _ = run_check(capsys, "decorated")
    assert code == Exit.DONE and "data parallel" in out and "in 4 micro-batches" in out
    code, out, _ = run_check(capsys, "decorated", "--num-microbatches", "2")
    assert code == Exit.DONE and "in 2 micro-batches" in out


def test_a_cluster_of_another_size_is_a_sentence(capsys, devices):
    code, _, err = run_check(capsys, "example", "--cluster", "p3.16xlarge:2")
    assert code == Exit.ERROR and "--devices 16" in err


def test_virtual_devices_are_those_of_another_process():
    command = ["check", "checked_model.py:example", "--devices", "4", "--cluster", "a4x-highgpu-4g", "--json"]
    command += ["--planner", "data_parallel", "--num-microbatches", "2"]
    done = subprocess.run(
        [sys.executable, "-m", "alpa_lite.cli", *command], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["num_devices"] == 4
