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
