// A page that asks its server for new data every two seconds.
let seen = "", paused = false;
const news = el("small", {role: "status"}, "");
const pause = el("button", {type: "button", "aria-pressed": false, onclick: () => {
  paused = !paused;
  pause.setAttribute("aria-pressed", paused);
}}, "pause");
document.querySelector("header > button").before(pause);
document.querySelector("header > div").append(news);

function refresh(text) {  // keeps the focus and what is open
  const places = () => [...main.querySelectorAll("button, input, summary, [tabindex]")];
  const at = places().indexOf(document.activeElement), open = [...main.querySelectorAll("details")].map(d => d.open);
  show(JSON.parse(text));
  main.querySelectorAll("details").forEach((d, i) => { d.open = open[i] ?? false; });
  places()[at]?.focus({preventScroll: true});
}
async function poll() {
  try {
    const text = paused ? seen : await (await fetch("data.json")).text();
    if (text !== seen) refresh(seen = text);
    news.textContent = paused ? "paused" : "";
  } catch {
    news.textContent = "no connection: weft watch has ended";
  }
  setTimeout(poll, 2000);
}
poll();
