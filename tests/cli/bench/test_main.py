"""The command: its output, what it keeps, its errors and exit codes."""

import json
from pathlib import Path

import pytest

from alpa_lite import cli
from alpa_lite.cli import machine_commands
from alpa_lite.cli.bench import __main__ as bench
from alpa_lite.cli.bench import report
from alpa_lite.cli.bench.request import ALPA, ZOO, named_models
from alpa_lite.cli.bench.row import row_of_line
from tests.cli.schema import names_of
from tests.inspection.page.test_html import parse

PRICED = [
    "--model",
    "mlp-tiny",
    "--cluster",
    "p3.16xlarge",
    "--planners",
    "auto:pipeline=1,data_parallel,hybrid:data=3",
]


def run(capsys, *arguments):
    capsys.readouterr()
    code = bench.main(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_it_prices_prints_and_keeps(capsys, tmp_path):
    code, out, _ = run(capsys, *PRICED, "--simulate", "--out", str(tmp_path / "kept"))
    assert code == 0 and "Auto against the best manual plan" in out and "data parallel" in out
    assert "degrees whose product is 8" in " ".join(out.split())
    rows = [row_of_line(line) for line in (tmp_path / "kept" / "rows.jsonl").read_text().splitlines()]
    assert [bool(row.reason) for row in rows] == [False, False, True]
    assert rows[0].predicted_seconds <= rows[1].predicted_seconds and rows[0].run is None
    parse((tmp_path / "kept" / "report.html").read_text())
    assert (tmp_path / "kept" / "mlp-tiny.png").exists()


def test_lines_of_json_are_all_that_stands_on_the_standard_output(capsys):
    code, out, err = run(capsys, *PRICED, "--json")
    assert code == 0 and [json.loads(line)["model"] for line in out.splitlines()] == ["mlp-tiny"] * 3
    assert set(json.loads(out.splitlines()[0])) == names_of("bench") - {"alpa-lite bench"}
    assert "Auto against" in err


def test_without_matplotlib_there_are_no_charts(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(report.util, "find_spec", lambda name: None)
    code, out, _ = run(capsys, *PRICED, "--out", str(tmp_path))
    assert code == 0 and "alpa_lite[viz]" in out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "rows.jsonl"]


def test_plans_are_measured_here(capsys, devices, tmp_path, monkeypatch):
    """With `--devices 0`, the devices at hand; quickly described instead of calibrated."""
    planners = "data_parallel,hybrid:data=8,pipeline"
    code, out, _ = run(
        capsys,
        *[
            "--model",
            "mlp-tiny",
            "--planners",
            planners,
            "--devices",
            "0",
            "--calibrate",
            "0",
            "--steps",
            "2",
            "--json",
        ],
    )
    rows = [row_of_line(line) for line in out.splitlines()]
    assert code == 0 and all(len(row.run.samples) == 2 for row in rows)
    assert rows[1].run.same_as == "data parallel" and rows[0].cluster.startswith("local")


def test_a_search_that_is_slower_than_allowed_fails(capsys):
    code, _, err = run(capsys, *PRICED, "--fail-above", "0.0001")
    assert code == 1 and "That is more than 0.0001." in err
    assert run(capsys, *PRICED, "--fail-above", "1.02")[0] == 0


def test_a_model_without_any_plan_fails(capsys):
    code, out, _ = run(capsys, *PRICED[:-1], "hybrid:data=3")
    assert code == 1 and "No planner found a plan." in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "gpt-huge"], "no model 'gpt-huge'"),
        ([*PRICED, "--measure"], "Leave out --cluster"),
        ([*PRICED[:2], "--cluster", "nowhere"], "nowhere"),
        ([*PRICED[:2], "--cluster", "p3.16xlarge:many"], "NAME:HOSTS"),
        ([*PRICED, "--num-microbatches", "few"], "no list of numbers"),
        ([*PRICED[:-1], "magic"], "no planner 'magic'"),
        ([*PRICED, "--out", str(Path(__file__) / "folder")], "cannot be written"),
    ],
)
def test_errors_are_sentences(capsys, arguments, words):
    code, out, err = run(capsys, *arguments)
    assert code == 1 and words in err and not out


def test_a_wrong_planner_is_told_before_the_devices_are_measured(capsys, monkeypatch):
    monkeypatch.setattr(bench, "_this_machine", lambda *_: pytest.fail("measured"))
    code, out, err = run(capsys, "--model", "mlp-tiny", "--devices", "0", "--planners", "auto,fsdq")
    assert code == 1 and "Did you mean 'fsdp'?" in err and not out


def test_unknown_options_are_the_parsers(capsys):
    with pytest.raises(SystemExit) as stopped:
        bench.main(["--speed", "11"])
    assert stopped.value.code == 2


def test_hosts_of_a_cluster(capsys):
    code, out, _ = run(capsys, *PRICED[:2], "--cluster", "p3.16xlarge:2", "--planners", "data_parallel", "--json")
    assert code == 0 and json.loads(out)["num_devices"] == 16


def test_numbers_of_microbatches_are_contenders_of_their_own(capsys):
    arguments = [*PRICED[:4], "--planners", "data_parallel", "--num-microbatches", "auto,4", "--batch", "32", "--json"]
    rows = [row_of_line(line) for line in run(capsys, *arguments)[1].splitlines()]
    assert [row.planner for row in rows] == ["data parallel", "data parallel, 4 micro-batches"]
    assert rows[1].price.num_microbatches == 4 and rows[0].batch_size == 32


@pytest.fixture
def started(monkeypatch):
    """The programs that would have been started: name, arguments and environment."""
    found = []

    def start(name, words, environment, **options):
        found.append((name, words, environment))
        return 7

    monkeypatch.setattr(bench, "run_module", start)
    monkeypatch.setattr(machine_commands, "run_module", start)
    return found


def test_virtual_devices_are_asked_for_before_jax_starts(started):
    assert bench.main(["--model", "mlp-tiny", "--devices", "4"]) == 7
    ((name, words, environment),) = started
    assert name == "alpa_lite.cli.bench" and words[-2:] == ["--devices", "0"]
    assert "device_count=4" in environment["XLA_FLAGS"] and environment["JAX_PLATFORMS"] == "cpu"


def test_models_of_alpas_evaluation_are_priced_where_they_were_run(capsys, monkeypatch):
    monkeypatch.setattr(bench, "_with_devices", lambda *_: pytest.fail("this needs no devices"))
    code, out, _ = run(capsys, "--model", "wrn-250M", "--planners", "data_parallel", "--json")
    assert code == 0
    row = row_of_line(out.splitlines()[0])
    assert row.num_devices == 1 and row.price.tflops_per_device > 0


def test_the_command_line_starts_it_in_a_process_of_its_own(started):
    assert cli.main(["bench", "--model", "mlp-tiny", "--planners", "auto", "--json"]) == 7
    ((name, words, _),) = started
    assert (name, words) == ("alpa_lite.cli.bench", ["--model", "mlp-tiny", "--planners", "auto", "--json"])


def test_the_lines_of_the_page_are_understood():
    page = Path(bench.__file__).parents[3] / "docs" / "benchmark.md"
    lines = [line.partition("#")[0].split() for line in page.read_text().splitlines() if line.startswith("alpa-lite b")]
    assert len(lines) >= 6
    for line in lines:
        given = bench.parser().parse_args(line[2:])
        models = [name for name in named_models(given.model) if ":" not in name]
        assert all(name in ZOO or name in ALPA for name in models)


def test_the_page_names_every_model():
    text = (Path(bench.__file__).parents[3] / "docs" / "benchmark.md").read_text()
    assert all(f"`{name}`" in text for name in ZOO)


def test_names_of_files():
    assert bench.file_name("my.module:step/one") == "my.module-step-one"
