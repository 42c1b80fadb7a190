// The page of a plan: search, selection of a stage, light and dark colours, the timeline and the memory below it.
"use strict";
(() => {
  const $ = (id) => document.getElementById(id);
  const data = JSON.parse($("data").textContent);

  // ---- light and dark ------------------------------------------------------------------------------------------

  const themes = ["system", "light", "dark"];
  const theme = $("theme");
  const stored = {
    // Browsers may refuse storage to a page that was opened as a file.
    get: () => { try { return localStorage.getItem("alpa-lite-theme"); } catch { return null; } },
    set: (value) => { try { localStorage.setItem("alpa-lite-theme", value); } catch { /* the choice is lost with the page */ } },
  };
  const setTheme = (name) => {
    if (name === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = name;
    theme.textContent = `colours: ${name === "system" ? "as the system" : name}`;
    theme.dataset.value = name;
  };
  setTheme(themes.includes(stored.get()) ? stored.get() : "system");
  theme.addEventListener("click", () => {
    const next = themes[(themes.indexOf(theme.dataset.value) + 1) % themes.length];
    setTheme(next);
    stored.set(next);
  });

  // ---- search --------------------------------------------------------------------------------------------------

  const search = $("search"), kind = $("kind"), open = $("open"), optimizer = $("optimizer");
  // The stages of a row, from its cell below "stage" or "stages": chips, or text like "0–3, 6".
  const stagesOf = (row) => {
    const heads = [...row.closest("table").tHead.rows[0].cells].map((cell) => cell.textContent);
    const cell = row.cells[heads.findIndex((head) => head === "stage" || head === "stages")];
    const runs = (cell ? cell.textContent.match(/\d+(–\d+)?/g) || [] : []).map((run) => run.split("–").map(Number));
    return (stage) => runs.some(([first, last = first]) => first <= stage && stage <= last);
  };
  const rows = [...document.querySelectorAll("table[data-search] > tbody > tr")].map((row) => ({
    row,
    onStage: stagesOf(row),
    text: row.textContent.toLowerCase().replace(/\s+/g, " "),
    names: [...row.querySelectorAll("li")].map((item) => ({
      item,
      text: item.textContent.toLowerCase(),
      stage: Number(item.dataset.stage),
    })),
    head: (row.querySelector("code") || row).textContent.toLowerCase(),
    details: row.querySelector("details"),
  }));

  const wanted = () => {
    const stages = [], text = search.value.toLowerCase()
      .replace(/\bstage (\d+)\b/g, (_, number) => { stages.push(Number(number)); return " "; });
    return { stages, words: text.split(/\s+/).filter(Boolean) };
  };
  const has = (text, words) => words.every((word) => text.includes(word));

  const shows = (entry, { stages, words }) => {
    if (!has(entry.text, words) || !stages.every(entry.onStage)) return false;
    if (entry.row.dataset.kind === undefined) return true;
    if (kind && kind.value && entry.row.dataset.kind !== kind.value) return false;
    return !("optimizer" in entry.row.dataset) || words.length > 0 || optimizer.checked;
  };
  const filter = () => {
    const query = wanted(), asked = query.words.length + query.stages.length > 0;
    let shown = 0;
    for (const entry of rows) {
      const visible = shows(entry, query);
      entry.row.hidden = !visible;
      shown += visible;
      if (!visible || !entry.details) continue;
      // If names match but the pattern does not, or the query has a stage, only the matching names are listed.
      const fits = (name) => has(name.text, query.words) && query.stages.every((stage) => name.stage === stage);
      const some = asked && !(has(entry.head, query.words) && query.stages.length === 0) && entry.names.some(fits);
      for (const name of entry.names) name.item.hidden = some && !fits(name);
      entry.details.open = open.checked || some;
    }
    $("found").textContent = asked ? `${shown} of ${rows.length} rows` : "";
  };
  let waiting = 0;
  search.addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(filter, 60); });
  for (const control of [kind, open, optimizer]) if (control) control.addEventListener("change", filter);
  addEventListener("keydown", (event) => {
    if (event.key === "/" && !/^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) {
      event.preventDefault();
      search.focus();
      search.select();
    } else if (event.key === "Escape" && event.target === search) {
      search.value = "";
      filter();
    }
  });
  filter();

  // ---- order ---------------------------------------------------------------------------------------------------

  const UNITS = {
    B: 1, KiB: 2 ** 10, MiB: 2 ** 20, GiB: 2 ** 30, TiB: 2 ** 40, "µs": 1e-6, ms: 1e-3, s: 1, k: 1e3, M: 1e6, G: 1e9,
  };
  // The value of a cell: its data-value, or the number at the start of its text times its unit. Others sort last.
  const valueOf = (cell) => {
    if (cell.dataset.value !== undefined) return Number(cell.dataset.value);
    const found = cell.textContent.replace(/−/g, "-").match(/^\s*(-?[\d.]+(?:e[-+]?\d+)?)\s*([A-Za-zµ]*)/);
    return found ? Number(found[1]) * (UNITS[found[2]] ?? 1) : NaN;
  };
  const collator = new Intl.Collator(undefined, { numeric: true });

  for (const table of document.querySelectorAll("main table")) {
    const body = table.tBodies[0], asWritten = [...body.rows];
    if (asWritten.length < 2) continue;
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      if (!head.textContent) return;
      const numeric = head.classList.contains("number") || "numeric" in head.dataset, button = document.createElement("button");
      button.type = "button";
      button.className = "sort";
      button.append(...head.childNodes);
      head.append(button);
      head.scope = "col";
      // The first click sorts numbers in descending order and words in ascending order; the third restores the table.
      const orders = numeric ? ["descending", "ascending", null] : ["ascending", "descending", null];
      button.addEventListener("click", () => {
        const next = orders[(orders.indexOf(head.getAttribute("aria-sort")) + 1) % orders.length];
        for (const other of heads) other.removeAttribute("aria-sort");
        if (next) head.setAttribute("aria-sort", next);
        const sign = next === "descending" ? -1 : 1, cell = (row) => row.cells[column];
        const by = numeric ? (a, b) => valueOf(cell(a)) - valueOf(cell(b))
          : (a, b) => collator.compare(cell(a).textContent, cell(b).textContent);
        const last = asWritten.filter((row) => numeric && Number.isNaN(valueOf(cell(row))));
        const rest = asWritten.filter((row) => !last.includes(row)).sort((a, b) => sign * by(a, b));
        body.append(...(next ? [...rest, ...last] : asWritten));
      });
    });
  }

  // ---- one stage -----------------------------------------------------------------------------------------------

  let only = null;
  const buttons = [...document.querySelectorAll("button[data-stage]")];
  for (const button of buttons) {
    button.addEventListener("click", () => {
      const stage = Number(button.dataset.stage);
      only = only === stage ? null : stage;
      for (const other of buttons) other.setAttribute("aria-pressed", String(Number(other.dataset.stage) === only));
      for (const mark of document.querySelectorAll("[data-stages]")) {
        const stages = mark.dataset.stages.split(" ").map(Number);
        mark.classList.toggle("dim", only !== null && !(mark.dataset.stages && stages.includes(only)));
      }
      draw();
    });
  }

  // ---- the step ------------------------------------------------------------------------------------------------

  const FIELDS = 5;
  const lanes = data.lanes.map((lane) => ({
    ...lane,
    rows: lane.rows.map((row) => {
      const tasks = [];
      let start = 0;
      for (let i = 0; i < row.tasks.length; i += FIELDS) {
        const [kindNumber, stage, microbatch, since, length] = row.tasks.slice(i, i + FIELDS);
        start += since;
        tasks.push({ kind: data.kinds[kindNumber], stage, microbatch, start, end: start + length });
      }
      return { ...row, tasks };
    }),
  }));
  const memory = data.memory.map((track) => {
    const times = [], levels = [];
    let time = 0;
    for (let i = 0; i < track.points.length; i += 2) {
      time += track.points[i];
      times.push(time);
      levels.push(track.points[i + 1] / track.levels);
    }
    return { ...track, times, levels };
  });
  const flat = lanes.flatMap((lane) => lane.rows.map((row) => ({ lane, row })));
  const end = Math.max(1, data.end, ...lanes.map((lane) => lane.end));

  const occurring = new Set(flat.flatMap(({ row }) => row.tasks.map((task) => task.kind)));
  for (const key of document.querySelectorAll(".kinds [data-kind]")) {
    key.hidden = !occurring.has(key.dataset.kind);
  }

  const LEFT = 92, RIGHT = 8, ROW = 22, LANE = 20, AXIS = 20, TRACK = 46;
  const view = { from: 0, to: end };
  let chosen = null;
  const box = { timeline: $("timeline"), memory: $("memory") };
  const widthOf = (element) => Math.max(320, element.clientWidth - 10);

  const number = (value) => value.toFixed(1).replace(/\.0$/, "");
  const seconds = (value) => {
    for (const [scale, unit] of [[1, "s"], [1e-3, "ms"], [1e-6, "µs"]]) {
      if (Math.abs(value) >= 0.9995 * scale) return `${Number((value / scale).toPrecision(4))} ${unit}`;
    }
    return value === 0 ? "0" : `${(value * 1e6).toPrecision(2)} µs`;
  };
  const bytes = (value) => {
    let size = value;
    for (const unit of ["B", "KiB", "MiB", "GiB"]) {
      if (size < 1024) return `${Number(size.toPrecision(3))} ${unit}`;
      size /= 1024;
    }
    return `${Number(size.toPrecision(3))} TiB`;
  };

  const scaleFor = (width) => {
    const per = (width - LEFT - RIGHT) / (view.to - view.from);
    return { per, x: (time) => LEFT + (time - view.from) * per, time: (x) => view.from + (x - LEFT) / per };
  };
  const axis = (scale, width, y) => {
    const span = (view.to - view.from) * data.tick_seconds, rough = span / Math.max(3, (width - LEFT) / 110);
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= rough) || 10 * power;
    const marks = [];
    for (let at = Math.ceil((view.from * data.tick_seconds) / step); at * step <= view.to * data.tick_seconds; at++) {
      const x = scale.x((at * step) / data.tick_seconds);
      marks.push(`<path class="grid" d="M${number(x)} 0V${y}"/>` +
        (x < width - 44 ? `<text class="middle" x="${number(x)}" y="${y + 14}">${seconds(at * step)}</text>` : ""));
    }
    return marks.join("");
  };

  // The first task that ends after a time, by bisection: tasks of a row start in order and hardly overlap.
  const firstAfter = (tasks, time) => {
    let low = 0, high = tasks.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (tasks[middle].end <= time) low = middle + 1;
      else high = middle;
    }
    return low;
  };

  // One path per colour of a row; tasks closer than a pixel are merged, since thousands of elements draw slowly.
  const drawRow = (row, y, scale, width) => {
    const pieces = {}, labels = [], marks = [];
    for (let i = firstAfter(row.tasks, view.from); i < row.tasks.length; i++) {
      const task = row.tasks[i];
      if (task.start > view.to) break;
      const left = Math.max(LEFT, scale.x(task.start)), right = Math.min(width - RIGHT, scale.x(task.end));
      const list = (pieces[task.kind] ||= []), last = list[list.length - 1];
      if (last && left - last[0] < 0.7 && right - last[0] < 1.5) last[1] = Math.max(last[1], right);
      else list.push([left, Math.max(right - (right - left > 3 ? 0.6 : 0), left + 0.5)]);
      const text = String(task.microbatch);
      if (task.microbatch >= 0 && right - left > 7 * text.length + 4) {
        labels.push(`<text class="on" x="${number((left + right) / 2)}" y="${y + 14}">${text}</text>`);
      }
      if (chosen === task) {
        marks.push(`<rect class="chosen" x="${number(left)}" y="${y + 2}" width="${number(Math.max(2, right - left))}" ` +
          `height="${ROW - 4}"/>`);
      }
    }
    const paths = Object.entries(pieces).map(([name, list]) => `<path class="${name}" d="${list
      .map(([a, b]) => `M${number(a)} ${y + 3}H${number(b)}v${ROW - 6}H${number(a)}z`).join("")}"/>`);
    const dim = only !== null && !row.stages.includes(only) ? ' class="dim"' : "";
    return `<g${dim}>${paths.join("")}${labels.join("")}${marks.join("")}</g>`;
  };

  const drawTimeline = (width) => {
    const scale = scaleFor(width), body = [], places = [];
    let y = 0;
    for (const lane of lanes) {
      body.push(`<text class="lane" x="0" y="${y + 14}">${lane.title}, ${seconds(lane.end * data.tick_seconds)}</text>`);
      y += LANE;
      for (const row of lane.rows) {
        const name = row.name.length > 14 ? `${row.name.slice(0, 13)}…` : row.name;
        body.push(`<text x="0" y="${y + 15}">${name}<title>${row.name}</title></text>`);
        body.push(drawRow(row, y, scale, width));
        places.push({ row, lane, top: y });
        y += ROW;
      }
    }
    box.timeline.places = places;
    return svg(width, y + AXIS, axis(scale, width, y) + body.join(""), lanes.map((lane) =>
      `${lane.title} ${seconds(lane.end * data.tick_seconds)}`).join(", "));
  };

  const drawMemory = (width) => {
    const scale = scaleFor(width), body = [];
    const peak = Math.max(...memory.map((track) => track.peak_bytes));
    // If the peak is far below the capacity, the lines would be flat: then the capacity is printed, not drawn.
    const roomy = memory.every((track) => track.capacity_bytes > 3 * peak);
    const most = roomy ? 1.1 * peak : Math.max(...memory.map((track) => track.full_bytes));
    let y = 0;
    for (const track of memory) {
      const high = TRACK - 10, base = y + TRACK - 3, of = track.full_bytes / most;
      const level = (share) => base - high * share * of;
      const color = `stage-${track.stages[0] % 10}`;
      body.push(`<text x="0" y="${y + 20}">${track.name.slice(0, 14)}<title>${track.name}</title></text>` +
        `<text class="small" x="0" y="${y + 33}">${bytes(track.peak_bytes)}</text>`);
      const dim = only !== null && !track.stages.includes(only) ? " dim" : "";
      body.push(`<g class="${color}${dim}"><path class="held" d="${outline(track, scale, level, base, width)}"/></g>`);
      const top = level(track.capacity_bytes / track.full_bytes);
      if (!roomy) body.push(`<path class="capacity" d="M${LEFT} ${number(top)}H${width - RIGHT}"/>`);
      y += TRACK;
    }
    $("scale").textContent = roomy
      ? `The capacity of ${bytes(Math.min(...memory.map((track) => track.capacity_bytes)))} is far above this.`
      : "The dashed line is the capacity.";
    return svg(width, y + AXIS, axis(scale, width, y) + body.join(""), "memory per device over time");
  };

  // The line of memory in use. Within a pixel, only the highest and the last point are drawn.
  const outline = (track, scale, level, base, width) => {
    const right = Math.max(LEFT, Math.min(width - RIGHT, scale.x(data.end)));
    const part = [];
    let now = 0, column = null;
    for (let i = 0; i < track.times.length && track.times[i] <= view.to; i++) {
      if (track.times[i] < view.from) { now = track.levels[i]; continue; }
      const x = scale.x(track.times[i]), at = Math.floor(x);
      if (column && column.at === at) {
        column.high = Math.max(column.high, track.levels[i]);
        column.last = track.levels[i];
      } else {
        column = { at, x, high: track.levels[i], last: track.levels[i] };
        part.push(column);
      }
    }
    if (view.from >= data.end) return "";
    let path = `M${LEFT} ${number(base)}V${number(level(now))}`;
    for (const { x, high, last } of part) {
      path += `H${number(x)}V${number(level(high))}` + (last < high ? `H${number(x + 0.7)}V${number(level(last))}` : "");
    }
    return `${path}H${number(right)}V${number(base)}z`;
  };

  const svg = (width, height, body, label) =>
    `<svg viewBox="0 0 ${width} ${height}" role="img" aria-label="${label}" ` +
    `style="width:${width}px">${body}</svg>`;

  let printing = false;
  const draw = () => {
    const width = printing ? 1000 : widthOf(box.timeline);
    box.timeline.innerHTML = drawTimeline(width);
    box.memory.innerHTML = drawMemory(width);
    for (const element of Object.values(box)) {
      const shown = element.firstElementChild;
      if (printing) shown.style.width = "100%";
      element.classList.toggle("tall", !printing && shown.getBoundingClientRect().height > 560);
    }
  };
  let asked = 0;
  const drawSoon = () => { cancelAnimationFrame(asked); asked = requestAnimationFrame(draw); };

  const show = (from, to) => {
    const span = Math.min(end, Math.max(20, to - from));
    view.from = Math.min(Math.max(0, from), end - span);
    view.to = view.from + span;
    drawSoon();
  };
  const zoom = (factor, at = (view.from + view.to) / 2) =>
    show(at - (at - view.from) * factor, at + (view.to - at) * factor);
  const move = (share) => show(view.from + share * (view.to - view.from), view.to + share * (view.to - view.from));

  const describe = (task, lane, row) => {
    const which = task.microbatch >= 0 ? ` of micro-batch ${task.microbatch}` : "";
    const from = seconds(task.start * data.tick_seconds), length = seconds((task.end - task.start) * data.tick_seconds);
    const what = { weight: "weight gradients", receive: "transfer", other: "handling of arrays" }[task.kind] || task.kind;
    return `${lane.title}, ${row.name}: ${what}${which}, stage ${task.stage}, ${length} from ${from} on`;
  };
  const say = (text) => { $("task").textContent = text; };

  const choose = (place, index) => {
    const task = place.row.tasks[index];
    if (!task) return;
    chosen = task;
    say(describe(task, place.lane, place.row));
    if (task.start < view.from || task.end > view.to) {
      const span = Math.max(view.to - view.from, 1.2 * (task.end - task.start)), middle = (task.start + task.end) / 2;
      show(middle - span / 2, middle + span / 2);
    } else drawSoon();
  };
  const walk = (rowsOn, tasksOn) => {
    let at = flat.findIndex(({ row }) => row.tasks.includes(chosen));
    if (at < 0) return choose(flat[0], firstAfter(flat[0].row.tasks, view.from));
    let index = flat[at].row.tasks.indexOf(chosen) + tasksOn;
    if (rowsOn) {
      at = Math.min(flat.length - 1, Math.max(0, at + rowsOn));
      index = Math.min(flat[at].row.tasks.length - 1, firstAfter(flat[at].row.tasks, chosen.start));
    }
    choose(flat[at], index);
  };

  const KEYS = {
    "+": () => zoom(0.7), "=": () => zoom(0.7), "-": () => zoom(1 / 0.7), "_": () => zoom(1 / 0.7),
    "0": () => show(0, end), Home: () => show(0, view.to - view.from), End: () => show(end - (view.to - view.from), end),
    ArrowLeft: () => move(-0.2), ArrowRight: () => move(0.2), ArrowUp: () => walk(-1, 0), ArrowDown: () => walk(1, 0),
    ",": () => walk(0, -1), ".": () => walk(0, 1),
  };
  for (const button of document.querySelectorAll("[data-zoom]")) {
    button.addEventListener("click", () => KEYS[button.dataset.zoom]());
  }

  for (const element of Object.values(box)) {
    const timeAt = (event) => {
      const shown = element.firstElementChild.getBoundingClientRect(), width = widthOf(box.timeline);
      return { time: scaleFor(width).time(((event.clientX - shown.left) * width) / shown.width), y: event.clientY - shown.top };
    };
    element.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || !KEYS[event.key]) return;
      event.preventDefault();
      KEYS[event.key]();
    });
    // Zoom only if the element has the focus or Ctrl is held: otherwise the wheel scrolls the page.
    element.addEventListener("wheel", (event) => {
      const active = document.activeElement === element || event.ctrlKey || event.metaKey;
      if (!active || (event.deltaY > 0 && view.to - view.from >= end)) return;
      event.preventDefault();
      zoom(Math.exp(Math.max(-0.5, Math.min(0.5, event.deltaY * 0.002))), timeAt(event).time);
    }, { passive: false });

    let grabbed = null;
    element.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      grabbed = { x: event.clientX, from: view.from, to: view.to, moved: false };
    });
    element.addEventListener("pointermove", (event) => {
      if (grabbed) {
        const by = event.clientX - grabbed.x;
        if (!grabbed.moved && Math.abs(by) < 4) return;
        if (!grabbed.moved) element.setPointerCapture(event.pointerId);
        grabbed.moved = true;
        element.classList.add("moving");
        const per = (widthOf(box.timeline) - LEFT - RIGHT) / (grabbed.to - grabbed.from);
        return show(grabbed.from - by / per, grabbed.to - by / per);
      }
      if (element === box.timeline) point(timeAt(event));
    });
    const drop = () => { grabbed = null; element.classList.remove("moving"); };
    element.addEventListener("pointerup", drop);
    element.addEventListener("pointercancel", drop);
  }
  const point = ({ time, y }) => {
    const place = box.timeline.places.find(({ top }) => y >= top && y < top + ROW);
    const task = place && place.row.tasks[firstAfter(place.row.tasks, time)];
    const found = task && task.start <= time ? task : null;
    if (found === chosen || (!found && !chosen)) return;
    chosen = found;
    say(found ? describe(found, place.lane, place.row) : "");
    drawSoon();
  };

  new ResizeObserver(drawSoon).observe(box.timeline);
  addEventListener("beforeprint", () => { printing = true; draw(); });
  addEventListener("afterprint", () => { printing = false; draw(); });
  matchMedia("print").addEventListener("change", (event) => { printing = event.matches; draw(); });
  draw();
  document.documentElement.dataset.ready = "";
})();
