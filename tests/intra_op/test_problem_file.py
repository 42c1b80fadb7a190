"""Files: what is written is read again, the contest's format and its corners, and sentences for what is not one."""

import gzip
import json
import math
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alpa_lite.errors import ProblemFileError
from alpa_lite.intra_op.problem import Edge, Problem, Status, Usage, evaluate
from alpa_lite.intra_op.problem_file import (
    read_problem,
    seconds_since_start,
    solution_data,
    solution_line,
    solve_file,
    solver_named,
    write_problem,
    write_solution,
)
from alpa_lite.intra_op.solvers import BruteForce, Highs, Portfolio
from tests.intra_op.instances import random_problem
from tests.mutations import damaged, mutated

TWO_NODES = {
    "problem": {
        "name": "two",
        "nodes": {
            "intervals": [[0, 4], [7, 7]],
            "costs": [[1, 10**18], [0, 5, 10**19]],
            "usages": [[6, 0], [9, 9, 9]],
        },
        "edges": {"nodes": [[0, 1], [0, 1]], "costs": [[10**18, 2, 3, 4, 5, 6], [1, 1, 1, 1, 1, 1]]},
        "usage_limit": 6,
    }
}


def written(folder: Path, data: object, name: str = "two.json") -> Path:
    path = folder / name
    opened = gzip.open(path, "wt") if name.endswith(".gz") else path.open("w")
    with opened as file:
        json.dump(data, file)
    return path


@pytest.mark.parametrize("name", ["two.json", "two.json.gz"])
def test_the_format_of_the_contest(tmp_path: Path, name: str):
    problem = read_problem(written(tmp_path, TWO_NODES, name))
    assert problem.num_strategies == (2, 3)
    assert problem.usage_nodes.tolist() == [0]  # the other interval is empty
    assert math.isinf(evaluate(problem, (0, 0)).cost)
    priced = evaluate(problem, (0, 1))
    assert (priced.cost, priced.peak_bytes, priced.feasible) == (1 + 5 + 2 + 1, 6.0, True)
    assert math.isinf(evaluate(problem, (0, 2)).cost)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([None, 0.4]))
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, seed: int, tightness: float | None):
    problem = random_problem(seed, num_nodes=3, max_strategies=3, num_usages=4, tightness=tightness)
    path = tmp_path_factory.mktemp("written") / "problem.json.gz"
    write_problem(problem, path)
    again = read_problem(path)
    assert again.num_strategies[: problem.num_nodes] == problem.num_strategies
    before, after = BruteForce().solve(problem), BruteForce(max_combinations=10**7).solve(again)
    assert after.status is before.status
    assert after.cost == pytest.approx(before.cost)
    if before.choices is not None and after.choices is not None:
        assert evaluate(problem, after.choices[: problem.num_nodes]).feasible


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda p: p.pop("nodes"), "'nodes' is missing or of the wrong kind"),
        (lambda p: p["nodes"]["costs"].pop(), "one entry for each node"),
        (lambda p: p["edges"]["costs"].pop(), "one entry for each edge"),
        (lambda p: p["edges"]["costs"][0].pop(), "one row per strategy of the source"),
        (lambda p: p["edges"]["nodes"].__setitem__(0, [0, 9]), "names node 9"),
        (lambda p: p["nodes"]["usages"][0].pop(), "the node has 2 strategies"),
        (lambda p: p["nodes"]["usages"][0].__setitem__(0, -1), "negative"),
        (lambda p: p.__setitem__("usage_limit", -1), "memory limit is -1"),
        (lambda p: p["nodes"]["costs"][0].__setitem__(0, "x"), "two.json"),
        (lambda p: p.__setitem__("nodes", 3), "of the wrong kind"),
    ],
)
def test_bad_files_are_sentences(tmp_path: Path, change, sentence: str):
    data = json.loads(json.dumps(TWO_NODES))
    change(data["problem"])
    with pytest.raises(ProblemFileError, match=sentence):
        read_problem(written(tmp_path, data))


def test_missing_files_and_other_files_are_sentences(tmp_path: Path):
    with pytest.raises(ProblemFileError, match=r"nowhere\.json cannot be read: No such file"):
        read_problem(tmp_path / "nowhere.json")
    (tmp_path / "text.json").write_text("hello")
    with pytest.raises(ProblemFileError, match="is not JSON"):
        read_problem(tmp_path / "text.json")
    (tmp_path / "plain.json.gz").write_text("{}")
    with pytest.raises(ProblemFileError, match="cannot be read"):
        read_problem(tmp_path / "plain.json.gz")


def test_a_file_is_solved_and_the_solution_written(tmp_path: Path):
    solution = solve_file(written(tmp_path, TWO_NODES), out=tmp_path / "out.json")
    assert json.loads((tmp_path / "out.json").read_text()) == solution_data(solution)
    assert solution.choices == (0, 1)
    assert solution_data(solution)["cost"] == 9
    assert isinstance(solution_data(solution)["cost"], int)
    assert solution_line(solution).startswith("optimal  cost 9  bound 9  gap 0.0000%  peak 6 bytes")
    with pytest.raises(ProblemFileError, match="there is no folder"):
        solve_file(written(tmp_path, TWO_NODES), out=tmp_path / "no" / "out.json")


def test_infeasible_files_say_what_is_needed(tmp_path: Path):
    data = json.loads(json.dumps(TWO_NODES))
    data["problem"]["usage_limit"] = 5
    solution = solve_file(written(tmp_path, data), out=tmp_path / "out.json")
    found = json.loads((tmp_path / "out.json").read_text())
    assert (found["status"], found["choices"], found["cost"], found["peak_bytes"]) == ("infeasible", None, None, 6)
    assert solution.status is Status.INFEASIBLE
    assert "smallest peak found 6 bytes" in solution_line(solution)


def test_solvers_by_name(tmp_path: Path):
    path = written(tmp_path, TWO_NODES)
    for name in ("portfolio", "elimination", "highs", "pulp", "brute-force", "search"):
        assert solve_file(path, solver=solver_named(name, rounds=3)).cost == 9.0
    assert isinstance(solver_named("highs"), Highs)
    assert solver_named("portfolio", seed=7, rounds=5) == Portfolio(
        rounds=type(Portfolio().rounds)(seed=7, max_rounds=5)
    )
    with pytest.raises(ProblemFileError, match=r"There is no solver 'cplex'\. Choose one of portfolio"):
        solver_named("cplex")
    large = Problem.of(
        node_costs=[np.zeros(10)] * 9, edges=[Edge(source=0, target=1, costs=np.ones((10, 10)))], usages=[]
    )
    write_problem(large, tmp_path / "large.json")
    with pytest.raises(ProblemFileError, match="combinations"):
        solve_file(tmp_path / "large.json", solver=BruteForce())
    with pytest.raises(ProblemFileError, match=r"There is no solver 'brute-forse'\. Did you mean 'brute_force'\?"):
        solver_named("brute-forse")


def test_whole_numbers_stay_whole_and_infinity_keeps_its_sign(tmp_path: Path):
    problem = Problem.of(
        node_costs=[np.array([2.0**52 + 1, np.inf])],
        usages=[Usage(node=0, bytes=np.array([3.0, 4.0]), start=0, end=1)],
        limit_bytes=7.0,
    )
    write_problem(problem, tmp_path / "one.json")
    data = json.loads((tmp_path / "one.json").read_text())["problem"]
    assert data["nodes"]["costs"] == [[2**52 + 1, 10**18]]
    assert (data["nodes"]["usages"], data["usage_limit"], data["name"]) == ([[3, 4]], 7, "one")
    write_solution(Portfolio().solve(problem), tmp_path / "solution.json")
    assert json.loads((tmp_path / "solution.json").read_text())["cost"] == 2**52 + 1


def test_the_process_knows_its_age():
    assert 0.0 <= seconds_since_start() < 24 * 3600


@pytest.mark.parametrize("count", [80, pytest.param(5000, marks=pytest.mark.long)])
@pytest.mark.parametrize("ending", ["json", "json.gz"])
def test_any_damage_is_a_sentence_or_a_problem(ending: str, count: int, tmp_path: Path):
    path = tmp_path / f"problem.{ending}"
    write_problem(random_problem(np.random.default_rng(0)), path)
    whole = path.read_bytes()
    data = json.loads(gzip.decompress(whole) if ending == "json.gz" else whole)

    @settings(max_examples=count)
    @given(seed=st.integers(0, 2**32), changes=st.integers(0, 3))
    def run(seed: int, changes: int) -> None:
        chance = random.Random(seed)
        if changes:
            text = json.dumps(mutated(data, chance, changes=changes)).encode()
            path.write_bytes(gzip.compress(text, 1) if ending == "json.gz" else text)
        else:
            path.write_bytes(damaged(whole, chance))
        try:
            read_problem(path)
        except ProblemFileError as error:
            assert str(error).startswith(str(path))

    run()


def test_deep_nesting_is_a_sentence(tmp_path: Path):
    (tmp_path / "deep.json").write_text("[" * 10**5)
    with pytest.raises(ProblemFileError, match="cannot be read"):
        read_problem(tmp_path / "deep.json")
