"use strict";
const data = JSON.parse(document.getElementById("data").textContent);

// All content is created with these helpers: text is inserted as text, never as markup.
function el(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(properties)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key in node && key !== "style") node[key] = value;
    else node.setAttribute(key, value);
  }
  node.append(...children.filter(c => c !== null));
  return node;
}
function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}
const main = el("main");
const section = (title, text, ...children) =>
  main.append(el("section", {}, el("h2", {}, title), el("p", {className: "soft"}, text), ...children));

function choice(label, options, chosen, change) {
  const buttons = options.map((name, i) => el("button", {type: "button", onclick: () => pick(i)}, name));
  const mark = i => buttons.forEach((b, j) => b.setAttribute("aria-pressed", i === j));
  const pick = i => { mark(i); change(i); };
  mark(chosen);
  return el("div", {className: "choice", role: "group", ariaLabel: label}, el("span", {}, label), ...buttons);
}

const gallery = images => el("div", {className: "gallery"}, ...images.map(({source, caption}) =>
  el("figure", {}, el("img", {src: source, alt: caption}), el("figcaption", {}, caption))));

const repaint = [];  // redraw callbacks for theme changes
function header(title, facts = []) {
  let dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const apply = () => {
    document.documentElement.style.colorScheme = dark ? "dark" : "light";
    button.textContent = dark ? "☀ light" : "☾ dark";
  };
  const button = el("button", {type: "button", onclick: () => { dark = !dark; apply(); repaint.forEach(f => f()); }});
  apply();
  const pairs = facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)));
  document.body.append(el("header", {}, el("div", {}, el("h1", {}, title),
    pairs.length ? el("dl", {}, ...pairs) : null), button), main);
}

const number = x => Number.isInteger(x) || Math.abs(x) >= 1000 ? Math.round(x).toLocaleString("en-US") : Math.abs(x) >= 100 ? x.toFixed(0)
  : Math.abs(x) >= .001 ? x.toPrecision(3) : x.toExponential(1);

// A table that sorts by any column: numbers by value, other texts by letter, cells without content last.
function table({head, rows, caption}, kept = {}) {
  const value = text => /^[-−]?[\d.,]/.test(text) ? parseFloat(text.replace("−", "-").replaceAll(",", "")) : NaN;
  const numeric = head.map((_, c) => {
    const texts = rows.map(row => row[c]).filter(text => !/^[\s—–-]*$/.test(text));
    return c > 0 && texts.filter(text => !isNaN(value(text))).length >= texts.length / 2;
  });
  const body = el("tbody"), heads = head.map((name, c) => el("th", {scope: "col", className: numeric[c] ? "number" : ""},
    el("button", {type: "button", onclick: () => sort(c, kept.column === c ? -kept.way : numeric[c] ? -1 : 1)}, name)));
  function fill() {
    const {column, way} = kept;
    const sorted = column === undefined ? rows : [...rows].sort((a, b) => {
      const [x, y] = [value(a[column]), value(b[column])];
      if (numeric[column]) return isNaN(x) - isNaN(y) || way * (x - y) || 0;
      return way * a[column].localeCompare(b[column], "en", {numeric: true});
    });
    body.replaceChildren(...sorted.map(row => el("tr", {}, ...row.map((text, c) =>
      c ? el("td", {className: numeric[c] ? "number" : ""}, text) : el("th", {scope: "row"}, text)))));
    heads.forEach((th, c) => c === column ? th.setAttribute("aria-sort", way > 0 ? "ascending" : "descending") : th.removeAttribute("aria-sort"));
  }
  const sort = (column, way) => { Object.assign(kept, {column, way}); fill(); };
  fill();
  return el("div", {className: "card table"}, caption ? el("p", {className: "soft"}, caption) : null,
    el("div", {className: "scroll", tabIndex: 0, role: "group", ariaLabel: caption || `table of ${head[0]}`},
      el("table", {}, el("thead", {}, el("tr", {}, ...heads)), body)));
}
