"use strict";
// The table of operations: search, filters, groups and sorting.

const COLUMNS = [
  { key: "primitive", title: "operation" },
  { key: "count", title: "×", number: String },
  { key: "arithmetic", title: "runs in", chip: true },
  { key: "types", title: "types" },
  { key: "flops", title: "FLOPs", number: thousands },
  { key: "bytes", title: "bytes", number: storage },
  { key: "saved", title: "saved", number: storage },
  { key: "runs", title: "runs", number: String },
  { key: "way", title: "way" },
  { key: "scope", title: "scope" },
  { key: "at", title: "line" },
  { key: "reason", title: "why" },
];
const LEFT = 4; // columns before the first sum
const FILTERS = ["kind", "arithmetic", "guard", "way"];
const SUMS = ["flops", "bytes", "saved"];

const byId = (id) => document.getElementById(id);
const rows = JSON.parse(byId("data").textContent);
for (const row of rows) {
  row.at = row.file ? `${row.file}:${row.line}` : "";
  row.where = [row.module, row.at.split(/[\\/]/).pop()].filter(Boolean).join(" · ");
  row.words = Object.values(row).join(" ").toLowerCase();
}
const shut = new Set(); // groups that are folded away
const FEW = 300; // lines that are drawn at once; the rest on request
let limit = FEW;
let sorting = { key: "flops", down: true };

function thousands(n) {
  const letters = ["", "k", "M", "G", "T", "P"];
  let at = 0;
  while (Math.abs(n) >= 999.5 && at < letters.length - 1) { n /= 1000; at += 1; }
  return `${at ? Number(n.toPrecision(3)) : n} ${letters[at]}`.trim();
}

function storage(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (Math.abs(n) >= 1024 && at < units.length - 1) { n /= 1024; at += 1; }
  return `${at ? n.toFixed(1) : n} ${units[at]}`;
}

function element(name, options = {}, ...children) {
  const made = Object.assign(document.createElement(name), options);
  made.append(...children);
  return made;
}

function cell(row, column) {
  const value = row[column.key];
  if (column.number) return element("td", { className: "number" }, column.number(value));
  if (column.chip) return precision(row);
  const made = element("td", { className: column.key }, value);
  if (column.key === "primitive") made.append(element("small", {}, row.kind));
  if (column.key === "at") {
    made.replaceChildren(element("span", { title: value }, value.split(/[\\/]/).pop()));
    made.append(element("span", { className: "text", title: row.text }, row.text));
  }
  if (column.key === "reason" && row.guard) made.append(` [${row.guard}]`);
  return made;
}

function precision(row) {
  const made = element("td", {}, element("span", { className: `chip back-${row.family}` }, row.arithmetic));
  const more = [row.stored !== row.arithmetic ? `stored ${row.stored}` : "",
    row.inside && row.inside !== row.arithmetic ? `inside ${row.inside}` : ""].filter(Boolean);
  if (more.length) made.append(element("small", {}, more.join(", ")));
  return made;
}

function line(row) {
  return element("tr", { className: row.runs ? "" : "idle" }, ...COLUMNS.map((c) => cell(row, c)));
}

function heading(name, members) {
  const sums = Object.fromEntries(SUMS.map((k) => [k, total(members, k)]));
  const first = element("td", { colSpan: LEFT }, name || "(none)");
  for (const row of new Map(members.map((row) => [row.arithmetic, row])).values()) {
    first.append(" ", element("span", { className: `chip back-${row.family}` }, row.arithmetic));
  }
  const count = total(members, "count");
  first.append(element("small", {}, `${count} operation${count === 1 ? "" : "s"}`));
  if (["where", "at"].includes(byId("group").value)) first.append(element("span", { className: "text" }, members[0].text));
  const rest = COLUMNS.slice(LEFT).map((c) =>
    element("td", { className: "number" }, c.key in sums ? c.number(sums[c.key]) : ""));
  const made = element("tr", { className: shut.has(name) ? "group shut" : "group" }, first, ...rest);
  made.addEventListener("click", () => {
    if (!shut.delete(name)) shut.add(name);
    draw();
  });
  return made;
}

function total(members, key) {
  return members.reduce((sum, row) => sum + row[key], 0);
}

function compareGroups([, a], [, b]) {
  if (!SUMS.includes(sorting.key)) return 0;
  return (total(a, sorting.key) - total(b, sorting.key)) * (sorting.down ? -1 : 1);
}

function compare(a, b) {
  const [x, y] = [a[sorting.key], b[sorting.key]];
  const order = typeof x === "number" ? x - y : String(x).localeCompare(String(y));
  return sorting.down ? -order : order;
}

function wanted() {
  const words = byId("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  return rows.filter((row) =>
    FILTERS.every((key) => !byId(key).value || row[key] === byId(key).value) &&
    words.every((word) => row.words.includes(word)));
}

function rest(count) {
  const button = element("button", { type: "button" }, `show ${count} more`);
  button.addEventListener("click", () => {
    limit = Infinity;
    draw();
  });
  return element("tr", { className: "rest" }, element("td", { colSpan: COLUMNS.length }, button));
}

function draw() {
  const found = wanted().sort(compare);
  const key = byId("group").value;
  const body = [];
  if (key) {
    for (const [name, members] of [...Map.groupBy(found, (row) => row[key])].sort(compareGroups)) {
      body.push(heading(name, members));
      if (!shut.has(name)) body.push(...members.map(line));
    }
  } else {
    body.push(...found.slice(0, limit).map(line));
    if (found.length > limit) body.push(rest(found.length - limit));
  }
  document.querySelector("#operations tbody").replaceChildren(...body);
  byId("count").textContent = `${total(found, "count")} of ${total(rows, "count")}`;
  document.querySelectorAll("#operations th").forEach((th) => {
    const order = sorting.down ? "descending" : "ascending";
    th.setAttribute("aria-sort", th.dataset.key === sorting.key ? order : "none");
  });
}

function fold() {
  const key = byId("group").value;
  shut.clear();
  if (key === "where" || rows.length > FEW) for (const row of rows) shut.add(row[key]);
}

function start() {
  for (const column of COLUMNS) {
    const button = element("button", { type: "button" }, column.title);
    button.addEventListener("click", () => {
      const down = column.key === sorting.key ? !sorting.down : Boolean(column.number);
      sorting = { key: column.key, down };
      draw();
    });
    const th = element("th", { className: column.number ? "number" : "" }, button);
    th.dataset.key = column.key;
    document.querySelector("#operations thead tr").append(th);
  }
  for (const key of FILTERS) {
    const values = [...new Set(rows.map((row) => row[key]))].filter(Boolean).sort();
    byId(key).append(...values.map((value) => element("option", { value }, value)));
    byId(key).addEventListener("change", draw);
  }
  byId("search").addEventListener("input", draw);
  byId("group").addEventListener("change", () => {
    fold();
    draw();
  });
  byId("theme").addEventListener("click", () => {
    const themes = ["auto", "light", "dark"];
    const now = document.documentElement.dataset.theme || "auto";
    const next = themes[(themes.indexOf(now) + 1) % themes.length];
    document.documentElement.dataset.theme = next;
    byId("theme").textContent = `theme: ${next}`;
  });
  fold();
  draw();
}

start();
