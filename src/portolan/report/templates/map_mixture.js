const mixtures = data.mixtures;
const labels = data.labels;
const GRID = /^(.+?)q(\d)$/;

const placeOf = (cell) => {
  const match = data.grid && cell.match(GRID);
  return match ? [match[1], Number(match[2])] : [cell, 0];
};

/** Weight by cell of a phase, or of all phases by their budgets. */
function weightsOf(mixture, phase) {
  const chosen = mixture.phases.filter((part) => !phase || part.name === phase);
  const budget = chosen.reduce((sum, part) => sum + part.budget_tokens, 0);
  return Object.fromEntries(Object.keys(mixture.cells).map((cell) => [cell,
    chosen.reduce((sum, part) => sum + part.budget_tokens * part.counts[cell], 0) / (budget * mixture.lattice)]));
}

function epochsOf(mixture) {
  return Object.fromEntries(Object.entries(mixture.cells).map(([cell, tokens]) => [cell,
    mixture.phases.reduce((sum, part) => sum + part.budget_tokens * part.counts[cell], 0)
      / (mixture.lattice * Math.max(1, tokens))]));
}

function tableOf(mixture, other, phase, view) {
  const read = (one) => (view === "weight" ? weightsOf(one, phase) : epochsOf(one));
  const values = read(mixture), minus = other ? read(other) : {};
  const domains = new Map();
  for (const cell of Object.keys(values)) {
    const [domain, bucket] = placeOf(cell);
    if (!domains.has(domain)) domains.set(domain, []);
    domains.get(domain)[bucket] = {value: values[cell], minus: minus[cell]};
  }
  return domains;
}

function draw() {
  const mixture = mixtures[byId("first").value];
  const other = byId("second").value === "" ? null : mixtures[byId("second").value];
  const phase = byId("phase").value;
  const view = document.querySelector("input[name=view]:checked").value;
  const domains = tableOf(mixture, other, phase, view);
  const width = Math.max(...[...domains.values()].map((row) => row.length));
  const cells = [...domains.values()].flat().filter(Boolean);
  const shown = ({value, minus}) => (other ? value - (minus ?? 0) : value);
  const most = view === "epochs" && !other ? mixture.cap_epochs : Math.max(1e-12, ...cells.map((cell) => Math.abs(shown(cell))));
  const text = (value) => {
    if (other) return view === "weight" ? signed(100 * value) : signed(value);
    return view === "weight" ? percent(value, 2) : value.toFixed(2);
  };
  const cellOf = (cell) => {
    if (!cell) return make("td", {class: "heat"}, "–");
    const value = shown(cell);
    const over = view === "epochs" && !other && value > mixture.cap_epochs + 1e-8;
    const heat = Math.min(1, Math.abs(value) / most);
    return make("td", {class: `heat${value < 0 || over ? " less" : ""}`,
      style: `--heat:${(other ? heat : Math.sqrt(heat)).toFixed(3)}`}, text(value));
  };
  const sumOf = (row) => row.filter(Boolean).reduce((sum, cell) => sum + shown(cell), 0);
  const isWeight = view === "weight";
  const head = make("tr", {}, make("th", {scope: "col"}, "Domain"),
    isWeight ? make("th", {scope: "col", class: "number"}, "All") : null,
    ...Array.from({length: width}, (_, b) => make("th", {scope: "col", class: "number"}, data.grid ? `Q${b}` : isWeight ? "Weight" : "Epochs")));
  const showSum = isWeight && width > 1;
  if (!showSum && isWeight) head.children[1].remove();
  const body = make("tbody", {}, ...[...domains].map(([domain, row]) => make("tr", {},
    make("th", {scope: "row"}, labels[domain] ?? domain),
    showSum ? make("td", {class: "number"}, text(sumOf(row))) : null,
    ...Array.from({length: width}, (_, b) => cellOf(row[b])))));
  const unit = isWeight ? (other ? "percentage points of weight" : "weight") : "epochs";
  byId("weights-table").replaceChildren(
    make("caption", {}, other ? `${mixture.name} minus ${other.name}, ${unit}` : `${mixture.name}, ${unit}`),
    make("thead", {}, head), body);
  byId("heard").textContent = other ? warningOf(mixture, other) : "";
  byId("phase").disabled = !isWeight;
}

function warningOf(mixture, other) {
  const absent = Object.keys(mixture.cells).filter((cell) => !(cell in other.cells)).length
    + Object.keys(other.cells).filter((cell) => !(cell in mixture.cells)).length;
  const parts = [];
  if (mixture.store_digest !== other.store_digest) parts.push("the two were made for different stores");
  if (absent) parts.push(`${absent} cells stand in one of them only`);
  return parts.length ? `Note: ${parts.join("; ")}.` : "";
}

function fill() {
  const first = byId("first").value || "0", second = byId("second").value;
  const options = () => mixtures.map((mixture, i) => make("option", {value: i}, mixture.name));
  byId("first").replaceChildren(...options());
  byId("second").replaceChildren(make("option", {value: ""}, "nothing"), ...options());
  byId("first").value = first;
  byId("second").value = second;
  fillPhases();
}

function fillPhases() {
  const mixture = mixtures[byId("first").value];
  byId("phase").replaceChildren(make("option", {value: ""}, "all, by budget"),
    ...mixture.phases.map((part) => make("option", {value: part.name}, part.name)));
}

byId("import")?.addEventListener("click", () => byId("import-file").click());
byId("import-file")?.addEventListener("change", async (event) => {
  const [file] = event.target.files;
  if (!file) return;
  try {
    const mixture = JSON.parse(await file.text());
    if (mixture.format !== "portolan-mixture" || mixture.phases.some((part) => !part.counts)) throw new Error("another format");
    mixtures.push({...mixture, lattice: mixture.lattice ?? 49152, name: `${mixture.name} (${file.name})`});
    fill();
    byId("second").value = String(mixtures.length - 1);
    draw();
  } catch (error) {
    byId("heard").textContent = `${file.name} is not a mixture file: ${error.message}`;
  }
  event.target.value = "";
});
if (mixtures.length) {
  fill();
  byId("first").addEventListener("change", () => { fillPhases(); draw(); });
  for (const id of ["second", "phase"]) byId(id).addEventListener("change", draw);
  document.querySelectorAll("input[name=view]").forEach((input) => input.addEventListener("change", draw));
  draw();
}
