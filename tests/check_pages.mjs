// Opens HTML pages in Chromium at two widths and in both colour schemes. Reports what axe finds, script errors,
// requests, and content wider than the window. Usage: node check_pages.mjs CHROMIUM PAGE… ; with SHOTS=FOLDER also
// writes screenshots.
import { createRequire } from "node:module";
import path from "node:path";

const require = createRequire(path.join(process.cwd(), "package.json"));
const { chromium } = require("playwright-core");
const [executablePath, ...pages] = process.argv.slice(2);
const browser = await chromium.launch({ executablePath, args: ["--no-sandbox"] });
let found = 0;
const tell = (...words) => { found++; console.log(...words); };
for (const page of pages)
  for (const width of [400, 1100])
    for (const colorScheme of ["light", "dark"]) {
      const where = `${path.basename(path.dirname(page))}/${path.basename(page)} at ${width} px, ${colorScheme}:`;
      const context = await browser.newContext({ viewport: { width, height: 900 }, colorScheme, bypassCSP: true });
      const tab = await context.newPage();
      const url = page.includes("://") ? page : `file://${path.resolve(page)}`;
      tab.on("pageerror", error => tell(where, error.message));
      tab.on("request", r => { if (!r.url().startsWith(url)) tell(where, "requests", r.url()); });
      await tab.goto(url);
      const wide = await tab.evaluate(() => document.documentElement.scrollWidth - innerWidth);
      if (wide > 0) tell(where, `content is ${wide} px wider than the window`);
      if (process.env.SHOTS) {
        const name = `${path.basename(path.dirname(page))}-${path.basename(page, ".html")}-${width}-${colorScheme}.png`;
        await tab.screenshot({ path: path.join(process.env.SHOTS, name), fullPage: !process.env.FOLD });
      }
      for (const d of await tab.$$("details")) await d.evaluate(d => { d.open = true; });
      await tab.addScriptTag({ path: require.resolve("axe-core") });
      const { violations } = await tab.evaluate(() => axe.run());
      for (const { id, help, nodes } of violations)
        tell(where, `${id}: ${help} (${nodes.length}×), first: ${nodes[0].html.slice(0, 200)}`);
      await context.close();
    }
await browser.close();
console.log(`${pages.length} pages, ${found} problems`);
process.exit(found ? 1 : 0);
