// Line charts. Lines differ in colour, dash and marker, so that they can be told apart without colour vision.
const COLOURS = 7, DASHES = ["", "8 4", "2 3", "11 3 2 3", "5 2", "1 4"];
const SHAPES = ["M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0", "M-3.5-3.5h7v7h-7z", "M0-4.6 4.4 3.4H-4.4z", "M0-5 5 0 0 5-5 0z",
  "M-4-2.2-2.2-4 0-1.8 2.2-4 4-2.2 1.8 0 4 2.2 2.2 4 0 1.8-2.2 4-4 2.2-1.8 0z", "M0 4.6 4.4-3.4H-4.4z"];
function look(i, {colour = i, dash = i, shape = dash, strength = 1}) {
  const tint = `var(--c${colour % COLOURS})`;
  return {color: strength < 1 ? `color-mix(in oklab, ${tint} ${100 * strength}%, var(--line))` : tint,
    dash: DASHES[dash % DASHES.length], shape: SHAPES[shape % SHAPES.length]};
}
const marker = ({shape, color}, x, y) => svg("path", {d: shape, transform: `translate(${x.toFixed(1)} ${y.toFixed(1)})`, style: `fill: ${color}`});
const sample = (style, dots) => svg("svg", {viewBox: "0 0 30 12", "aria-hidden": "true"}, ...(dots ? [] : [svg("line",
  {x1: 0, x2: 30, y1: 6, y2: 6, "stroke-width": 2, "stroke-dasharray": style.dash, style: `stroke: ${style.color}`})]), marker(style, 15, 6));

function nice(span, count) {  // the step of about `count` round ticks
  const power = 10 ** Math.floor(Math.log10(span / count));
  return [1, 2, 5, 10].map(m => m * power).find(s => span / s <= count);
}
const tick = (v, step) => Math.abs(v) < step / 1e6 ? "0" : step < 1e-4 || Math.abs(v) >= 1e9 ? v.toExponential(step < 1e-4 ? 1 : 0)
  : v.toLocaleString("en-US", {maximumFractionDigits: Math.max(0, Math.ceil(-Math.log10(step) - 1e-9))});

// An axis from values to pixels, with ticks. `names` are categories; `log` axes have ticks at round numbers or powers of two.
function axis(values, {label, names, log, zero}, from, to, room) {
  const count = Math.max(2, Math.floor(Math.abs(to - from) / room));
  if (names) {
    const place = i => from + (to - from) * (i + .5) / names.length, every = Math.ceil(names.length / count);
    return {at: place, ticks: names.map((n, i) => [i, names.length > 3 ? n.replace(/^layer /, "") : n]).filter((_, i) => i % every === 0)};
  }
  let low = Math.min(...values), high = Math.max(...values);
  const most = /%/.test(label) && high <= 100 ? 100 : Infinity;
  if (log) {
    const two = values.every(v => Number.isInteger(Math.log2(v))), base = two ? 2 : 10;
    const scale = v => Math.log(v) / Math.log(base), first = Math.floor(scale(low) + 1e-9), last = Math.ceil(scale(high) - 1e-9);
    let ticks = Array.from({length: last - first + 1}, (_, i) => base ** (first + i));
    if (!two && ticks.length < 4) ticks = ticks.flatMap(t => [t, 2 * t, 5 * t]);
    [low, high] = two ? [low, high] : [ticks.findLast(t => t <= low * 1.0001) ?? low, ticks.find(t => t >= high * .9999) ?? high];
    if (low === high) [low, high] = [low / 2, high * 2];
    ticks = ticks.filter(t => t >= low * .999 && t <= high * 1.001);
    ticks = ticks.filter((_, i) => (ticks.length - 1 - i) % Math.ceil(ticks.length / count) === 0);
    return {at: v => from + (to - from) * Math.log(v / low) / Math.log(high / low), ticks: ticks.map(t => [t, tick(t, t)])};
  }
  if (zero || (low > 0 && low < high / 4)) low = Math.min(low, 0);
  if (low === high) [low, high] = low > 0 ? [low * .9, Math.min(high * 1.1, most)] : [low - .5, high + .5];
  const step = nice(high - low, count), first = Math.floor(low / step + 1e-9), last = Math.ceil(high / step - 1e-9);
  const tight = zero === false;  // an axis of steps or lengths ends where the data ends
  [low, high] = tight ? [low, high] : [first * step, last * step];
  const ticks = Array.from({length: last - first + 1}, (_, i) => (first + i) * step).filter(t => t >= low - step / 1e6 && t <= high + step / 1e6);
  return {at: v => from + (to - from) * (v - low) / (high - low), ticks: ticks.map(t => [t, tick(t, step)])};
}

// spec: {title, note, x: {label, log, names}, y: {label, log}, reference, series: [{name, points: [[x, y, label?], …],
// marks: [[x, label], …], dots, colour, dash, shape, strength}, …]}. Series with one name share a look and a legend entry.
function chart(spec, kept = {}, level = "h3") {
  const {title, note, x: across, y: up} = spec;
  const every = spec.series.map(s => ({marks: [], ...s, points: s.points.filter(p => isFinite(p[0]) && isFinite(p[1])
    && (!across.log || p[0] > 0) && (!up.log || p[1] > 0))})).filter(s => s.points.length);
  if (!every.length) return null;
  const names = [...new Set(every.map(s => s.name))], style = s => look(names.indexOf(s.name), s);
  const hidden = kept.hidden ??= new Set();
  const plot = el("div", {className: "plot"}), tip = el("div", {className: "tip", hidden: true, ariaHidden: "true"});
  const slider = el("input", {type: "range", min: 0, step: 1, ariaLabel: `${across.label || "position"} in “${title}”`});
  const values = el("details", {}, el("summary", {}, "Values"));
  const where = v => across.names ? across.names[Math.round(v)] : `${across.label} ${number(v)}`;
  const visible = () => every.filter(s => !hidden.has(s.name));
  const positions = () => [...new Set(visible().flatMap(s => s.points.map(p => p[0])))].sort((a, b) => a - b);
  const nearest = (s, v) => s.points.reduce((best, p) => Math.abs(p[0] - v) < Math.abs(best[0] - v) ? p : best);
  const reading = (s, v, reach) => { const p = nearest(s, v); return Math.abs(p[0] - v) <= reach ? p : null; };

  function draw() {
    const width = Math.max(240, plot.clientWidth || 460), height = Math.round(Math.min(300, Math.max(210, width * .5)));
    const shown = visible(), ys = shown.flatMap(s => s.points.map(p => p[1])), xs = positions();
    plot.replaceChildren(tip, slider);
    if (!shown.length) return;
    if (spec.reference !== undefined) ys.push(spec.reference);
    const top = up.label ? 24 : 10, bottom = across.label ? 40 : 24;
    const rows = axis(ys, up, height - bottom, top, 30), left = 12 + 7 * Math.max(...rows.ticks.map(t => t[1].length));
    const one = xs.length === 1 && !across.names;  // a single position: one tick, in the middle
    const columns = one ? {at: () => (left + width) / 2, ticks: [[xs[0], number(xs[0])]]} : axis(xs, {zero: false, ...across}, left + 4, width - 12, across.names ? 60 : 75);
    const reach = (Math.max(...xs) - Math.min(...xs)) / 60;
    const picture = svg("svg", {viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": summary(shown)});
    const write = (x, y, text, anchor) => { const t = svg("text", {x, y, "text-anchor": anchor}); t.textContent = text; picture.append(t); };
    for (const [v, text] of rows.ticks) {
      picture.append(svg("line", {class: "axis", x1: left, x2: width - 4, y1: rows.at(v), y2: rows.at(v)}));
      write(left - 6, rows.at(v) + 4, text, "end");
    }
    for (const [v, text] of columns.ticks) write(Math.min(columns.at(v), width - 3.5 * text.length), height - bottom + 18, text, "middle");
    if (up.label) write(0, 12, up.label, "start");
    if (across.label) write((left + width) / 2, height - 5, across.label, "middle");
    if (spec.reference !== undefined) picture.append(svg("line", {class: "cursor", x1: left, x2: width - 4, y1: rows.at(spec.reference), y2: rows.at(spec.reference)}));
    const under = covered(shown, ys), single = xs.length === 1;
    shown.forEach((s, n) => {
      // A chart with one position shows its points side by side.
      const aside = single ? (names.indexOf(s.name) - (names.length - 1) / 2) * 26 : 0;
      const at = s.points.map(p => [columns.at(p[0]) + aside, rows.at(p[1])]), path = at.map(p => p.map(c => c.toFixed(1)).join()).join(" ");
      const {color, dash} = style(s), line = {points: path, fill: "none", "stroke-linejoin": "round"};
      if (!s.dots && at.length > 1) {
        if (under.has(s)) picture.append(svg("polyline", {...line, class: "band", "stroke-width": 9, "stroke-opacity": .35, style: `stroke: ${color}`}));
        picture.append(svg("polyline", {...line, "stroke-width": 2, "stroke-dasharray": dash, style: `stroke: ${color}`}));
      }
      const gap = s.dots ? 1 : Math.ceil(at.length / 10), shift = Math.floor(n * gap / shown.length);
      at.forEach(([px, py], i) => { if (i % gap === shift) picture.append(marker(style(s), px, py)); });
      if (at.length === 1 && !s.dots) write(at[0][0] + (single ? 0 : 8), at[0][1] < top + 9 ? top + 16 : at[0][1] - 9, String(Number(s.points[0][1].toPrecision(4))), single ? "middle" : "start");
      for (const [v, text] of s.marks) {
        picture.append(svg("line", {class: "cursor", x1: columns.at(v), x2: columns.at(v), y1: top, y2: height - bottom}));
        write(columns.at(v) + 4, height - bottom - 6, text, "start");
      }
    });
    const cursor = svg("line", {class: "cursor", y1: top, y2: height - bottom, visibility: "hidden"});
    picture.append(cursor);
    plot.prepend(picture);
    slider.max = xs.length - 1; slider.style.left = `${100 * left / width}%`; slider.style.width = `${100 * (width - left - 4) / width}%`;
    const point = i => {
      const lines = shown.map(s => [s, reading(s, xs[i], reach)]).filter(([, p]) => p), place = columns.at(xs[i]);
      cursor.setAttribute("x1", place); cursor.setAttribute("x2", place); cursor.setAttribute("visibility", "visible");
      const text = (s, p) => `${[p[2] ?? s.name, number(p[1])].filter(Boolean).join(" ")}${p[3] ? ` ± ${number(p[3])}` : ""}`;
      tip.replaceChildren(el("div", {className: "soft"}, where(xs[i])), ...lines.map(([s, p]) => el("div", {}, sample(style(s), s.dots), ` ${text(s, p)}`)));
      tip.hidden = false;
      tip.style.left = `${Math.max(0, Math.min(width - tip.offsetWidth, place + (place > width / 2 ? -tip.offsetWidth - 10 : 10)))}px`;
      slider.value = i;
      slider.setAttribute("aria-valuetext", `${where(xs[i])}: ${lines.map(([s, p]) => text(s, p)).join(", ")}`);
    };
    const leave = () => { tip.hidden = true; cursor.setAttribute("visibility", "hidden"); };
    plot.onpointermove = plot.onpointerdown = e => {
      const px = (e.clientX - plot.getBoundingClientRect().left) * width / plot.clientWidth;
      point(xs.reduce((best, v, i) => Math.abs(columns.at(v) - px) < Math.abs(columns.at(xs[best]) - px) ? i : best, 0));
    };
    plot.onpointerleave = leave;
    slider.oninput = slider.onfocus = () => point(Number(slider.value));
    slider.onblur = leave;
  }
  const summary = shown => `${title}. ${up.label || ""} ${across.label ? "by " + across.label : ""}: ` + shown.slice(0, 8).map(s => {
    const first = s.points[0], last = s.points.at(-1);
    return `${s.name} ${s.points.length > 1 ? `from ${number(first[1])} to ${number(last[1])}` : number(first[1])}`;
  }).join("; ") + (shown.length > 8 ? `; and ${shown.length - 8} more` : "") + ".";
  // Series that lie under a later one: nearly all points of the later one are on them.
  function covered(shown, ys) {
    const close = (Math.max(...ys) - Math.min(...ys)) / 200, under = new Map();
    shown.forEach((s, i) => shown.slice(i + 1).forEach(t => {
      if (s.name === t.name || s.dots || t.points.length < 2) return;
      const known = new Map(s.points.map(p => [p[0], p[1]])), both = t.points.filter(p => known.has(p[0]));
      const same = both.filter(p => Math.abs(known.get(p[0]) - p[1]) <= close).length;
      if (both.length > 1 && same >= .9 * both.length) under.set(s, [...(under.get(s) ?? []), t.name]);
    }));
    return under;
  }
  values.ontoggle = () => {
    if (!values.open || values.querySelector("table")) return;
    const xs = positions(), count = Math.min(12, xs.length), reach = (xs.at(-1) - xs[0]) / 60;
    const chosen = Array.from({length: count}, (_, i) => xs[Math.round(i * (xs.length - 1) / Math.max(1, count - 1))]);
    const cell = (s, v) => { const p = reading(s, v, reach); return p ? number(p[1]) : ""; };
    values.append(table({head: [across.label || "at", ...every.map(s => s.name)],
      rows: chosen.map(v => [across.names ? across.names[Math.round(v)] : number(v), ...every.map(s => cell(s, v))]), caption: title}));
  };
  const legend = el("div", {className: "legend"}, ...names.map(name => {
    const first = every.find(s => s.name === name);
    return el("button", {type: "button", "aria-pressed": !hidden.has(name), title: "show or hide", onclick: e => {
      if (!hidden.delete(name)) hidden.add(name);
      e.currentTarget.setAttribute("aria-pressed", !hidden.has(name));
      draw();
    }}, sample(style(first), first.dots), name);
  }));
  const all = every.flatMap(s => s.points.map(p => p[1]));
  const same = [...covered(every, all)].map(([s, on]) => `“${on.join("”, “")}” ${on.length > 1 ? "lie" : "lies"} on “${s.name}”.`);
  const text = [note, [...new Set(same)].slice(0, 4).join(" ")].filter(Boolean).join(" ");
  let drawn = 0;
  new ResizeObserver(() => { if (plot.clientWidth !== drawn) { drawn = plot.clientWidth; requestAnimationFrame(draw); } }).observe(plot);
  draw();
  return el("figure", {className: "card chart"}, el(level, {}, title), text ? el("p", {className: "soft"}, text) : null, plot,
    names.length > 1 || names[0] ? legend : null, values);
}
