// One step of a plan: tasks, collectives and transfers of each submesh, the ops inside, and the memory below.
"use strict";
(() => {
  const $ = (id) => document.getElementById(id);
  const data = JSON.parse($("data").textContent);

  // ---- the data ------------------------------------------------------------------------------------------------

  const FIELDS = 5, PARTS = 100000;
  const labels = data.labels.map(([what, source, array, collective]) => ({ what, source, array, collective: collective === 1 }));
  const tracks = data.tracks.map((flat) => {
    const ops = [];
    let start = 0;
    for (let i = 0; i < flat.length; i += 3) {
      start += flat[i + 1];
      ops.push({ label: labels[flat[i]], from: start / PARTS, to: (start + flat[i + 2]) / PARTS });
    }
    return { kernels: ops.filter((op) => !op.label.collective), moves: ops.filter((op) => op.label.collective) };
  });
  const unpack = (row) => {
    const inside = new Map(row.inside.map(([kind, stage, share, numbers]) => [`${kind} ${stage}`, { share, numbers, runs: 0 }]));
    const tasks = [];
    let start = 0;
    for (let i = 0; i < row.tasks.length; i += FIELDS) {
      const [kind, stage, microbatch, since, length] = row.tasks.slice(i, i + FIELDS);
      start += since;
      const has = inside.get(`${kind} ${stage}`);
      tasks.push({
        kind: data.kinds[kind], stage, microbatch, start, end: start + length,
        share: has ? has.share : 0,
        // Updates may be several tasks, each of which runs once.
        track: has && has.numbers.length ? tracks[has.numbers[has.runs++ % has.numbers.length]] : null,
      });
    }
    return { ...row, tasks };
  };
  const lanes = data.lanes.map((lane) => ({ ...lane, rows: lane.rows.map(unpack) }));
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
  const end = Math.max(1, ...memory.map((track) => track.end), ...lanes.map((lane) => lane.end));
  // Without its ops a task has its collectives at the end: the plan says how long they take, and not when they run.
  const movesOf = (task) => (task.track ? task.track.moves : task.share ? [{ label: null, from: 1 - task.share, to: 1 }] : []);
  const hasMoves = (row) => row.inside.some(([, , share, numbers]) => share > 0 || numbers.some((n) => tracks[n].moves.length));

  const occurring = new Set(flat.flatMap(({ row }) => [...row.tasks.map((task) => task.kind), ...(hasMoves(row) ? ["collective"] : [])]));
  for (const key of document.querySelectorAll(".kinds [data-kind]")) key.hidden = !occurring.has(key.dataset.kind);

  // ---- numbers -------------------------------------------------------------------------------------------------

  const number = (value) => value.toFixed(1).replace(/\.0$/, "");
  const digits = (value) => value.toFixed(Math.abs(value) < 10 ? 2 : Math.abs(value) < 100 ? 1 : 0);
  const seconds = (value, show = digits) => {
    for (const [scale, unit] of [[1, "s"], [1e-3, "ms"], [1e-6, "µs"]]) {
      if (Math.abs(value) >= 0.9995 * scale) return `${show(value / scale)} ${unit}`;
    }
    return value === 0 ? "0" : `${(value * 1e6).toPrecision(2)} µs`;
  };
  const trimmed = (value) => String(Number(value.toPrecision(6)));
  const bytes = (value) => {
    let size = value;
    for (const unit of ["B", "KiB", "MiB", "GiB"]) {
      if (size < 1024) return `${unit === "B" ? Math.round(size) : digits(size)} ${unit}`;
      size /= 1024;
    }
    return `${digits(size)} TiB`;
  };
  const escaped = (text) => text.replace(/[&<>"]/g, (each) => `&#${each.charCodeAt(0)};`);

  // ---- drawing -------------------------------------------------------------------------------------------------

  const LEFT = 92, RIGHT = 8, ROW = 22, THIN = 10, LANE = 20, AXIS = 20, TRACK = 46;
  const view = { from: 0, to: end };
  let chosen = null, pinned = false, only = null;
  const box = { timeline: $("timeline"), memory: $("memory") };
  const widthOf = (element) => Math.max(280, element.clientWidth - 10);

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
        (x < width - 44 ? `<text class="middle" x="${number(x)}" y="${y + 14}">${seconds(at * step, trimmed)}</text>` : ""));
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
  const inView = (tasks) => {
    const first = firstAfter(tasks, view.from);
    let last = first;
    while (last < tasks.length && tasks[last].start <= view.to) last++;
    return [first, last];
  };

  // The share of each pixel that spans cover, by colour. Drawn as height, it is true at every zoom: spans that are
  // narrower than a pixel do not look like one that lasts.
  const covered = (columns, from, to, scale, width) => {
    const left = Math.max(LEFT, scale.x(from)), right = Math.min(width - RIGHT, scale.x(to));
    if (right <= left) return;
    const first = Math.floor(left), last = Math.floor(right);
    if (first === last) { columns[first] += right - left; return; }
    columns[first] += first + 1 - left;
    for (let x = first + 1; x < last; x++) columns[x] += 1;
    columns[last] += right - last;
  };
  const outlineOf = (columns, base, height, below) => {
    let path = "", from = -1;
    const top = (x) => base - height * Math.min(1, columns[x] + (below ? below[x] : 0));
    const foot = (x) => base - height * Math.min(1, below ? below[x] : 0);
    for (let x = 0; x <= columns.length; x++) {
      const same = from >= 0 && x < columns.length && columns[x] > 0.001 && top(x) === top(from) && foot(x) === foot(from);
      if (same) continue;
      if (from >= 0) path += `M${from} ${number(foot(from))}V${number(top(from))}H${x}V${number(foot(from))}z`;
      from = x < columns.length && columns[x] > 0.001 ? x : -1;
    }
    return path;
  };

  const drawDense = (row, [first, last], y, scale, width) => {
    const kinds = {};
    for (let i = first; i < last; i++) {
      const task = row.tasks[i];
      covered((kinds[task.kind] ||= new Float32Array(width + 1)), task.start, task.end, scale, width);
    }
    const below = new Float32Array(width + 1);
    return data.kinds.filter((name) => kinds[name]).map((name) => {
      const path = `<path class="${name}" d="${outlineOf(kinds[name], y + ROW - 3, ROW - 6, below)}"/>`;
      kinds[name].forEach((share, x) => { below[x] += share; });
      return path;
    }).join("");
  };

  const drawOps = (task, y, scale, width) => {
    const length = task.end - task.start, found = ["", ""], texts = [];
    task.track.kernels.forEach((op, place) => {
      const left = Math.max(LEFT, scale.x(task.start + op.from * length));
      const right = Math.min(width - RIGHT, scale.x(task.start + op.to * length));
      if (right - left < 0.4) return;
      found[place % 2] += `M${number(left)} ${y + 3}H${number(right)}v${ROW - 6}H${number(left)}z`;
      if (right - left > 6 * op.label.what.length + 6) {
        texts.push(`<text class="on" x="${number((left + right) / 2)}" y="${y + 14}">${escaped(op.label.what)}</text>`);
      }
    });
    return `<path class="${task.kind} odd" d="${found[0]}"/><path class="${task.kind}" d="${found[1]}"/>${texts.join("")}`;
  };

  // The ops of a task are drawn once it is so wide that many of them can be told apart.
  const showsOps = (task, scale) => task.track && task.track.kernels.length > 1 &&
    (task.end - task.start) * scale.per > Math.max(160, 5 * Math.min(80, task.track.kernels.length));

  const drawTasks = (row, y, scale, width) => {
    const range = inView(row.tasks), [first, last] = range, pieces = {}, parts = [];
    if (last - first > (width - LEFT) / 3) return drawDense(row, range, y, scale, width);
    for (let i = first; i < last; i++) {
      const task = row.tasks[i];
      const left = Math.max(LEFT, scale.x(task.start)), right = Math.min(width - RIGHT, scale.x(task.end));
      if (showsOps(task, scale)) {
        parts.push(drawOps(task, y, scale, width));
        if (task.microbatch >= 0) parts.push(`<text class="small" x="${number(left + 2)}" y="${y + 2}">${task.microbatch}</text>`);
        continue;
      }
      const list = (pieces[task.kind] ||= []);
      list.push([left, Math.max(right - (right - left > 3 ? 0.6 : 0), left + 0.5)]);
      const text = String(task.microbatch);
      if (task.microbatch >= 0 && right - left > 7 * text.length + 4) {
        parts.push(`<text class="on" x="${number((left + right) / 2)}" y="${y + 14}">${text}</text>`);
      }
    }
    const paths = Object.entries(pieces).map(([name, list]) => `<path class="${name}" d="${list
      .map(([a, b]) => `M${number(a)} ${y + 3}H${number(b)}v${ROW - 6}H${number(a)}z`).join("")}"/>`);
    return paths.join("") + parts.join("");
  };

  const drawThin = (row, kind, y, scale, width) => {
    const columns = new Float32Array(width + 1), [first, last] = inView(row.tasks);
    for (let i = first; i < last; i++) {
      const task = row.tasks[i], length = task.end - task.start;
      if (kind === "receive") covered(columns, task.start, task.end, scale, width);
      // Within a pixel or two only the share matters.
      else if (length * scale.per < 2) covered(columns, task.start, task.start + shareOf(task) * length, scale, width);
      else for (const op of movesOf(task)) covered(columns, task.start + op.from * length, task.start + op.to * length, scale, width);
    }
    return `<path class="${kind}" d="${outlineOf(columns, y + THIN - 1, THIN - 2)}"/>`;
  };
  const shares = new Map();
  const shareOf = (task) => {
    if (!task.track) return task.share;
    if (!shares.has(task.track)) shares.set(task.track, Math.min(1, task.track.moves.reduce((sum, op) => sum + op.to - op.from, 0)));
    return shares.get(task.track);
  };

  const mark = (place, span, scale, width) => {
    const left = Math.max(LEFT, scale.x(span.start)), right = Math.min(width - RIGHT, scale.x(span.end));
    return right < left ? "" : `<rect class="chosen" x="${number(left)}" y="${place.top + 1}" ` +
      `width="${number(Math.max(2, right - left))}" height="${place.height - 2}"/>`;
  };

  // What is drawn, from top to bottom: a place is a row, or the part of a row that shows its collectives.
  const placesOf = () => {
    const places = [];
    let y = 0;
    for (const lane of lanes) {
      places.push({ lane, title: true, top: y, height: LANE });
      y += LANE;
      for (const row of lane.rows) {
        const parts = row.receives ? ["receive"] : hasMoves(row) ? ["tasks", "collective"] : ["tasks"];
        for (const part of parts) {
          const height = part === "tasks" ? ROW : THIN;
          places.push({ lane, row, part, top: y, height });
          y += height;
        }
      }
    }
    return { places, bottom: y };
  };
  const { places, bottom } = placesOf();

  const drawTimeline = (width) => {
    const scale = scaleFor(width), body = [];
    for (const place of places) {
      const { lane, row, part, top, height } = place;
      if (place.title) {
        body.push(`<text class="lane" x="0" y="${top + 14}">${escaped(lane.title)}, ${lane.seconds}</text>`);
        continue;
      }
      const dim = only !== null && !row.stages.includes(only) ? " dim" : "";
      if (part === "tasks") {
        const name = row.name.length > 13 ? `${row.name.slice(0, 12)}…` : row.name;
        body.push(`<rect class="stage-${row.stages[0] % 10} mark" x="0" y="${top + 6}" width="8" height="${ROW - 12}" rx="2"/>` +
          `<text x="12" y="${top + 15}">${name}<title>${row.name}</title></text>`);
      } else {
        body.push(`<text class="small" x="12" y="${top + 8}">${part === "receive" ? "receives" : "collectives"}</text>`);
      }
      const drawn = part === "tasks" ? drawTasks(row, top, scale, width) : drawThin(row, part, top, scale, width);
      const around = chosen && chosen.place === place ? mark(place, chosen, scale, width) : "";
      body.push(`<g class="row${dim}">${drawn}${around}</g>`);
    }
    return svg(width, bottom + AXIS, axis(scale, width, bottom) + body.join(""), lanes.map((lane) =>
      `${escaped(lane.title)} ${lane.seconds}`).join(", "));
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
      body.push(`<text x="0" y="${y + 20}">${escaped(track.name.slice(0, 16))}<title>${escaped(track.name)}</title></text>` +
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
    const right = Math.max(LEFT, Math.min(width - RIGHT, scale.x(track.end)));
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
    if (view.from >= track.end) return "";
    let path = `M${LEFT} ${number(base)}V${number(level(now))}`;
    for (const { x, high, last } of part) {
      path += `H${number(x)}V${number(level(high))}` + (last < high ? `H${number(x + 0.7)}V${number(level(last))}` : "");
    }
    return `${path}H${number(right)}V${number(base)}z`;
  };

  const svg = (width, height, body, label) =>
    `<svg viewBox="0 0 ${width} ${height}" role="img" aria-label="${label}" style="width:${width}px">${body}</svg>`;

  let printing = false;
  const draw = () => {
    // A chart that scrolls is narrower by its scroll bar, so the height is known before the width.
    for (const [element, height] of [[box.timeline, bottom + AXIS], [box.memory, memory.length * TRACK + AXIS]]) {
      element.classList.toggle("tall", !printing && height > 560);
    }
    const width = printing ? 1000 : Math.min(widthOf(box.timeline), widthOf(box.memory));
    box.timeline.innerHTML = drawTimeline(width);
    box.memory.innerHTML = drawMemory(width);
    if (printing) for (const element of Object.values(box)) element.firstElementChild.style.width = "100%";
  };
  let asked = 0;
  const drawSoon = () => { cancelAnimationFrame(asked); asked = requestAnimationFrame(draw); };
  document.addEventListener("stage", (event) => { only = event.detail; draw(); });

  // ---- zoom ----------------------------------------------------------------------------------------------------

  const show = (from, to) => {
    const span = Math.min(end, Math.max(end * 1e-5, to - from));
    view.from = Math.min(Math.max(0, from), end - span);
    view.to = view.from + span;
    drawSoon();
  };
  const zoom = (factor, at = (view.from + view.to) / 2) =>
    show(at - (at - view.from) * factor, at + (view.to - at) * factor);
  const move = (share) => show(view.from + share * (view.to - view.from), view.to + share * (view.to - view.from));

  // ---- what is chosen --------------------------------------------------------------------------------------------

  const WORDS = { weight: "weight gradients", receive: "transfer", other: "handling of arrays", collective: "collectives" };
  const describe = ({ place: { lane, row }, task, op, start, end: stop }) => {
    const which = task.microbatch >= 0 ? ` of micro-batch ${task.microbatch}` : "";
    const length = (stop - start) * data.tick_seconds, step = lane.end * data.tick_seconds;
    const percent = (100 * length) / step;
    const share = step > 0 ? ` (${percent < 0.005 ? "below 0.01" : digits(percent)} % of the step)` : "";
    const stage = row.stages.length > 1 ? `, stage ${task.stage}` : "";
    const where = `${lane.title}, ${row.name}: ${WORDS[task.kind] || task.kind}${which}${stage}`;
    const when = `${seconds(length)} from ${seconds(start * data.tick_seconds)} on${share}`;
    if (!op) return `${where}, ${when}`;
    if (!op.label) return `${where}: its collectives take ${seconds(length)}${share}; when they run is in the page of a plan with its step`;
    return [`${op.label.what}, ${when}`, op.label.source, op.label.array, where].filter(Boolean).join(" · ");
  };
  const say = () => {
    const told = $("task");
    told.textContent = chosen ? describe(chosen) : "";
    told.classList.toggle("pinned", pinned && chosen !== null);
  };
  const whole = (place, task) => ({ place, task, op: null, start: task.start, end: task.end });
  const inside = (place, task, op) => {
    const length = task.end - task.start;
    return { place, task, op, start: task.start + op.from * length, end: task.start + op.to * length };
  };
  const same = (a, b) => (a && b ? a.task === b.task && a.op === b.op && a.place === b.place : a === b);

  const found = ({ time, y }, scale) => {
    const place = places.find(({ title, top, height }) => !title && y >= top && y < top + height);
    const task = place && place.row.tasks[firstAfter(place.row.tasks, time)];
    if (!task || task.start > time) return null;
    const ops = place.part === "collective" ? movesOf(task) : place.part === "tasks" && showsOps(task, scale) ? task.track.kernels : [];
    const at = (time - task.start) / (task.end - task.start);
    // A pixel's width of tolerance: many ops are narrower than the pointer can aim.
    const reach = 2 / scale.per / (task.end - task.start);
    const op = ops.find(({ from, to }) => from <= at && at <= to) || ops.find(({ from, to }) => from - reach <= at && at <= to + reach);
    if (op) return inside(place, task, op);
    return place.part === "collective" ? null : whole(place, task);
  };

  const choose = (next) => {
    if (!next) return;
    chosen = next;
    pinned = true;
    say();
    if (next.start < view.from || next.end > view.to) {
      const span = Math.max(view.to - view.from, 1.2 * (next.end - next.start)), middle = (next.start + next.end) / 2;
      show(middle - span / 2, middle + span / 2);
    } else drawSoon();
  };
  const rowPlaces = places.filter((place) => !place.title && place.part !== "collective");
  const walk = (rowsOn, tasksOn) => {
    const on = chosen && rowPlaces.find((place) => place.row === chosen.place.row);
    if (!on) {
      const first = rowPlaces[0];
      return first && first.row.tasks.length ? choose(whole(first, first.row.tasks[Math.min(first.row.tasks.length - 1, firstAfter(first.row.tasks, view.from))])) : undefined;
    }
    const tasks = on.row.tasks;
    if (!rowsOn) {
      const next = tasks[tasks.indexOf(chosen.task) + tasksOn];
      return next && choose(whole(on, next));
    }
    const at = Math.min(rowPlaces.length - 1, Math.max(0, rowPlaces.indexOf(on) + rowsOn)), there = rowPlaces[at];
    return choose(whole(there, there.row.tasks[Math.min(there.row.tasks.length - 1, firstAfter(there.row.tasks, chosen.start))]));
  };
  // The op before or after the chosen one, in the order of their starts, collectives included.
  const walkOps = (on) => {
    if (!chosen || !chosen.task.track) return;
    const { kernels, moves } = chosen.task.track, ops = [...kernels, ...moves].sort((a, b) => a.from - b.from);
    const at = chosen.op ? ops.indexOf(chosen.op) + on : on > 0 ? 0 : ops.length - 1, op = ops[at];
    if (!op) return;
    const part = op.label.collective ? "collective" : "tasks";
    choose(inside(places.find((place) => place.row === chosen.place.row && place.part === part), chosen.task, op));
  };
  const zoomToChosen = () => {
    if (!chosen) return;
    const { start, end: stop } = chosen.op ? chosen : chosen.task, margin = 0.05 * (stop - start);
    show(start - margin, stop + margin);
  };

  const KEYS = {
    "+": () => zoom(0.7), "=": () => zoom(0.7), "-": () => zoom(1 / 0.7), "_": () => zoom(1 / 0.7),
    "0": () => show(0, end), Home: () => show(0, view.to - view.from), End: () => show(end - (view.to - view.from), end),
    ArrowLeft: () => move(-0.2), ArrowRight: () => move(0.2), ArrowUp: () => walk(-1, 0), ArrowDown: () => walk(1, 0),
    ",": () => walk(0, -1), ".": () => walk(0, 1), "[": () => walkOps(-1), "]": () => walkOps(1), Enter: zoomToChosen,
    Escape: () => { chosen = null; pinned = false; say(); drawSoon(); },
  };
  for (const button of document.querySelectorAll("[data-zoom]")) {
    button.addEventListener("click", () => KEYS[button.dataset.zoom]());
  }

  for (const element of Object.values(box)) {
    const timeAt = (event) => {
      const shown = element.firstElementChild.getBoundingClientRect(), width = element.firstElementChild.viewBox.baseVal.width;
      const scale = scaleFor(width);
      return { scale, time: scale.time(((event.clientX - shown.left) * width) / shown.width), y: event.clientY - shown.top };
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
        const per = (element.firstElementChild.viewBox.baseVal.width - LEFT - RIGHT) / (grabbed.to - grabbed.from);
        return show(grabbed.from - by / per, grabbed.to - by / per);
      }
      if (element === box.timeline && !pinned) point(event);
    });
    const drop = () => { grabbed = null; element.classList.remove("moving"); };
    element.addEventListener("pointerup", (event) => {
      const clicked = grabbed && !grabbed.moved && element === box.timeline;
      drop();
      if (!clicked) return;
      pinned = false;
      point(event);
      pinned = chosen !== null;
      say();
    });
    element.addEventListener("pointercancel", drop);
    const point = (event) => {
      const at = timeAt(event), next = found(at, at.scale);
      if (same(next, chosen)) return;
      chosen = next;
      say();
      drawSoon();
    };
  }

  new ResizeObserver(drawSoon).observe(box.timeline);
  addEventListener("beforeprint", () => { printing = true; draw(); });
  addEventListener("afterprint", () => { printing = false; draw(); });
  matchMedia("print").addEventListener("change", (event) => { printing = event.matches; draw(); });
  draw();
  document.documentElement.dataset.ready = "";
})();
