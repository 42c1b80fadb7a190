// The page of a plan: light and dark colours, search, order of rows, selection of a stage.
"use strict";
(() => {
  const $ = (id) => document.getElementById(id);

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
    return !("optimizer" in entry.row.dataset) || words.length > 0 || (optimizer && optimizer.checked);
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
      entry.details.open = (open && open.checked) || some;
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
  // On narrow screens a row becomes a list, in which each cell needs the name of its column.
  for (const table of document.querySelectorAll("main table")) {
    const names = [...table.tHead.rows[0].cells].map((cell) => cell.textContent);
    for (const row of table.tBodies[0].rows) [...row.cells].forEach((cell, column) => { cell.dataset.label = names[column] || ""; });
    table.dataset.labelled = "";
  }
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
      document.dispatchEvent(new CustomEvent("stage", { detail: only }));
    });
  }
})();
