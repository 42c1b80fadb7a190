"""The page in a real browser: it loads in silence, finds, zooms, changes colours, and does all that by keyboard.

Needs playwright (which only drives the browser) and a Chromium that is installed; without either it is skipped.
"""

import re
from dataclasses import replace

import pytest

from alpa_lite.inspection.text.groups import arguments_of, group_arguments
from alpa_lite.plan.plan import ArrayShape
from alpa_lite.sharding.meshes import LogicalMesh, Submesh
from alpa_lite.sharding.specs import Spec
from alpa_lite.text import read_bytes
from tests.inspection.page.test_html import HOSTILE, with_hostile_name

CONSIDERED = "#alternatives table[aria-label='Plans considered']"


class Opened:
    """A page that was opened, and what it said and asked for meanwhile."""

    def __init__(self, page, path):
        self.page, self.said, self.asked = page, [], []
        page.on("console", lambda message: self.said.append(message.text))
        page.on("pageerror", lambda error: self.said.append(str(error)))
        page.on("dialog", lambda dialog: (self.said.append(dialog.message), dialog.dismiss()))
        page.on("request", lambda request: self.asked.append(request.url))
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-ready]")
        assert self.asked == [path.as_uri()]

    def rows(self, table):
        """The first cells of the rows that are visible."""
        found = self.page.locator(f"{table} tbody tr:visible > :first-child").all_inner_texts()
        return [text.split("\n")[0] for text in found]

    def search(self, words):
        self.page.fill("#search", words)
        self.page.wait_for_timeout(150)

    def labels(self):
        """Micro-batches whose number is drawn."""
        return self.page.locator("#timeline text.on").all_text_contents()

    def ticks(self):
        return self.page.locator("#timeline text.middle").all_text_contents()

    def settle(self):
        """Drawing waits for the next frame."""
        self.page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


@pytest.fixture
def opened(browser, tmp_path):
    """Opens the page of a plan; in the end nothing may have been said."""
    pages = []

    def open_page(plan, *, dark=False, width=1280, **spans):
        path = tmp_path / f"{len(pages)}.html"
        plan.to_html(path, **spans)
        scheme = "dark" if dark else "light"
        context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 800})
        pages.append((context, Opened(context.new_page(), path)))
        return pages[-1][1]

    yield open_page
    for context, page in pages:
        assert page.said == []
        context.close()


def test_loads_in_silence(opened, tensor_plan, pipeline_plan, interleaved_plan):
    for plan in (tensor_plan, pipeline_plan, interleaved_plan):
        shown = opened(plan)
        rows = len(plan.stages_together)
        assert shown.page.locator("#timeline svg").count() == 1
        assert shown.page.locator("#memory .held").count() == rows
        assert shown.page.locator("svg.cluster .device").count() == 8
        assert shown.page.title() == f"{plan.function}: {plan.name}"


def test_search(opened, tensor_plan):
    shown = opened(tensor_plan)
    every = shown.rows("#arrays")
    shown.search("kernel")
    some = shown.rows("#arrays")
    assert not some or all("kernel" in row for row in some)
    name = next(row for row in every if "params" in row)
    shown.search(name)
    assert name in shown.rows("#arrays") and len(shown.rows("#arrays")) < len(every)
    assert re.fullmatch(r"\d+ of \d+ rows", shown.page.inner_text("#found"))
    shown.search("no such thing at all")
    assert shown.rows("#arrays") == [] and shown.page.inner_text("#found").startswith("0 of ")
    shown.page.press("#search", "Escape")
    assert shown.rows("#arrays") == every and shown.page.inner_text("#found") == ""


def test_search_finds_one_array_of_a_group(opened, pipeline_plan):
    shown = opened(pipeline_plan)
    group = shown.page.locator("#arrays tbody tr:visible", has=shown.page.locator("details")).first
    name = group.locator("li").nth(1).text_content().split(" ")[0]
    shown.search(name)
    assert shown.page.locator("#arrays li:visible").all_inner_texts()[0].startswith(name)
    assert all(text.startswith(name) for text in shown.page.locator("#arrays li:visible").all_inner_texts())


def test_search_for_a_stage(opened, pipeline_plan):
    shown = opened(pipeline_plan)
    shown.search("stage 1")
    assert shown.rows("#stages table") == ["1"]
    assert shown.page.locator("#arrays tbody tr:visible").count() > 0
    for chips in shown.page.locator("#arrays tbody tr:visible td:nth-child(7)").all_inner_texts():
        assert "1" in chips


def test_search_for_a_stage_of_many(opened, tensor_plan):
    (only,) = tensor_plan.stages
    mesh = LogicalMesh(axis_names=only.mesh_shape.axis_names, shape=(1, 1))
    stages = tuple(
        replace(
            only,
            layers=(number, number),
            submesh=Submesh(first_device=number, num_hosts=1, devices_per_host=1),
            mesh_shape=mesh,
            specs={f"{name}[{number}:{number + 1}]": spec for name, spec in only.specs.items()},
        )
        for number in range(8)
    )
    peaks = replace(tensor_plan.prediction, peak_bytes=8 * tensor_plan.prediction.peak_bytes)
    shown = opened(replace(tensor_plan, stages=stages, num_layers=8, num_microbatches=4, prediction=peaks))
    shown.search("stage 5")
    assert shown.rows("#stages table") == ["5"]
    names = shown.page.locator("#arrays li:visible").all_inner_texts()
    assert len(names) == sum("opt_state" not in name for name in only.specs) > 5
    assert all("[5:6] stage 5" in name for name in names)
    shown.search("stage 8")
    assert shown.page.inner_text("#found").startswith("0 of ")


def test_filter_by_kind_and_optimizer(opened, tensor_plan):
    shown = opened(tensor_plan)
    every = shown.rows("#arrays")
    shown.page.check("#optimizer")
    assert len(shown.rows("#arrays")) > len(every)
    assert any("opt_state" in row for row in shown.rows("#arrays"))
    shown.page.uncheck("#optimizer")
    shown.page.select_option("#kind", "column")
    assert 0 < len(shown.rows("#arrays")) < len(every)
    assert set(shown.page.locator("#arrays tbody tr:visible b").all_inner_texts()) == {"column"}
    shown.page.check("#open")
    assert (
        shown.page.locator("#arrays details[open]:visible").count()
        == shown.page.locator("#arrays tbody tr:visible details").count()
    )


def columns(shown, table):
    """The heads of a table by their text."""
    heads = shown.page.locator(f"{table} thead th")
    return {text: heads.nth(number) for number, text in enumerate(heads.all_text_contents())}


def test_columns_put_rows_in_order_by_mouse(opened, tensor_plan):
    shown = opened(tensor_plan)
    written, head = shown.rows("#arrays"), columns(shown, "#arrays")["bytes of a device"]
    groups = {
        group.pattern: sum(member.block.bytes for member in group.members)
        for group in group_arguments(arguments_of(tensor_plan).plain)
    }
    assert set(written) == set(groups)
    for order, reverse in (("descending", True), ("ascending", False)):
        head.locator("button").click()
        assert head.get_attribute("aria-sort") == order
        found = [groups[name] for name in shown.rows("#arrays")]
        assert found == sorted(found, reverse=reverse) and len(set(found)) > 2
    head.locator("button").click()
    assert head.get_attribute("aria-sort") is None and shown.rows("#arrays") == written


def test_columns_put_rows_in_order_by_keyboard(opened, tensor_plan):
    seconds = {"auto": tensor_plan.prediction.step_seconds, "ten": 10.0, "nine": 9.0, "none": float("inf")}
    others = tuple((name, found) for name, found in seconds.items() if name != "auto")
    shown = opened(replace(tensor_plan, alternatives=others))
    head = columns(shown, CONSIDERED)["plan"].locator("button")
    head.focus()
    shown.page.keyboard.press("Enter")
    names = shown.rows(CONSIDERED)
    assert names == sorted(names) and len(names) == 3
    time = columns(shown, CONSIDERED)["predicted ms per step"]
    time.locator("button").focus()
    shown.page.keyboard.press("Space")
    assert time.get_attribute("aria-sort") == "descending"
    assert columns(shown, CONSIDERED)["plan"].get_attribute("aria-sort") is None
    assert [name for name in shown.rows("#alternatives table") if name in seconds] == ["ten", "nine", "none"]
    # One plan that takes hundreds of times as long does not flatten the others.
    assert shown.page.locator("#alternatives .cut").count() == 2


def test_units_count_in_the_order(opened, tensor_plan):
    """1.5 KiB lies between 900 B and 1 MiB."""
    (only,) = tensor_plan.stages
    sizes = {"params/a": 225, "params/b": 262144, "params/c": 384}  # float32: 900 B, 1 MiB, 1.5 KiB
    stage = replace(
        only,
        specs=dict.fromkeys(sizes, Spec(((),))),
        shapes={name: ArrayShape(dims=(size,), dtype="float32") for name, size in sizes.items()},
    )
    shown = opened(replace(tensor_plan, stages=(stage,)), allocated_bytes=[tensor_plan.prediction.peak_bytes[0]])
    for column in ("whole", "bytes of a device"):
        columns(shown, "#arrays")[column].locator("button").click()
        assert shown.rows("#arrays") == ["params/b", "params/c", "params/a"]
    assert shown.page.locator("#memory-over-time td", has_text="1.00").count() == 1
    axis = columns(shown, "#communication .scroll:first-of-type table")["bytes"]
    axis.locator("button").click()
    texts = shown.page.locator("#communication table >> nth=0 >> tbody td:nth-child(6)").all_inner_texts()
    assert [read_bytes(text) for text in texts] == sorted(map(read_bytes, texts), reverse=True)


def test_zoom(opened, pipeline_plan):
    shown = opened(pipeline_plan)
    whole, ticks, memory = shown.labels(), shown.ticks(), shown.page.inner_html("#memory")
    shown.page.click("button[data-zoom='+']")
    shown.page.click("button[data-zoom='+']")
    shown.settle()
    assert shown.ticks() != ticks and shown.page.inner_html("#memory") != memory
    shown.page.focus("#timeline")
    for _ in range(4):
        shown.page.keyboard.press("+")
    shown.settle()
    closer = shown.ticks()
    shown.page.keyboard.press("ArrowRight")
    shown.settle()
    assert shown.ticks() != closer
    shown.page.keyboard.press("0")
    shown.settle()
    assert shown.ticks() == ticks and shown.labels() == whole and shown.page.inner_html("#memory") == memory


def test_wheel_zooms_where_the_pointer_is(opened, pipeline_plan):
    shown = opened(pipeline_plan)
    ticks = shown.ticks()
    box = shown.page.locator("#timeline svg").bounding_box()
    shown.page.mouse.move(box["x"] + 92 + 5, box["y"] + 31)
    task = shown.page.inner_text("#task")
    assert "forward of micro-batch 0" in task
    # The page scrolls as long as the timeline is not at work.
    shown.page.mouse.wheel(0, -200)
    shown.settle()
    assert shown.ticks() == ticks
    shown.page.focus("#timeline")
    for _ in range(5):
        shown.page.mouse.wheel(0, -200)
        shown.page.wait_for_timeout(50)
    shown.settle()
    zoomed = shown.ticks()
    assert zoomed != ticks
    shown.page.mouse.move(box["x"] + 92 + 6, box["y"] + 31)
    # What is under the pointer stays there, now op by op.
    assert task.split(",")[1].split(": ")[1] in shown.page.inner_text("#task")
    for _ in range(12):
        shown.page.mouse.wheel(0, 200)
        shown.page.wait_for_timeout(50)
    shown.settle()
    assert shown.ticks() == ticks


def test_drag_moves(opened, pipeline_plan):
    shown = opened(pipeline_plan)
    for _ in range(3):
        shown.page.click("button[data-zoom='+']")
    shown.settle()
    before = shown.ticks()
    box = shown.page.locator("#timeline svg").bounding_box()
    shown.page.mouse.move(box["x"] + 600, box["y"] + 30)
    shown.page.mouse.down()
    shown.page.mouse.move(box["x"] + 300, box["y"] + 30, steps=5)
    shown.page.mouse.up()
    shown.settle()
    assert shown.ticks() != before


def test_tasks_by_keyboard(opened, pipeline_plan):
    shown = opened(pipeline_plan)
    shown.page.focus("#timeline")
    said = []
    for key in (".", ".", "ArrowDown", ","):
        shown.page.keyboard.press(key)
        said.append(shown.page.inner_text("#task"))
    assert "stage 0: forward of micro-batch 0" in said[0]
    assert "stage 0: " in said[1] and said[1] != said[0]
    assert "to stage 0: transfer" in said[2] and "to stage 0: transfer" in said[3]
    shown.page.keyboard.press("ArrowDown")
    assert "stage 1: " in shown.page.inner_text("#task")
    shown.settle()
    assert shown.page.locator("#timeline .chosen").count() == 1


def test_from_a_task_to_its_ops(opened, pipeline_plan, tmp_path):
    shown = opened(pipeline_plan)
    shown.page.focus("#timeline")
    shown.page.keyboard.press(".")
    shown.page.keyboard.press("Enter")
    shown.settle()
    assert "dot_general" in shown.labels()
    shown.page.keyboard.press("]")
    assert "sequential_networks.py:" in shown.page.inner_text("#task")
    shown.settle()
    # A click keeps what is said.
    box = shown.page.locator("#timeline svg").bounding_box()
    for part in (0.1, 0.3, 0.5, 0.7, 0.9):
        shown.page.mouse.click(box["x"] + 92 + part * (box["width"] - 100), box["y"] + 31)
        shown.settle()
        said = shown.page.inner_text("#task")
        if "dot_general" in said:
            break
    assert re.search(r"dot_general, [\d.]+ [µm]s .* % of the step\) · .*:\d+ .* float32\[.*\] as \[", said)
    shown.page.mouse.move(box["x"] + 92 + 500, box["y"] + 75)
    assert shown.page.inner_text("#task") == said
    shown.page.focus("#timeline")
    shown.page.keyboard.press("Escape")
    assert shown.page.inner_text("#task") == ""
    # From a file there is no step, and so no ops: a task is one bar at any zoom.
    pipeline_plan.save(tmp_path / "plan.json")
    without = opened(type(pipeline_plan).load(tmp_path / "plan.json"))
    without.page.focus("#timeline")
    without.page.keyboard.press(".")
    without.page.keyboard.press("Enter")
    without.settle()
    assert "dot_general" not in without.labels() and "forward" in without.page.inner_text("#task")


def test_collectives_are_drawn_with_and_without_the_step(opened, tensor_plan, tmp_path):
    tensor_plan.save(tmp_path / "plan.json")
    for plan in (tensor_plan, type(tensor_plan).load(tmp_path / "plan.json")):
        shown = opened(plan)
        drawn = shown.page.locator("#timeline path.collective")
        assert drawn.count() == 1 and drawn.get_attribute("d")
        assert shown.page.is_visible(".kinds [data-kind='collective']")


def test_pointing_at_a_task_tells_what_it_is(opened, pipeline_plan):
    shown = opened(pipeline_plan)
    box = shown.page.locator("#timeline svg").bounding_box()
    shown.page.mouse.move(box["x"] + 92 + 3, box["y"] + 20 + 11)
    assert "predicted, stage 0: forward of micro-batch 0" in shown.page.inner_text("#task")


def test_one_stage(opened, pipeline_plan):
    shown = opened(pipeline_plan)
    button = shown.page.locator("button[data-stage='1']")
    button.press("Enter")
    assert button.get_attribute("aria-pressed") == "true"
    assert shown.page.locator("svg.cluster .dim").count() == 4
    # The tasks of the other stage, and the transfers to it.
    assert shown.page.locator("#timeline g.dim").count() == shown.page.locator("#timeline g.row").count() / 2
    button.press("Enter")
    assert shown.page.locator(".dim").count() == 0


def test_order_of_the_keyboard(opened, pipeline_plan):
    shown = opened(pipeline_plan)
    found = []
    for _ in range(60):
        shown.page.keyboard.press("Tab")
        found.append(shown.page.evaluate("() => document.activeElement.id || document.activeElement.textContent"))
    wanted = ["To the summary", "Summary", "search", "theme", "timeline", "memory", "kind", "open"]
    assert [name for name in found if name in wanted][: len(wanted)] == wanted
    shown.page.keyboard.press("/")
    assert shown.page.evaluate("() => document.activeElement.id") == "search"


def background(shown):
    """How light the page is, from 0 to 255."""
    script = "() => getComputedStyle(document.querySelector('.alpa-lite')).backgroundColor"
    return sum(map(int, re.findall(r"\d+", shown.page.evaluate(script))[:3])) / 3


@pytest.mark.parametrize("dark", [False, True])
def test_colours(opened, pipeline_plan, dark):
    shown = opened(pipeline_plan, dark=dark)
    assert (background(shown) < 60) is dark
    found = []
    for _ in range(3):
        shown.page.click("#theme")
        found.append((shown.page.inner_text("#theme"), background(shown) < 60))
    assert found == [("colours: light", False), ("colours: dark", True), ("colours: as the system", dark)]


def test_two_plans(opened, tensor_plan, pipeline_plan):
    shown = opened(tensor_plan.diff(pipeline_plan))
    lanes = shown.page.locator("#timeline text.lane").all_text_contents()
    assert [text.split(":")[0] for text in lanes] == ["before", "after"]
    assert shown.page.locator("#memory .held").count() == 3
    shown.search("micro-batches")
    assert shown.rows("#differences-0 table") == ["micro-batches"]


def test_on_paper(opened, pipeline_plan):
    shown = opened(pipeline_plan, dark=True)
    shown.page.emulate_media(media="print")
    shown.settle()
    assert background(shown) > 200
    assert not shown.page.is_visible("#search") and not shown.page.is_visible("button[data-zoom='+']")
    assert shown.page.is_visible("#timeline svg") and shown.page.is_visible("#arrays")
    assert len(shown.page.pdf(format="A4")) > 10_000
    # Nothing is cut off: no table scrolls, and none is wider than A4 within its margins, in CSS pixels.
    shown.page.set_viewport_size({"width": round((210 - 2 * 12) / 25.4 * 96), "height": 1000})
    shown.settle()
    boxes = "() => [...document.querySelectorAll('main .scroll')].map((box) => getComputedStyle(box).overflowX)"
    assert set(shown.page.evaluate(boxes)) == {"visible"}
    assert shown.page.evaluate("() => document.documentElement.scrollWidth - document.documentElement.clientWidth") <= 0
    # Chromium repeats the head of a table on the next page only if it has no button.
    heads = "() => [...document.querySelectorAll('thead button')].map((button) => getComputedStyle(button).display)"
    assert set(shown.page.evaluate(heads)) == {"contents"}


def test_narrow(opened, pipeline_plan):
    shown = opened(pipeline_plan, width=380)
    assert shown.page.evaluate("() => document.documentElement.scrollWidth") <= 380
    # Rows are lists there: no table is wider than the page, nor scrolls.
    boxes = "() => [...document.querySelectorAll('main .scroll')].map((box) => box.scrollWidth - box.clientWidth)"
    assert max(shown.page.evaluate(boxes)) <= 1
    label = "() => getComputedStyle(document.querySelector('#stages td:nth-child(2)'), '::before').content"
    assert "layers" in shown.page.evaluate(label)


def test_hostile_names(opened, tensor_plan):
    plan, _ = with_hostile_name(tensor_plan)
    shown = opened(plan)
    assert HOSTILE in shown.rows("#arrays")
    assert shown.page.locator("img").count() == 0
    shown.search("onerror")
    assert shown.rows("#arrays") == [HOSTILE]
