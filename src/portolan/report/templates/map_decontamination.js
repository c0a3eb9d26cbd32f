const FIELDS = {source: "source", set: "evaluation_set", rule: "rule"};

function show() {
  const kept = data.filter((match) => Object.entries(FIELDS).every(([filter, field]) => {
    const wanted = byId(`filter-${filter}`).value;
    return !wanted || match[field] === wanted;
  }));
  byId("progress").textContent = `${kept.length} of ${data.length} shown`;
  byId("matches").replaceChildren(...kept.map((match) => make("article", {class: "evidence"},
    make("p", {}, make("strong", {}, match.source), ` holds an item of `, make("strong", {}, match.evaluation_set),
      ` · rule ${match.rule} · score ${match.score.toFixed(2)}`),
    make("p", {class: "soft"}, `document `, make("code", {}, match.document), ` · item `, make("code", {}, match.item)),
    make("pre", {class: "doc"}, make("mark", {}, match.matched)))));
}

if (data.length) {
  for (const [filter, field] of Object.entries(FIELDS)) {
    const names = [...new Set(data.map((match) => match[field]))].sort();
    const select = byId(`filter-${filter}`);
    select.append(make("option", {value: ""}, "all"), ...names.map((name) => make("option", {value: name}, name)));
    select.addEventListener("change", show);
  }
  show();
}
