// Pages that are a list of parts: headings, texts, lists, commands, tables, images and charts.
const state = {};  // what the reader chose, by part, so that a live page keeps it
function show({lead, parts}) {
  main.replaceChildren(...(lead ? [el("p", {}, lead)] : []));
  let place = main, charts = null;
  parts.forEach((part, i) => {
    const kept = state[`${part.kind} ${part.title ?? part.caption ?? i}`] ??= {};
    if (part.kind === "chart") {
      const figure = chart(part, kept, place === main ? "h2" : "h3");
      if (figure && !charts) place.append(charts = el("div", {className: "charts"}));
      if (figure) charts.append(figure);
      return;
    }
    charts = null;
    if (part.kind === "heading") main.append(place = el("section", {}, el("h2", {}, part.text)));
    else if (part.kind === "table") place.append(table(part, kept));
    else if (part.kind === "gallery") place.append(el(place === main ? "h2" : "h3", {}, part.title),
      el("p", {className: "soft"}, part.note), gallery(part.images));
    else if (part.kind === "list") place.append(el("ul", {}, ...part.items.map(item => el("li", {className: "soft"}, item))));
    else if (part.kind === "code") place.append(el("pre", {tabIndex: 0}, el("code", {}, part.text)));
    else place.append(el("p", {className: part.soft ? "soft" : ""}, part.text));
  });
}
header(data.title, data.facts);
if (data.footer) document.body.append(el("footer", {}, el("small", {}, data.footer)));
show(data);
