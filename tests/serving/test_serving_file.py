"""Files that hold no serving problem are refused with a sentence that begins with their name."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from alpa_lite.errors import ServingProblemError
from alpa_lite.serving import known_serving_problems, read_serving_problem, write_serving_problem
from alpa_lite.serving.serving_file import serving_problem_data, serving_problem_of

GOOD = serving_problem_data(read_serving_problem("vqa-medium"))


@pytest.mark.parametrize("name", known_serving_problems())
def test_problems_that_ship_are_written_as_they_were_read(name: str, tmp_path: Path) -> None:
    write_serving_problem(read_serving_problem(name), tmp_path / "problem.json")
    shipped = Path(__file__).parents[2] / "alpa_lite" / "serving" / "problems" / f"{name}.json"
    assert (tmp_path / "problem.json").read_text() == shipped.read_text()


def _first(key: str, change: Callable[[Any], object]) -> Callable[[Any], object]:
    return lambda data: change(data[key][0])


def _set(key: str, value: object) -> Callable[[Any], object]:
    return lambda entry: entry.__setitem__(key, value)


def _remove(key: str) -> Callable[[Any], object]:
    return lambda entry: entry.pop(key)


WRONG: dict[str, tuple[Callable[[Any], object], str]] = {
    "no format": (_remove("format"), 'it needs "format"'),
    "another version": (_set("version", 2), '"version": 1'),
    "no name": (_remove("name"), "'name' of the file is missing or no text"),
    "no sources": (_set("sources", []), "at least one source, one operator and one worker"),
    "operators that are no list": (_set("operators", 3), "'operators' of the file is missing or no list"),
    "a source that is no object": (_set("sources", [3]), "each of 'sources' has to be an object"),
    "a rate that is text": (_first("sources", _set("messages_per_second", "40")), "missing or no number"),
    "a rate of 0": (_first("sources", _set("messages_per_second", 0)), "a finite number above 0"),
    "a negative price": (_first("workers", _set("dollars_per_hour", -1)), "a finite number of at least 0"),
    "a tier of 1.5": (_first("workers", _set("tier", 1.5)), "'tier' of cpu-1 is missing or no whole number"),
    "a true price": (_first("workers", _set("dollars_per_hour", True)), "missing or no number"),
    "two workers of a name": (_first("workers", _set("name", "gpu-1")), "two of the name 'gpu-1'"),
    "no variants": (_first("operators", _set("variants", [])), "ExtractImageFeature has no variants"),
    "a latency on no worker": (
        lambda data: data["operators"][0]["variants"][0]["latency_ms"].update(nobody=1.0),
        "'nobody', which is no worker",
    ),
    "a sample of one input": (
        lambda data: data["operators"][2]["variants"][0]["samples"][0].update(inputs=[1.0]),
        "needs accuracy samples with 2 input accuracies each, of ExtractImageFeature, SpeechRecognition",
    ),
    "an edge to nobody": (_first("edges", _set("receiver", "nobody")), "from 'ReadImage' to 'nobody'"),
    "a circle": (_first("edges", _set("sender", "VQA")), "the edges go in a circle"),
    "an edge twice": (lambda data: data["edges"].append(data["edges"][0]), "two edges join the same two"),
    "an operator without input": (lambda data: data["edges"].pop(0), "ExtractImageFeature has no input"),
    "two sinks": (lambda data: data["edges"].pop(2), "it is ExtractImageFeature and VQA"),
    "a link back": (_first("links", _set("senders", ["gpu-2"])), "only traffic to a higher tier has one"),
    "a link to nobody": (_first("links", _set("receivers", ["nobody"])), "the link from 'ReadImage' to 'nobody'"),
    "a link of one text": (_first("links", _set("receivers", "gpu-1")), "missing or no list of texts"),
    "an accuracy of no variant": (
        lambda data: data["accuracies"][0]["variants"].update(VQA="other"),
        "which are not one of each operator",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_told(what: str) -> None:
    change, sentence = WRONG[what]
    data = copy.deepcopy(GOOD)
    change(data)
    with pytest.raises(ServingProblemError, match=r"^vqa-medium: |^file\.json") as caught:
        serving_problem_of(data, "file.json")
    assert sentence in str(caught.value) and str(caught.value).endswith(".")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [("{", "line 1"), ("[1, NaN]", "NaN"), ("3", "the file has to be an object"), ("[" * 99, "nests 99 deep")],
)
def test_text_that_is_no_problem(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "file.json"
    path.write_text(text)
    with pytest.raises(ServingProblemError, match=f"^{path}.*{sentence}"):
        read_serving_problem(path)


def test_a_file_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ServingProblemError, match=r"cannot be read: .*Did you mean 'vqa-medium'\?"):
        read_serving_problem("vqa-mediun")
    with pytest.raises(ServingProblemError, match="cannot be read"):
        read_serving_problem(tmp_path)


def test_keys_that_may_be_left_out(tmp_path: Path) -> None:
    data = copy.deepcopy(GOOD)
    for key in ("min_accuracy", "links", "accuracies"):
        del data[key]
    path = tmp_path / "file.json"
    path.write_text(json.dumps(data))
    problem = read_serving_problem(path)
    assert problem.min_accuracy is None and not problem.accuracies
    # Composed of samples: those of the better image model are reached by an even better one.
    variants = {"ExtractImageFeature": "resnet152", "SpeechRecognition": "wav2vec2-base-960h", "VQA": "default"}
    assert problem.accuracy(variants) == 55.91
    assert read_serving_problem("vqa-medium").accuracy(variants) == 55.76
