"""The page's style and its script: sorting tables, what is under the pointer, search, and keys."""

from __future__ import annotations

from memtrace.render.words import COLOUR

_CATEGORY = "\n".join(f".{name} {{ fill: {colour}; background-color: {colour}; }}" for name, colour in COLOUR.items())

STYLE = (
    """
:root { color-scheme: light dark; --ink: #1d2126; --soft: #68707a; --line: #d9dde2; --paper: #fff; --panel: #f6f7f9;
  --warn: #a15c00; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e7eb; --soft: #98a1ab; --line: #363c44; --paper: #16191d; --panel: #1e2227;
    --warn: #e0a458; }
}
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 1180px;
  margin: 0 auto; padding: 24px; overflow-wrap: anywhere; }
h1 { font-size: 22px; margin: 0; }
h2 { font-size: 17px; margin: 32px 0 8px; }
p, ul { margin: 4px 0; }
ul + p { margin-top: 14px; }
.soft { color: var(--soft); }
.verdict { background: var(--panel); border-left: 4px solid #D55E00; padding: 10px 14px; margin: 14px 0; }
.warning { color: var(--warn); }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { text-align: left; padding: 3px 8px; border-bottom: 1px solid var(--line); vertical-align: top; }
th, table.budget td { overflow-wrap: normal; }
table.budget td:first-child, table.pinned td:first-child, .kind { white-space: nowrap; }
th { color: var(--soft); font-weight: 600; }
th[data-sort] { cursor: pointer; }
td.n, th.n { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
td.bars { width: 50%; vertical-align: middle; }
td.code { font-family: ui-monospace, monospace; font-size: 13px; }
tr.sub td:first-child { padding-left: 24px; }
tr.sub td { color: var(--soft); border-bottom: 0; padding-top: 0; }
tr.total td { font-weight: 600; }
.bar { height: 12px; border-radius: 2px; min-width: 1px; }
.chip { display: inline-block; width: 11px; height: 11px; border-radius: 2px; margin-right: 6px; }
.chart { overflow-x: auto; }
.chart svg { min-width: 1000px; }
.legend span { margin-right: 16px; white-space: nowrap; }
svg { width: 100%; height: auto; display: block; background: var(--panel); }
svg text { fill: var(--ink); font-size: 12px; font-family: system-ui, sans-serif; stroke: var(--panel);
  stroke-width: 3px; paint-order: stroke; stroke-linejoin: round; }
.grid { stroke: var(--line); stroke-width: 1; }
.curve { fill: none; stroke: var(--ink); stroke-width: 1; }
.pointer { stroke: var(--ink); stroke-width: 1; opacity: .6; }
.mark { stroke: #c00; stroke-width: 1.5; }
.chosen { stroke: var(--ink); stroke-width: 1; stroke-dasharray: 3 3; }
.free { fill: var(--paper); }
.pending_free { fill: #b9a; }
.frame { stroke: var(--soft); stroke-width: .6; }
.phase-load { fill: #c9d3de; } .phase-forward { fill: #8fc1a9; } .phase-backward { fill: #d9a7a0; }
.phase-optimizer { fill: #c3a6d4; } .phase-between { fill: #ddd; } .phase-evaluation { fill: #9dbbdd; }
.phase-generation { fill: #d8cf8a; }
.two { max-width: none; } .pair { display: grid; grid-template-columns: 1fr 1fr; gap: 0 28px; }
.pair > div { min-width: 0; }
.pair .chart svg { min-width: 0; } .pair svg text { font-size: 20px; }
.tools input { font: inherit; width: min(420px, 100%); padding: 4px 8px; color: inherit; background: var(--panel);
  border: 1px solid var(--line); border-radius: 4px; }
.gone { display: none; } rect.gone { display: inline; opacity: .12; }
:focus-visible { outline: 2px solid #0072B2; outline-offset: 1px; }
@media screen and (max-width: 760px) { body { padding: 12px; } .pair { display: block; } td.bars { width: 25%; }
  .pair svg text { font-size: 12px; } .pair .chart svg { min-width: 1000px; }
  :is(.sites, .pinned) tr { display: grid; grid-template-columns: 5.5em 5.5em 1fr;
    border-bottom: 1px solid var(--line); }
  .pinned tr { grid-template-columns: 9.5em 1fr 1fr; } :is(.sites, .pinned) :is(td, th) { border: 0; }
  .sites td.code, .pinned td:last-child { grid-column: 1 / -1; }
  .sites :is(td, th):nth-child(n + 4):not(.code), .pinned th:last-child { display: none; } }
@media print { body { max-width: none; padding: 0; font-size: 11px; } .tools, #readout, .point { display: none; }
  svg, tr, table.budget { break-inside: avoid; } h2, h2 + p, thead, .legend { break-after: avoid; }
  table, td.code { font-size: 10px; } .chart svg { min-width: 0; } * { print-color-adjust: exact; } }
#readout { position: sticky; bottom: 0; background: var(--panel); border-top: 1px solid var(--line); padding: 6px 10px;
  font-family: ui-monospace, monospace; font-size: 13px; min-height: 33px; }
"""
    + _CATEGORY
    + "\n"
)

SCRIPT = """
"use strict";
const all = function (what, inside) { return Array.from((inside || document).querySelectorAll(what)); };
all("th[data-sort]").forEach(function (head) {
  const sort = function () {
    const table = head.closest("table"), body = table.tBodies[0], column = head.cellIndex;
    const down = head.dataset.down !== "1";
    head.dataset.down = down ? "1" : "0";
    const key = function (row) {
      const cell = row.cells[column];
      return cell.dataset.value === undefined ? cell.textContent : Number(cell.dataset.value);
    };
    Array.from(body.rows).sort(function (a, b) {
      const x = key(a), y = key(b);
      const order = typeof x === "number" ? x - y : x.localeCompare(y);
      return down ? -order : order;
    }).forEach(function (row) { body.appendChild(row); });
  };
  head.tabIndex = 0;
  head.addEventListener("click", sort);
  head.addEventListener("keydown", function (press) { if (press.key === "Enter") { sort(); } });
});
const readout = document.getElementById("readout");
const size = function (bytes) {
  const units = [[1073741824, " GiB", 2], [1048576, " MiB", 1], [1024, " KiB", 1]];
  const unit = units.find(function (each) { return bytes >= each[0]; });
  return unit ? (bytes / unit[0]).toFixed(unit[2]) + unit[1] : bytes + " B";
};
all("svg").forEach(function (chart) {
  chart.addEventListener("mousemove", function (move) {
    const title = move.target.querySelector(":scope > title");
    if (title) { readout.textContent = title.textContent; }
  });
});
all("svg.time").forEach(function (chart, number) {
  const data = DATA.filter(function (each) { return each.event.length; })[number];
  const line = chart.querySelector(".pointer"), room = data.width;
  let at = 0;
  const show = function () {
    const x = (data.event[at] - data.first) * room / Math.max(1, data.stop - data.first);
    line.setAttribute("x1", x); line.setAttribute("x2", x);
    const parts = Object.keys(data.bytes).filter(function (name) { return data.bytes[name][at]; });
    const step = data.step[at] < 0 ? "" : ", step " + data.step[at];
    const phase = data.phase[at] ? ", " + data.phase[at] : "";
    const where = "event " + data.event[at].toLocaleString("en") + step + phase;
    readout.textContent = where + ": " + parts.map(function (name) {
        return name + " " + size(data.bytes[name][at]);
      }).join(" · ");
  };
  const to = function (event) {
    at = data.event.findIndex(function (each) { return each >= event; });
    if (at < 0) { at = data.event.length - 1; }
    show();
  };
  chart.addEventListener("mousemove", function (move) {
    const box = chart.getBoundingClientRect(), x = (move.clientX - box.left) / box.width * data.width;
    to(data.first + x / room * (data.stop - data.first));
  });
  chart.addEventListener("keydown", function (press) {
    const by = { ArrowLeft: -1, ArrowRight: 1, Home: -1e9, End: 1e9 }[press.key];
    if (by) { at = Math.max(0, Math.min(data.event.length - 1, at + by)); show(); press.preventDefault(); }
  });
});
const search = document.getElementById("search");
const hint = readout.textContent;
let fits = [];
search.addEventListener("input", function () {
  const word = search.value.toLowerCase();
  const places = all("table.sites tbody tr, table.pinned tbody tr, svg:not(.time) rect");
  fits = places.filter(function (each) { return each.textContent.toLowerCase().includes(word); });
  places.forEach(function (each) { each.classList.add("gone"); });
  fits.forEach(function (each) { each.classList.remove("gone"); });
  const found = fits.length.toLocaleString("en") + " of " + places.length.toLocaleString("en") + " places";
  readout.textContent = word === "" ? hint : found + (fits.length ? ", Enter goes there" : "");
});
document.addEventListener("keydown", function (press) {
  if (press.key === "Enter" && document.activeElement === search && fits.length) {
    fits.push(fits.shift());
    fits[fits.length - 1].scrollIntoView({ block: "center" });
  }
  if (press.key === "/" && document.activeElement !== search) { search.focus(); press.preventDefault(); }
  if (press.key === "Escape") { search.value = ""; search.dispatchEvent(new Event("input")); search.blur(); }
});
"""
