const grid = byId("grid");
const rows = [...grid.tBodies[0].rows];
let chosen = {domain: 0, bucket: -1};

// ------------------------------------------------------------------ search

const words = (text) => text.toLowerCase().match(/[\p{L}\p{N}_]+/gu) ?? [];
const index = data.domains.map((domain) => ({
  label: new Set(words(domain.label)),
  keywords: new Set(domain.keywords.flatMap(words)),
  examples: new Set(domain.examples.flat().flatMap(([, , text]) => words(text))),
  tokens: domain.row.reduce((sum, [, tokens]) => sum + tokens, 0),
}));

/** 1 for the word itself, a half for the beginning of one, else 0. */
function hit(query, known) {
  if (known.has(query)) return 1;
  for (const word of known) if (word.startsWith(query)) return 0.5;
  return 0;
}

/** Domains by falling score; ties by tokens, then number. */
function search(text) {
  const scores = data.domains.map(() => 0);
  for (const query of new Set(words(text))) {
    const hits = index.map((known) => [
      hit(query, known.label), hit(query, known.keywords), hit(query, known.examples),
    ]);
    const having = hits.filter((parts) => parts.some((part) => part > 0)).length;
    if (!having) continue;
    const idf = Math.log(1 + data.domains.length / having);
    hits.forEach(([label, keyword, example], i) => {
      scores[i] += idf * (4 * label + 2 * keyword + example);
    });
  }
  return scores
    .map((score, i) => ({score, i}))
    .filter(({score}) => score > 0)
    .sort((a, b) => b.score - a.score || index[b.i].tokens - index[a.i].tokens || a.i - b.i);
}

byId("search").addEventListener("input", (event) => {
  const text = event.target.value.trim();
  const found = search(text);
  const list = byId("hits");
  list.replaceChildren(...found.slice(0, 8).map(({score, i}) =>
    make("li", {}, make("button", {
      class: "button", type: "button", "data-domain": i, onclick: () => choose(i, -1, true),
    }, data.domains[i].label, make("small", {}, score.toFixed(1))))));
  list.hidden = !found.length;
  const kept = new Set(found.map(({i}) => i));
  rows.forEach((row, i) => { row.hidden = text !== "" && !kept.has(i); });
  byId("heard").textContent = text ? `${found.length} domains match` : "";
  if (text && !found.length) {
    list.hidden = false;
    list.append(make("li", {class: "soft"}, "No label, keyword or example has this word."));
  }
  if (found.length) choose(found[0].i, -1);
});

// ------------------------------------------------------------------ cells

const largest = Math.max(1, ...data.domains.flatMap((d) => d.row.map(([, tokens]) => tokens)));
const VIEWS = {
  tokens: (domain, b) => {
    const [documents, tokens] = domain.row[b];
    return {text: documents ? compact(tokens) : "–", heat: Math.sqrt(tokens / largest)};
  },
  within: (domain, b) => {
    const [documents, tokens] = domain.row[b];
    const share = tokens / Math.max(1, domain.row.reduce((sum, [, t]) => sum + t, 0));
    return {text: documents ? percent(share, 0) : "–", heat: share};
  },
  enrichment: (domain, b) => {
    const value = domain.enrichment[b];
    if (!value) return {text: "–", heat: 0};
    return {text: signed(value[0]), heat: Math.min(1, Math.abs(value[0]) / 3), less: value[0] < 0};
  },
};
const KEYS = {
  tokens: [["few", 0.15], ["", 0.4], ["", 0.7], ["many tokens", 1]],
  within: [["0 %", 0], ["", 0.33], ["", 0.66], ["100 % of the domain", 1]],
  enrichment: [["an eighth", -1], ["", -0.5], ["as expected", 0], ["", 0.5], ["eight times", 1]],
};

function show(view) {
  rows.forEach((row, i) => {
    row.querySelectorAll(".cell button").forEach((button, b) => {
      const {text, heat, less} = VIEWS[view](data.domains[i], b);
      button.textContent = text;
      button.style.setProperty("--heat", heat.toFixed(3));
      button.classList.toggle("less", Boolean(less));
      button.ariaLabel = `${data.domains[i].label}, ${data.buckets[b]}: ${text}`;
    });
  });
  byId("key").replaceChildren(...KEYS[view].flatMap(([text, heat]) => [
    make("span", {class: heat < 0 ? "less" : null, style: `--heat:${Math.abs(heat)}`}),
    text ? make("em", {}, text) : null,
  ]).filter(Boolean));
}

// ------------------------------------------------------------------ the chosen domain

function bars(rowsOf) {
  const list = make("dl", {class: "share"});
  for (const [name, share, text] of rowsOf) {
    list.append(make("dt", {}, name),
      make("dd", {class: "rail"}, make("i", {style: `width:${(100 * share).toFixed(2)}%`})),
      make("dd", {}, text));
  }
  return list;
}

function enrichmentTable(domain) {
  const body = make("tbody");
  domain.enrichment.forEach((value, b) => {
    const text = value ? `${signed(value[0])} ± ${value[1].toFixed(2)}` : "under 20";
    const ratio = value ? `${(2 ** value[0]).toFixed(2)} ×` : "–";
    body.append(make("tr", {}, make("th", {scope: "row"}, data.buckets[b]),
      make("td", {class: "number"}, count(domain.row[b][0])),
      make("td", {class: "number"}, ratio), make("td", {class: "number"}, text)));
  });
  const head = ["Bucket", "Documents", "Enrichment", "log₂, 95 %"].map((name, i) =>
    make("th", {scope: "col", class: i ? "number" : null}, name));
  return make("div", {class: "scroll"}, make("table", {}, make("thead", {}, make("tr", {}, ...head)), body));
}

function examplesOf(domain, bucket) {
  const parts = [];
  domain.examples.forEach((examples, b) => {
    if (bucket >= 0 && b !== bucket) return;
    const shown = bucket >= 0 ? examples : examples.slice(0, data.buckets.length > 1 ? 1 : 4);
    for (const [source, id, text, isCut] of shown) {
      parts.push(make("div", {class: "example"},
        make("p", {}, `${data.buckets[b]} · ${data.sources[source] ?? "?"} · `, make("code", {}, id)),
        make("pre", {class: "doc"}, text + (isCut ? " …" : ""))));
    }
  });
  return parts.length ? parts : [make("p", {class: "soft"}, "This cell has no documents.")];
}

function choose(i, bucket, scroll = false) {
  chosen = {domain: i, bucket};
  const domain = data.domains[i];
  const tokens = index[i].tokens, all = data.total[1];
  rows.forEach((row, r) => {
    row.classList.toggle("chosen", r === i);
    row.querySelectorAll(".cell button").forEach((button, b) => {
      button.setAttribute("aria-pressed", String(r === i && b === bucket));
    });
  });
  const documents = domain.row.reduce((sum, [n]) => sum + n, 0);
  const children = [
    make("h3", {}, domain.label),
    make("p", {class: "soft"}, `${domain.name === domain.label ? "" : domain.name + " · "}`
      + `${compact(tokens)} tokens, ${percent(tokens / Math.max(1, all))} of the store · ${count(documents)} documents`),
  ];
  if (domain.keywords.length) {
    children.push(make("ul", {class: "tags"}, ...domain.keywords.map((word) => make("li", {}, word))));
  }
  if (data.buckets.length > 1) children.push(make("h4", {}, "Enrichment by bucket"), enrichmentTable(domain));
  children.push(make("h4", {}, "Sources"), bars(domain.sources.map(([source, part]) =>
    [data.sources[source], part / Math.max(1, tokens), percent(part / Math.max(1, tokens))])));
  const place = bucket >= 0 && data.buckets.length > 1 ? ` of ${data.buckets[bucket]}` : "";
  children.push(make("h4", {}, `Examples${place}`), ...examplesOf(domain, bucket));
  if (bucket >= 0 && data.buckets.length > 1) {
    children.push(make("p", {}, make("button", {class: "button", type: "button",
      onclick: () => choose(i, -1)}, "All buckets")));
  }
  byId("detail").replaceChildren(...children);
  byId("detail").scrollTop = 0;
  if (scroll && matchMedia("(max-width: 980px)").matches) byId("detail").scrollIntoView({block: "start"});
}

grid.addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (button) choose(Number(button.closest("tr").dataset.domain), Number(button.dataset.bucket), true);
});
document.querySelectorAll("input[name=view]").forEach((input) =>
  input.addEventListener("change", () => show(input.value)));
show("tokens");
if (data.domains.length) choose(0, -1);
