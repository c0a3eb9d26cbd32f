const LABELS = ["correct", "wrong", "unsure"];
const MARKS = {correct: "✓", wrong: "✕", unsure: "?"};
const COLUMNS = ["evidence", "removed_source", "removed_id", "kept_source", "kept_id", "containment", "label"];
const STORE = `portolan-labels-${data.evidence}`;
const pairs = data.pairs;
const labels = new Map();
let visible = pairs.map((_, i) => i);
let current = 0;

const keyOf = (row) => [row.removed_source, row.removed_id, row.kept_source, row.kept_id].join("|");
const nameOf = (pair) => `${pair.removed_source} → ${pair.kept_source}`;

// ------------------------------------------------------------------ labels

/** Browsers may refuse storage to pages from disk: then labels last as long as the page. */
function remember() {
  try {
    localStorage.setItem(STORE, JSON.stringify([...labels]));
  } catch { /* the export still works */ }
}

function recall() {
  try {
    for (const [key, label] of JSON.parse(localStorage.getItem(STORE) ?? "[]")) {
      if (LABELS.includes(label)) labels.set(key, label);
    }
  } catch { /* nothing was kept */ }
}

function judge(label) {
  if (!visible.length) return;
  const key = keyOf(pairs[current]);
  if (labels.get(key) === label) labels.delete(key);
  else labels.set(key, label);
  remember();
  drawList();
  drawPair();
}

const labelled = () => pairs.filter((pair) => labels.has(keyOf(pair))).map((pair) => ({
  evidence: data.evidence,
  removed_source: pair.removed_source,
  removed_id: pair.removed_id,
  kept_source: pair.kept_source,
  kept_id: pair.kept_id,
  containment: pair.containment,
  label: labels.get(keyOf(pair)),
}));

function toCsv(rows) {
  const quoted = (value) => (/[",\n\r]/.test(value) ? `"${String(value).replaceAll('"', '""')}"` : value);
  return [COLUMNS, ...rows.map((row) => COLUMNS.map((name) => quoted(row[name])))]
    .map((cells) => cells.join(",") + "\n").join("");
}

function fromCsv(text) {
  const lines = [[""]];
  let quoted = false;
  for (let i = 0; i < text.length; i++) {
    const line = lines[lines.length - 1], c = text[i];
    if (c === '"' && quoted && text[i + 1] === '"') line[line.length - 1] += text[++i];
    else if (c === '"') quoted = !quoted;
    else if (c === "," && !quoted) line.push("");
    else if (c === "\n" && !quoted) lines.push([""]);
    else if (c !== "\r" || quoted) line[line.length - 1] += c;
  }
  const [head, ...rows] = lines.filter((line) => line.length > 1);
  return rows.map((row) => Object.fromEntries(head.map((name, i) => [name, row[i]])));
}

function importLabels(text) {
  const rows = text.trimStart().startsWith("{") ? JSON.parse(text).labels : fromCsv(text);
  const known = new Set(pairs.map(keyOf));
  const fit = rows.filter((row) => LABELS.includes(row.label) && known.has(keyOf(row)));
  for (const row of fit) labels.set(keyOf(row), row.label);
  remember();
  draw();
  byId("progress").textContent += ` · ${fit.length} of ${rows.length} rows of the file belong to these pairs`;
}

byId("export-csv").onclick = () => save("labels.csv", "text/csv", toCsv(labelled()));
byId("export-json").onclick = () => save("labels.json", "application/json",
  JSON.stringify({format: "portolan-labels", evidence: data.evidence, labels: labelled()}, null, 1) + "\n");
byId("import").onclick = () => byId("import-file").click();
byId("import-file").addEventListener("change", async (event) => {
  const [file] = event.target.files;
  if (!file) return;
  try {
    importLabels(await file.text());
  } catch (error) {
    byId("progress").textContent = `${file.name} is not a file of labels: ${error.message}`;
  }
  event.target.value = "";
});

// ------------------------------------------------------------------ filters

function fillFilters() {
  const names = [...new Set(pairs.map(nameOf))].sort();
  byId("filter-pair").append(make("option", {value: ""}, `all ${names.length}`),
    ...names.map((name) => make("option", {value: name}, name)));
  const bins = [...new Set(pairs.map((pair) => pair.bin))].sort((a, b) => b - a);
  const end = (bin) => (bin / 20).toFixed(2);
  byId("filter-containment").append(make("option", {value: ""}, "any"),
    ...bins.map((bin) => make("option", {value: bin}, `${end(bin)} to ${end(bin + 1)}`)));
}

function passes(pair) {
  const [low, high] = byId("filter-size").value.split("-").map(Number);
  const name = byId("filter-pair").value, bin = byId("filter-containment").value;
  const wanted = byId("filter-label").value, label = labels.get(keyOf(pair)) ?? "none";
  return (!name || nameOf(pair) === name) && (bin === "" || pair.bin === Number(bin))
    && pair.chars_removed >= low && pair.chars_removed < high
    && (wanted === "any" || wanted === label);
}

// ------------------------------------------------------------------ drawing

function drawList() {
  byId("progress").textContent = `${labelled().length} of ${pairs.length} judged · ${visible.length} shown`;
  const top = byId("list").scrollTop;
  byId("list").replaceChildren(...visible.map((i) => {
    const pair = pairs[i], label = labels.get(keyOf(pair));
    return make("li", {}, make("button", {type: "button", "data-pair": i, "aria-current": String(i === current),
      onclick: () => { current = i; drawList(); drawPair(); }},
    label ? make("span", {class: `mark ${label}`, title: label}, MARKS[label]) : null,
    nameOf(pair),
    make("small", {}, `containment ${pair.containment.toFixed(3)} · ${count(pair.chars_removed)} characters`)));
  }));
  byId("list").scrollTop = top;
  showInList(byId("list"), byId("list").querySelector("[aria-current=true]"));
}

/** Scroll the list, and never the page, so that an entry is seen. */
function showInList(list, entry) {
  if (!entry) return;
  const box = list.getBoundingClientRect(), place = entry.getBoundingClientRect();
  if (place.top < box.top) list.scrollTop -= box.top - place.top;
  if (place.bottom > box.bottom) list.scrollTop += place.bottom - box.bottom;
}

/** Words that differ, marked; white space around them stays plain. */
function marked(tag, text) {
  const [, before, words, after] = text.match(/^(\s*)([^]*?)(\s*)$/);
  return words ? [before, make(tag, {}, words), after] : [before];
}

/** Rows of the comparison: both sides, and for narrow screens one text that holds both. */
function alignedRows(segments) {
  const rows = [];
  let left = [], right = [], both = [];
  const flush = () => {
    if (both.length) {
      rows.push(make("div", {}, make("pre", {class: "doc one"}, ...left),
        make("pre", {class: "doc one"}, ...right), make("pre", {class: "doc both"}, ...both)));
    }
    [left, right, both] = [[], [], []];
  };
  for (const segment of segments) {
    if (typeof segment[0] === "number") {
      flush();
      rows.push(make("div", {class: "gap"}, make("span", {}, `${count(segment[0])} equal words`)));
    } else if (segment.length === 1) {
      const text = both.length ? segment[0] : segment[0].replace(/^(\s*\n| )/, "");
      for (const side of [left, right, both]) side.push(text);
    } else {
      left.push(...marked("del", segment[0]));
      right.push(...marked("ins", segment[1]));
      both.push(...marked("del", segment[0]), ...marked("ins", segment[1]));
    }
  }
  flush();
  return rows;
}

function drawPair() {
  if (!visible.length) {
    byId("pair").replaceChildren(make("p", {class: "soft"}, "No pair passes these filters."));
    return;
  }
  const pair = pairs[current], label = labels.get(keyOf(pair));
  const facts = [["Containment", pair.containment.toFixed(4)], ["Jaccard", pair.jaccard.toFixed(4)],
    ["New words", count(pair.new_words)], ["Component", `${count(pair.component_size)} documents`]];
  const place = visible.indexOf(current);
  const step = (by) => () => move(by);
  const title = (what, source, id, characters) => make("div", {}, make("strong", {}, `${what}: ${source}`),
    ` ${count(characters)} characters`, make("code", {}, id));
  byId("pair").replaceChildren(
    make("div", {class: "bar-row"},
      make("button", {class: "button", type: "button", onclick: step(-1), disabled: place === 0}, "Previous", make("kbd", {}, "p")),
      make("button", {class: "button", type: "button", onclick: step(1), disabled: place === visible.length - 1}, "Next", make("kbd", {}, "n")),
      make("span", {class: "soft"}, `Was the removal right?`),
      ...LABELS.map((name) => make("button", {class: "button", type: "button", "data-label": name,
        "aria-pressed": String(label === name), onclick: () => judge(name)},
      `${MARKS[name]} ${name[0].toUpperCase()}${name.slice(1)}`, make("kbd", {}, name[0])))),
    make("dl", {class: "head-facts"}, ...facts.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))),
      pair.exempt ? make("div", {}, make("dt", {}, "Exempt source:"), make("dd", {}, "not removed")) : null),
    make("div", {class: "aligned"},
      make("div", {class: "titles"}, title(pair.exempt ? "Kept as exempt" : "Removed", pair.removed_source, pair.removed_id, pair.chars_removed),
        title("Kept", pair.kept_source, pair.kept_id, pair.chars_kept)),
      ...alignedRows(pair.segments)));
}

function move(by) {
  const place = visible.indexOf(current) + by;
  if (place < 0 || place >= visible.length) return;
  current = visible[place];
  drawList();
  drawPair();
}

function draw() {
  visible = pairs.map((_, i) => i).filter((i) => passes(pairs[i]));
  if (!visible.includes(current)) current = visible[0] ?? 0;
  drawList();
  drawPair();
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || /INPUT|SELECT/.test(event.target.tagName)) return;
  const action = {n: () => move(1), p: () => move(-1), c: () => judge("correct"), w: () => judge("wrong"), u: () => judge("unsure")}[event.key];
  if (action) action();
});
for (const name of ["pair", "containment", "size", "label"]) {
  byId(`filter-${name}`).addEventListener("change", draw);
}
recall();
if (pairs.length) {
  fillFilters();
  draw();
}
