// Packed numbers: byte q of part i means max[i] · sign(q) · (q/127)².
const decoded = new WeakMap();
function part(packed, i) {
  if (!decoded.has(packed)) {
    const text = atob(packed.bytes);
    decoded.set(packed, Int8Array.from({length: text.length}, (_, j) => text.charCodeAt(j)));
  }
  const size = packed.shape.slice(1).reduce((a, b) => a * b, 1);
  const bytes = decoded.get(packed).subarray(i * size, (i + 1) * size);
  return Float32Array.from(bytes, q => packed.max[i] * Math.sign(q) * (q / 127) ** 2);
}
// A map keeps its aspect ratio, but is at most twice as high as wide (pyramids have many queries and few slots).
const proportion = (columns, rows) => String(Math.min(4, Math.max(.5, columns / rows)));
const largest = values => values.reduce((a, b) => Math.max(a, Math.abs(b)), 0);
// The value of full colour: the largest weight, but at least four times uniform, so that uniform rows look uniform.
const fullStrength = values => Math.max(largest(values), 4 * values.reduce((a, b) => a + Math.abs(b), 0) / values.length);

// The opacity of one colour is the value (warm above zero, cool below), so it works in light and dark mode.
const probe = el("i", {hidden: true});
document.body.append(probe);
function ink(name) {
  probe.style.color = `var(${name})`;
  return getComputedStyle(probe).color.match(/[\d.]+/g).slice(0, 3).map(Number);
}
let warm, cool, strongest;  // the opacity behind text, which must stay readable
const inks = () => { warm = ink("--warm"); cool = ink("--cool"); strongest = document.documentElement.style.colorScheme === "dark" ? .45 : .65; };
repaint.push(inks);
function paint(canvas, values, columns, top) {
  const draw = () => {
    const rows = Math.ceil(values.length / columns);
    canvas.width = columns; canvas.height = rows;
    const image = canvas.getContext("2d").createImageData(columns, rows);
    values.forEach((v, i) => {
      const strength = Math.min(1, Math.abs(v) / (top || 1));
      image.data.set([...(v < 0 ? cool : warm), 255 * strength], 4 * i);
    });
    canvas.getContext("2d").putImageData(image, 0, 0);
  };
  draw();
  return draw;
}
const shade = (v, top) => `rgb(${(v < 0 ? cool : warm).join(" ")} / ${(strongest * Math.min(1, Math.abs(v) / (top || 1))).toFixed(3)})`;

function attention() {
  const {examples, layers} = data.attention;
  if (!layers.length || !examples.length) return;
  const state = {example: 0, layer: 0, head: null, query: null, maps: false, sorted: false};
  const grid = el("div", {className: "heads"}), large = el("div");
  const seen = () => layers[state.layer].examples[state.example];
  const tokens = () => seen().tokens === "shared" ? examples[state.example].tokens : seen().tokens
    ?? Array.from({length: seen().row.shape[1]}, (_, i) => `${seen().slots ? "slot" : "token"} ${i + 1}`);
  const cells = () => seen().grid ?? (seen().tokens === "shared" ? examples[state.example].grid : null);
  const queries = () => seen().map ? seen().map.shape[1] : seen().windows ? seen().row.shape[1] : 0;
  const query = () => state.query ?? (seen().query < 0 ? Math.max(queries() + seen().query, 0) : seen().query);

  function row(head) {
    const view = seen(), columns = view.row.shape[1];
    if (head < 0) return mean(view.row.shape[0], row);
    if (!queries() || state.query === null) return part(view.row, head);
    const of = (map, q, n) => part(map, head).subarray(q * n, (q + 1) * n);
    if (view.map) return of(view.map, state.query, columns);
    const {tokens, map} = view.windows, length = tokens[0].length, at = tokens.flat().indexOf(state.query), values = new Float32Array(columns);
    of(map, at, length).forEach((v, i) => { const token = tokens[Math.floor(at / length)][i]; if (token >= 0) values[token] = v; });
    return values;
  }
  const map = head => head < 0 ? mean(seen().map.shape[0], map) : part(seen().map, head);
  function mean(n, of) {
    const total = Float32Array.from(of(0));
    for (let h = 1; h < n; h++) of(h).forEach((v, i) => total[i] += v);
    return total.map(v => v / n);
  }
  // The keys of a memory are slots, those of cross attention another text, and those of a pyramid fewer than its queries.
  const asking = () => {
    const view = seen(), known = view.queries ?? (view.slots ? examples[state.example].tokens : tokens());
    return known.length === queries() || !queries() && !view.slots ? known : [];
  };
  // If the keys form an image (possibly with CLS first), draw them in its shape; otherwise wrap them like text.
  function shape(values) {
    if (cells()) {
      const [rows, columns] = cells();
      return [values.slice(values.length - rows * columns), columns];
    }
    const columns = Math.min(values.length, Math.max(12, Math.ceil(Math.sqrt(2.2 * values.length))));
    return [values, columns];
  }
  const visible = token => /^\s+$/.test(token ?? "") ? "␣" : token ?? "";
  const spoken = token => ({" ": "space", "\n": "line break", "\t": "tab", "": "nothing", "‿": "rest of the character"})[token] ?? token;
  const focus = values => {
    const total = values.reduce((a, b) => a + Math.abs(b), 0) || 1;
    return values.reduce((a, b) => { const p = Math.abs(b) / total; return p > 0 ? a - p * Math.log(p) : a; }, 0);
  };

  function heads() {
    const view = seen(), kinds = layers[state.layer].mechanisms;
    let order = kinds.map((_, h) => h);
    if (state.sorted) {
      const spread = order.map(h => focus(shape(row(h))[0]));
      order.sort((a, b) => spread[a] - spread[b]);
    }
    const labels = tokens(), several = new Set(kinds).size > 1;
    grid.replaceChildren(...[-1, ...order].map(h => {
      const values = row(h), canvas = el("canvas", {ariaHidden: "true"});
      if (state.maps && view.map) {
        const m = map(h), [, rows, columns] = view.map.shape;
        paint(canvas, m, columns, fullStrength(m));
        canvas.style.aspectRatio = proportion(columns, rows);
      }
      else { const [cells, columns] = shape(values); paint(canvas, cells, columns, fullStrength(cells)); }
      const top = values.reduce((best, v, i) => Math.abs(v) > Math.abs(values[best]) ? i : best, 0);
      const name = h < 0 ? "all heads, mean" : `head ${h + 1}${several ? " · " + kinds[h] : ""}`;
      return el("button", {className: "head", type: "button", "aria-pressed": h === state.head, "data-head": h,
        title: `${name}: most on “${labels[top] ?? ""}”, ${number(values[top])}`,
        onclick: () => { state.head = h; heads(); show(); }},
        canvas, el("span", {}, name), el("span", {className: "soft"}, `${number(values[top])} ${visible(labels[top])}`));
    }));
  }

  function show() {
    const view = seen(), values = row(state.head), labels = tokens(), top = fullStrength(values);
    const kind = state.head < 0 ? "mean of all heads" : `head ${state.head + 1}, ${layers[state.layer].mechanisms[state.head]}`;
    const readout = el("div", {className: "readout", role: "status"});
    const say = text => readout.textContent = text;
    const single = labels.filter(t => t.length === 1).length > labels.length * .8;
    const asked = !view.slots && !view.queries && queries() === labels.length ? query() : -1;
    const pick = i => {
      const from = document.activeElement?.dataset.choose;  // the control is drawn again: keep the focus on it
      state.query = Math.max(0, Math.min(queries() - 1, i)); heads(); show();
      if (from) large.querySelector(`[data-choose="${from}"]`)?.focus({preventScroll: true});
    };
    const keys = {ArrowLeft: -1, ArrowRight: 1, ArrowUp: -10, ArrowDown: 10, Home: -Infinity, End: Infinity};
    const list = asked >= 0 ? {role: "listbox", "data-choose": "text", "aria-activedescendant": `token-${asked}`,
      onkeydown: e => { if (e.key in keys) { e.preventDefault(); pick(asked + keys[e.key]); } }} : {role: "region"};
    const text = el("div", {className: "text" + (single ? " bytes" : "") + (asked >= 0 ? " pick" : ""), tabIndex: 0,
      ariaLabel: asked >= 0 ? "Tokens: choose the query" : "Tokens", ...list},
      ...labels.flatMap((t, i) => {
        const span = el("span", {className: i === asked ? "query" : "", title: `${spoken(t)}: ${number(values[i] ?? 0)}`,
          ...(asked >= 0 ? {role: "option", id: `token-${i}`, ariaSelected: String(i === asked), ariaLabel: `${spoken(t)}, ${number(values[i] ?? 0)}`,
            onclick: () => pick(i)} : {})}, t);
        span.style.background = shade(values[i] ?? 0, top);
        return single ? [span] : [span, " "];
      }));
    const example = examples[state.example], parts = [];
    const image = cells();
    if (image) {
      const [patch, columns] = shape(values), over = art(`attention of ${kind} over the image`);
      paint(over, patch, columns, fullStrength(patch));
      const under = example.picture && !view.slots ? picture(example.picture) : el("canvas", {ariaHidden: "true"});
      under.style.filter = "grayscale(1)"; under.style.opacity = .55;
      const frame = el("div", {className: "frame"}, under, over);
      frame.style.aspectRatio = `${image[1]} / ${image[0]}`;
      frame.style.cursor = asked >= 0 ? "pointer" : "";
      const at = e => { const [r, c] = cellAt(e, frame, ...image); return r * image[1] + c + labels.length - image[0] * image[1]; };
      frame.onmousemove = e => say(`${labels[at(e)]}: ${number(values[at(e)])}`);
      if (asked >= 0) frame.onclick = e => pick(at(e));
      const cell = asked - labels.length + image[0] * image[1];  // negative for a class token
      if (asked >= 0 && cell >= 0) frame.append(el("i", {style: `width: ${100 / image[1]}%; height: ${100 / image[0]}%; ` +
        `left: ${100 * (cell % image[1]) / image[1]}%; top: ${100 * Math.floor(cell / image[1]) / image[0]}%`}));
      if (example.picture) {
        const original = el("div", {className: "frame"}, picture(example.picture));
        original.style.aspectRatio = frame.style.aspectRatio;
        parts.push(original);
      }
      parts.push(frame);
    }
    if (view.map) {
      const [, rows, columns] = view.map.shape, canvas = art(`attention map of ${kind}, ${rows} queries by ${columns} keys`), m = map(state.head);
      paint(canvas, m, columns, fullStrength(m));
      const frame = el("div", {className: "frame"}, canvas);
      frame.style.aspectRatio = proportion(columns, rows);
      frame.style.cursor = "pointer";
      frame.onclick = e => pick(cellAt(e, frame, rows, columns)[0]);
      frame.onmousemove = e => { const [i, j] = cellAt(e, frame, rows, columns);
        say(`${asking()[i] ?? "query " + (i + 1)} → ${labels[j] ?? j + 1}: ${number(m[i * columns + j])}`); };
      parts.push(el("div", {}, frame, el("small", {}, `full map: queries down, ${view.slots ? "slots" : "keys"} across`)));
    }
    if (queries() && (image || asked < 0)) parts.push(el("label", {className: "soft"}, "query ", el("input", {type: "range", min: 0, max: queries() - 1,
      value: query(), "data-choose": "slider", "aria-valuetext": asking()[query()] ?? `query ${query() + 1}`, onchange: e => pick(Number(e.target.value))})));
    const images = el("div", {className: "pictures"}, ...parts);
    const from = queries() || view.query === 0 ? asking()[query()] ?? `query ${query() + 1}` : "the last token";
    const aside = image && !view.slots ? values.slice(0, values.length - image[0] * image[1]) : [];
    const cls = aside.length ? `${number(aside.reduce((a, b) => a + b))} of it on ${aside.length > 1 ? `${labels[0]} to ${labels[aside.length - 1]}` : labels[0]}, the rest on the image. ` : "";
    const line = el("p", {}, el("b", {}, kind), ` — attention of “${from}”${view.slots ? " over the slots of the cache" : view.windows ? " in its window" : ""}. ${cls}`
      + (view.parts ? `The layer cuts its input into ${view.parts} windows; this is the first. ` : ""),
      el("small", {}, asked >= 0 ? image ? "Click a cell to select the query, or use the slider." : "Click a token to select the query, or move with the arrow keys." : view.map ? "Click a row of the map to select the query, or use the slider." : "The input is long: only this row is available, not the full map."));
    large.replaceChildren(el("div", {className: "card"}, line, image ? images
      : el("div", {className: "large"}, text, images), labels.includes("‿") ? el("small", {}, "‿ is another byte of the character before it. ") : null, readout));
    const at = text.children[asked >= 0 ? asked : values.indexOf(largest(values))];  // in view, if the text is long
    if (at && at.offsetTop > text.clientHeight) text.scrollTop = at.offsetTop - text.clientHeight / 2;
  }

  const verdict = el("div", {className: "soft", id: "verdict"});
  function all() {
    const kinds = layers[state.layer].mechanisms;
    state.query = null;
    if (state.head === null) {  // start with the most concentrated head
      const spread = kinds.map((_, h) => focus(shape(row(h))[0]));
      state.head = spread.indexOf(Math.min(...spread));
    }
    state.head = Math.min(state.head, kinds.length - 1);
    const {prediction, target} = examples[state.example];
    verdict.textContent = [prediction && `predicted ${prediction}`, target && `true ${target}`].filter(Boolean).join(" · ");
    heads(); show();
  }
  const pages = byExample(examples, i => { state.example = i; all(); });
  const levels = layers.length > 1 ? choice("layer", layers.map(l => l.name.replace(/^layer /, "")), 0, i => { state.layer = i; all(); }) : null;
  const maps = layers.some(l => l.examples.some(e => e.map)) ? choice("heads as", ["one row", "whole maps"], 0, i => { state.maps = !!i; heads(); }) : null;
  const order = choice("order", ["head", "most focused"], 0, i => { state.sorted = !!i; heads(); });
  section("Attention", "The effective attention of every head, for any mechanism: the exact matrix that maps values to outputs. " +
    "Each small picture is one head; click it to enlarge. Orange is positive, blue is negative; full colour is the head's largest weight, or four times the uniform weight if that is larger.",
    el("div", {className: "bar"}, pages, levels, maps, order), el("div", {className: "bar"}, verdict), large, grid);
  repaint.push(() => { heads(); show(); });
  all();
}

const art = name => el("canvas", {role: "img", ariaLabel: name});

// The row and column of a grid over an element where the pointer is.
function cellAt(e, node, rows, columns) {
  const box = node.getBoundingClientRect(), at = (x, size, n) => Math.min(n - 1, Math.max(0, Math.floor(x / size * n)));
  return [at(e.clientY - box.top, box.height, rows), at(e.clientX - box.left, box.width, columns)];
}
const byExample = (examples, change) => examples.length > 1 ? choice("example", examples.map((_, i) => `${i + 1}`), 0, change) : null;

function picture({width, height, bytes}, name = "the image") {
  const canvas = el("canvas", {width, height, role: "img", ariaLabel: name}), raw = atob(bytes);
  const context = canvas.getContext("2d"), image = context.createImageData(width, height);
  for (let i = 0; i < width * height; i++)
    for (let c = 0; c < 4; c++) image.data[4 * i + c] = c < 3 ? raw.charCodeAt(3 * i + c) : 255;
  context.putImageData(image, 0, 0);
  return canvas;
}

function galleries() {
  for (const {title, note, images} of data.galleries ?? []) section(title, note, gallery(images));
}

function curves() {
  const {charts, counts, layers} = data.curves;
  if (!charts.length) return;
  const checkpoints = [...new Set(charts[0].series.map(s => s.checkpoint))], splits = Object.keys(counts);
  // Each split has its colour, dash and marker; later checkpoints are stronger.
  const cards = charts.map(({title, note, unit, series}) => chart({title, note, y: {label: unit}, x: {names: layers.slice(0, series[0].mean.length)},
    series: series.map(s => {
      const split = splits.indexOf(s.split), at = checkpoints.indexOf(s.checkpoint);
      return {name: [s.checkpoint, s.split].filter(Boolean).join(", "), colour: split, dash: split,
        strength: checkpoints.length > 1 ? .35 + .65 * at / (checkpoints.length - 1) : 1,
        points: s.mean.map((v, i) => [i, v, undefined, s.std[i]])};
    })}));
  const sizes = Object.entries(counts).map(([split, n]) => `${split} (${n})`).join(", ");
  section("Layer by layer", `Means over ${sizes}; point at a chart for values and standard deviations.`, el("div", {className: "charts"}, ...cards));
}

function heatmaps() {
  const {examples, names} = data.heatmaps;
  if (!examples.length) return;
  const grid = el("div", {className: "grid"});
  const signed = !examples[0].nonzero.length;
  let current = 0;
  const show = () => {
    const {layers, tokens, channels, nonzero} = examples[current], columns = layers.shape[2];
    // The same range for all layers, so that they are comparable: 0 to 2 if nothing is negative, as in the paper.
    const all = Float32Array.from(names.flatMap((_, i) => [...part(layers, i)].map(Math.abs))).sort();
    const top = signed ? all[Math.floor(.99 * (all.length - 1))] : 2;
    grid.replaceChildren(...names.slice(0, layers.shape[0]).map((name, i) => {
      const values = part(layers, i), canvas = art(`tokens of ${name}`);
      paint(canvas, values, columns, top);
      canvas.onmousemove = e => {
        const [r, c] = cellAt(e, canvas, tokens.length, columns);
        canvas.title = `token ${tokens[r]}, channel ${channels[c]}: ${number(values[r * columns + c])}`;
      };
      return el("figure", {}, canvas, el("figcaption", {}, el("b", {}, name), signed ? "" : `, ${Math.round(100 * nonzero[i])} % non-zero`));
    }));
  };
  const pages = byExample(examples, i => { current = i; show(); });
  show(); repaint.push(show);
  section("Tokens", `A random part of each layer's output: tokens down, channels across${signed ? "; orange above zero, blue below" : ", from 0 to 2"}.`,
    el("div", {className: "bar"}, pages), grid);
}

function coherence() {
  if (!data.coherence.length) return;
  const figures = data.coherence.map(layer => {
    const canvas = art(`coherence of ${layer.name}`), values = part(layer.matrix, 0);
    repaint.push(paint(canvas, values, layer.matrix.shape[2], 1));
    return el("figure", {}, canvas, el("figcaption", {}, el("b", {}, layer.name),
      `, mean ${number(layer.mean)}, max ${number(layer.max)} (chance ${number(layer.chance)})`));
  });
  const {heads, directions} = data.coherence[0];
  section("Subspaces", `|cos| between ${directions} directions of each of the ${heads} subspaces: diagonal blocks belong to one head. ` +
    "Pale off-diagonal blocks mean that heads use different directions; mean and max are over the off-diagonal blocks.", el("div", {className: "grid"}, ...figures));
}

function cache() {
  if (!data.cache.length) return;
  // The heads of a layer stand side by side.
  const points = data.cache.flatMap((layer, i) => layer.values.map((v, h) =>
    [i + (h + .5 - layer.values.length / 2) * Math.min(.1, .8 / layer.values.length), v, `head ${h + 1}`]));
  const dots = (name, colour, chosen) => ({name, colour, dash: colour, dots: true, points: points.filter(chosen)});
  const figure = chart({title: "Weight of the cache, by head", x: {names: data.cache.map(l => l.name)}, y: {label: "σ(λ)", zero: true}, reference: .5,
    series: [dots("the cache outweighs the input", 0, p => p[1] > .5), dots("the input counts as much or more", 1, p => p[1] <= .5)]});
  section("Cache", "σ(λ) of each head: the weight of the cache in its output. Above one half, the cache outweighs the input.",
    el("div", {className: "charts"}, figure));
}

// The two branches of each cached layer: images in their shape, other inputs as a strip.
function branches() {
  const {examples, missing} = data.branches;
  if (!examples.length && !missing) return;
  const grid = el("div", {className: "pairs"});
  let current = 0;
  const show = () => {
    const {picture: image, tokens} = data.attention.examples[current];
    const one = (layer, i) => {
      const values = part(layer.maps, i), columns = layer.grid ? layer.grid[1] : values.length, rows = layer.grid ? layer.grid[0] : 1;
      const name = i ? "cache" : "self", canvas = art(`${name} branch of ${layer.name}`);
      paint(canvas, values, columns, 1);
      canvas.style.aspectRatio = layer.grid ? `${columns} / ${rows}` : "auto";
      canvas.onmousemove = e => {
        const [r, c] = cellAt(e, canvas, rows, columns);
        const label = layer.grid ? `row ${r + 1}, column ${c + 1}` : tokens.length === columns ? tokens[c] : `token ${c + 1}`;
        canvas.title = `${label}: ${number(values[r * columns + c])}`;
      };
      return el("figure", {className: layer.grid ? "" : "strip"}, canvas, el("figcaption", {}, name));
    };
    grid.replaceChildren(...examples[current].map(layer => el("div", {className: layer.grid ? "pair" : "pair wide"},
      el("div", {className: "title"}, el("b", {}, layer.name), ` mean σ(λ) ${number(layer.share)}`), one(layer, 0), one(layer, 1))));
    if (image && examples[current].some(layer => layer.grid)) grid.prepend(el("div", {className: "pair original"},
      el("div", {className: "title"}, "the image"), el("figure", {}, picture(image))));
  };
  const pages = byExample(examples, i => { current = i; show(); });
  if (examples.length) { show(); repaint.push(show); }
  section("Self and cache", "Outputs of the two branches of each cached layer, averaged over channels and heads, from 0 (pale) to 1 (strong). " +
    "The self branch attends to this input, the cache branch to the memory learned in training. If one is pale where the other is strong, they complement each other " +
    `(Cached Transformers, arXiv 2312.12742, Figure 4). ${missing}`, el("div", {className: "bar"}, pages), grid);
}

header(data.title, data.facts);
inks();
galleries(); attention(); curves(); heatmaps(); coherence(); cache(); branches();
