"""The page's style and its two small scripts: sorting tables, and a readout of what is under the pointer."""

from __future__ import annotations

from memtrace.render.words import COLOUR

_CATEGORY = "\n".join(f".{name} {{ fill: {colour}; background-color: {colour}; }}" for name, colour in COLOUR.items())

STYLE = (
    """
:root { color-scheme: light dark; --ink: #1d2126; --soft: #68707a; --line: #d9dde2; --paper: #fff; --panel: #f6f7f9; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e7eb; --soft: #98a1ab; --line: #363c44; --paper: #16191d; --panel: #1e2227; }
}
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 1180px;
  margin: 0 auto; padding: 24px; overflow-wrap: anywhere; }
h1 { font-size: 22px; margin: 0; }
h2 { font-size: 17px; margin: 32px 0 8px; }
p, ul { margin: 4px 0; }
.soft { color: var(--soft); }
.verdict { background: var(--panel); border-left: 4px solid #D55E00; padding: 10px 14px; margin: 14px 0; }
.warning { color: #a15c00; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { text-align: left; padding: 3px 8px; border-bottom: 1px solid var(--line); vertical-align: top; }
th, #budget td { overflow-wrap: normal; }
#budget td:first-child, .kind { white-space: nowrap; }
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
svg text { fill: var(--soft); font-size: 11px; font-family: system-ui, sans-serif; }
.grid { stroke: var(--line); stroke-width: 1; }
.curve { fill: none; stroke: var(--ink); stroke-width: 1; }
.mark { stroke: #c00; stroke-width: 1.5; }
.chosen { stroke: var(--ink); stroke-width: 1; stroke-dasharray: 3 3; }
.free { fill: var(--paper); }
.pending_free { fill: #b9a; }
.frame { stroke: var(--soft); stroke-width: .6; }
.phase-load { fill: #c9d3de; } .phase-forward { fill: #8fc1a9; } .phase-backward { fill: #d9a7a0; }
.phase-optimizer { fill: #c3a6d4; } .phase-between { fill: #ddd; } .phase-evaluation { fill: #9dbbdd; }
.phase-generation { fill: #d8cf8a; }
#readout { position: sticky; bottom: 0; background: var(--panel); border-top: 1px solid var(--line); padding: 6px 10px;
  font-family: ui-monospace, monospace; font-size: 13px; min-height: 33px; }
"""
    + _CATEGORY
    + "\n"
)

SCRIPT = """
"use strict";
document.querySelectorAll("th[data-sort]").forEach(function (head) {
  head.addEventListener("click", function () {
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
  });
});
const readout = document.getElementById("readout");
document.querySelectorAll("svg").forEach(function (chart) {
  chart.addEventListener("mousemove", function (move) {
    const title = move.target.querySelector(":scope > title");
    if (title) { readout.textContent = title.textContent; }
  });
});
"""
