"""The frame of the HTML report: its style, its script, and the places for its content.

Nothing is loaded from anywhere, which the page's own content security policy enforces.
"""

import string

STYLE = """
:root {
  color-scheme: light dark;
  --ground: #fbfaf8; --panel: #fff; --ink: #1d1d1b; --soft: #66645e; --line: #e4e1da;
  --nnx: #1a7f4e; --linen: #a15c00; --wrapped-nnx: #0b6e8a; --wrapped-linen: #8a3fa0;
  --hover: #f3f0ea;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ground: #171817; --panel: #1f211f; --ink: #e9e7e1; --soft: #a09d94; --line: #353733;
    --nnx: #5cc98f; --linen: #e2a34f; --wrapped-nnx: #5fc1de; --wrapped-linen: #cf94e0;
    --hover: #292b28;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; max-width: 90rem; padding: 2.5rem 2rem 4rem; background: var(--ground);
  color: var(--ink); font: 15px/1.5 system-ui, "Segoe UI", Roboto, "Helvetica Neue", sans-serif;
}
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .25rem; letter-spacing: -.01em; }
h2 { font-size: 1.05rem; margin: 2.5rem 0 .75rem; }
p { margin: 0 0 .75rem; max-width: 46rem; }
code, .mono { font-family: ui-monospace, "SF Mono", Menlo, Consolas, monospace; font-size: .87em; }
h1 code { font-size: .95em; overflow-wrap: anywhere; }
.soft { color: var(--soft); }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(18rem, 1fr)); gap: 1rem;
  margin: 1.5rem 0; }
.card { background: var(--panel); border: 1px solid var(--line); border-radius: 10px;
  padding: 1rem 1.25rem 1.15rem; }
.card .figure { font-size: 2.1rem; font-weight: 650; letter-spacing: -.02em; line-height: 1.2; }
.bar { background: var(--line); border-radius: 99px; height: .6rem; margin: .5rem 0 .6rem;
  overflow: hidden; }
.bar > i { display: block; height: 100%; background: var(--nnx); }
.note { border-left: 3px solid var(--linen); padding-left: .8rem; }
.tools { display: flex; flex-wrap: wrap; gap: .6rem; margin: 0 0 .75rem; }
input[type=search] { flex: 1 1 16rem; max-width: 26rem; }
input, button { font: inherit; color: inherit; background: var(--panel);
  border: 1px solid var(--line); border-radius: 7px; padding: .35rem .7rem; }
button { cursor: pointer; }
button:hover, .row:hover { background: var(--hover); }
:focus-visible { outline: 2px solid var(--wrapped-nnx); outline-offset: 1px; }
.scroll { overflow-x: auto; background: var(--panel); border: 1px solid var(--line);
  border-radius: 10px; }
.tree { min-width: 66rem; padding: .4rem 0; }
.row { display: grid; align-items: baseline; column-gap: 1rem; padding: .22rem 1.1rem;
  grid-template-columns: minmax(17rem, 1fr) 8.5rem 6.5rem 5.5rem 7rem minmax(12rem, 17rem) 9.5rem;
}
.row > * { overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
.head { color: var(--soft); font-size: .82rem; border-bottom: 1px solid var(--line);
  padding-bottom: .45rem; margin-bottom: .3rem; }
summary.row { cursor: pointer; list-style: none; }
summary::-webkit-details-marker { display: none; }
.name { padding-left: calc(var(--depth) * 1.25rem + 1.1rem); position: relative; }
summary > .name::before { content: "\\25B8"; position: absolute; margin-left: -1.05rem;
  color: var(--soft); }
details[open] > summary > .name::before { content: "\\25BE"; }
.name b { font-weight: 600; }
.number { text-align: right; font-variant-numeric: tabular-nums; }
.kind { font-size: .82rem; font-weight: 600; }
.kind::before { content: ""; display: inline-block; width: .55rem; height: .55rem;
  border-radius: 2px; background: currentColor; margin-right: .45rem; }
.linen { color: var(--linen); } .nnx { color: var(--nnx); }
.wrapped-linen { color: var(--wrapped-linen); } .wrapped-nnx { color: var(--wrapped-nnx); }
.row .bar { margin: 0; height: .45rem; align-self: center; }
.classes { border-collapse: collapse; width: 100%; min-width: 46rem; }
.classes th { text-align: left; font-weight: 400; color: var(--soft); font-size: .82rem; }
.classes th, .classes td { padding: .35rem 1.1rem; border-bottom: 1px solid var(--line); }
.classes tr:last-child td { border-bottom: 0; }
.classes .number { text-align: right; }
footer { margin-top: 2.5rem; color: var(--soft); font-size: .85rem; }
[hidden] { display: none !important; }
@media print { .tools { display: none; } body { padding: 0; } }
"""

SCRIPT = """
const tree = document.querySelector(".tree");
const search = document.querySelector("#search");
const count = document.querySelector("#count");
const all = [...tree.querySelectorAll("details")];
const nodes = [...tree.querySelectorAll("[data-text]")];
function show() {
  const words = search.value.toLowerCase().split(/\\s+/).filter(Boolean);
  let matches = 0;
  for (const node of nodes) node.hidden = words.length > 0;
  for (const node of nodes) {
    if (!words.every(word => node.dataset.text.includes(word))) continue;
    matches += 1;
    for (let at = node; at !== tree; at = at.parentElement) {
      at.hidden = false;
      if (at !== node && words.length && at.tagName === "DETAILS") at.open = true;
    }
  }
  count.textContent = words.length ? `${matches} of ${nodes.length} modules` : "";
}
search.addEventListener("input", show);
document.querySelector("#open").addEventListener("click", () => all.forEach(d => d.open = true));
document.querySelector("#close").addEventListener("click", () => all.forEach(d => d.open = false));
"""

MARK = '<meta name="generator" content="linen-nnx-bridge report">'
"""What every page holds near its beginning, so that a new one may take its place."""

PAGE = string.Template("""\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
$mark
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:">
<link rel="icon" href="data:,">
<title>$title</title>
<style>$style</style>
</head>
<body>
<header>
<p class="soft">Migration from Flax Linen to Flax NNX</p>
<h1><code>$target</code></h1>
</header>
<section class="cards">$cards</section>
$notes
<h2>Modules</h2>
<div class="tools">
<input type="search" id="search" placeholder="Search path, class, kind, source"
 aria-label="Search modules">
<button type="button" id="open">Expand all</button>
<button type="button" id="close">Collapse all</button>
<span class="soft" id="count" role="status"></span>
</div>
<div class="scroll"><div class="tree">
<div class="row head"><span class="name">module</span><span>kind</span>
<span class="number">parameters</span><span class="number">bytes</span><span>migrated</span>
<span>source</span><span>NNX counterpart</span></div>
$tree
</div></div>
$remaining
<footer>Made by <code>python -m bridge report</code>. A module counts as migrated if it is written
in NNX, wrapped in a ToLinen or not. Parameters are leaves of collection <code>params</code> and
Variables of type <code>Param</code>; a shared one counts once.</footer>
<script>$script</script>
</body>
</html>
""")
