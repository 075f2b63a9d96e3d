"use strict";
// Filters, sorts and copies. Without it the page is whole: every row is there, in the report's order.
const all = (selector, root = document) => [...root.querySelectorAll(selector)];
const make = (tag, properties) => Object.assign(document.createElement(tag), properties);
const words = text => text.toLowerCase().split(/\s+/).filter(Boolean);
const UNITS = { "µs": 1e-6, ms: 1e-3, s: 1, min: 60, h: 3600, KiB: 2 ** 10, MiB: 2 ** 20, GiB: 2 ** 30 };

// 3.2 ms, 1,024, 4e-05 and NaN as numbers that can be compared; a dash is less than any.
function figure(text) {
  if (/^\s*(nan|inf)/i.test(text)) return Infinity;
  const found = text.replaceAll(",", "").match(/(-?\d+(?:\.\d+)?(?:e[+-]?\d+)?)\s*(\S*)/i);
  return found ? Number(found[1]) * (UNITS[found[2]] ?? 1) : -Infinity;
}

function table(box) {
  const body = box.querySelector("tbody"), tools = box.querySelector(".tools");
  const rows = all("tbody tr", box), heads = all("th", box.querySelector("thead"));
  // Sorted or filtered, all rows are one table.
  const merge = () => { for (const rest of all(".rest", box)) { body.append(...all("tbody tr", rest)); rest.remove(); } };
  if (rows.length > 1) heads.forEach((head, column) => {
    const button = make("button", { type: "button", className: "sort" });
    button.append(...[...head.childNodes].filter(node => !node.classList?.contains("help")));
    head.prepend(button);
    button.addEventListener("click", () => {
      const numbers = head.classList.contains("n");
      const down = head.ariaSort ? head.ariaSort === "ascending" : numbers;
      heads.forEach(other => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      merge();
      const key = row => numbers ? figure(row.cells[column].textContent) : row.cells[column].textContent;
      const order = numbers ? (a, b) => (a < b ? -1 : a > b ? 1 : 0) : new Intl.Collator("en", { numeric: true }).compare;
      const keyed = rows.map(row => [key(row), row]).sort((a, b) => (down ? -1 : 1) * order(a[0], b[0]));
      body.append(...keyed.map(([, row]) => row));
    });
  });
  if (!tools) return;
  const texts = rows.map(row => row.textContent.toLowerCase());
  const show = () => {
    merge();
    const wanted = words(tools.querySelector(".search").value), only = tools.querySelector(".only");
    const choices = all(".choice", tools), chosen = new Set(choices.filter(c => c.checked).map(c => c.value));
    let n = 0;
    rows.forEach((row, i) => {
      const tags = (row.dataset.tags ?? "").split(" ");
      const yes = wanted.every(word => texts[i].includes(word)) && !(only?.checked && !tags.includes(only.value))
        && (!choices.length || tags.some(tag => chosen.has(tag)));
      row.hidden = !yes;
      n += yes;
    });
    tools.querySelector("output").textContent = `${n} of ${rows.length}`;
  };
  tools.hidden = false;
  tools.addEventListener("input", show);
}

function findings(tools) {
  // A call that is shown alone, such as the first divergence, is no finding of its own.
  const articles = all("article"), named = articles.filter(article => article.dataset.facets !== "[]");
  const entries = named.length ? named : articles, selects = new Map(), ranks = new Set();
  const facets = entries.map(entry => new Map(JSON.parse(entry.dataset.facets)));
  const orders = entries.map(entry => new Map(JSON.parse(entry.dataset.ranks)));
  const texts = entries.map(entry => entry.textContent.toLowerCase());
  const places = entries.map(entry => entry.parentNode), sort = tools.querySelector("select.sort");
  const counts = new Map();
  facets.forEach(facet => facet.forEach((values, name) => {
    const seen = counts.get(name) ?? counts.set(name, new Map()).get(name);
    values.forEach(value => seen.set(value, (seen.get(value) ?? 0) + 1));
  }));
  counts.forEach((seen, name) => {
    if (seen.size < 2) return;
    const select = make("select", {}), label = make("label", { textContent: `${name} ` });
    select.append(make("option", { value: "", textContent: "all" }));
    const values = [...seen].sort((a, b) => b[1] - a[1] || a[0].localeCompare(b[0], "en", { numeric: true }));
    for (const [value, n] of values.slice(0, 500)) select.append(make("option", { value, textContent: `${value} (${n})` }));
    select.name = name;
    label.append(select);
    tools.querySelector(".facets").append(label, " ");
    selects.set(name, select);
  });
  orders.forEach(order => order.forEach((_, name) => ranks.add(name)));
  ranks.forEach(name => sort.append(make("option", { value: name, textContent: name })));
  if (!ranks.size) sort.parentNode.hidden = true;
  const show = () => {
    const wanted = words(tools.querySelector(".search").value);
    const chosen = [...selects].filter(([, select]) => select.value);
    let n = 0;
    entries.forEach((entry, i) => {
      const yes = wanted.every(word => texts[i].includes(word))
        && chosen.every(([name, select]) => facets[i].get(name)?.includes(select.value));
      entry.hidden = !yes;
      n += yes;
    });
    const narrowed = n < entries.length;
    for (const rest of all(".entries > .rest")) rest.open = narrowed || !!sort.value;
    for (const section of all("main > section")) {
      const inside = all("article", section);
      if (inside.length) section.hidden = inside.every(entry => entry.hidden);
    }
    tools.querySelector("output").textContent = narrowed ? `${n} of ${entries.length}` : "";
  };
  const order = () => {
    const key = i => orders[i].get(sort.value) ?? -Infinity;
    const numbers = entries.map((_, i) => i);
    if (sort.value) numbers.sort((a, b) => key(b) - key(a) || a - b);
    // Each list keeps its place for the entries; what follows them, such as "… and 8 more", stays behind them.
    const next = new Map();
    for (const i of numbers) {
      const list = places[i], after = next.get(list) ?? next.set(list, all(":scope > :not(article):not(summary)", list)[0] ?? null).get(list);
      list.insertBefore(entries[i], after);
    }
    show();
  };
  tools.addEventListener("input", event => (event.target === sort ? order() : show()));
  tools.querySelector(".clear").addEventListener("click", () => {
    tools.querySelector(".search").value = "";
    selects.forEach(select => { select.value = ""; });
    sort.value = "";
    order();
  });
  tools.hidden = false;
  return () => tools.querySelector(".clear").click();
}

async function copy(button) {
  const text = button.parentNode.querySelector("code").textContent.trim();
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = make("textarea", { value: text });
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  button.textContent = "copied";
  setTimeout(() => { button.textContent = "copy"; }, 2000);
}

all(".table").forEach(table);
const tools = document.querySelector(".tools#findings"), clear = tools ? findings(tools) : () => {};

// A link leads into what is folded or filtered away.
function reveal() {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (!target) return;
  if (target.closest("[hidden]")) clear();
  for (let node = target; node; node = node.parentElement) if (node.tagName === "DETAILS") node.open = true;
  for (const details of all(":scope > details", target)) details.open = true;
  target.scrollIntoView();
}
addEventListener("hashchange", reveal);
if (location.hash) reveal();

const fold = document.getElementById("fold");
if (fold) {
  fold.hidden = false;
  fold.addEventListener("click", () => {
    const open = fold.textContent === "Expand all";
    for (const details of all("section > details, article > details")) details.open = open;
    fold.textContent = open ? "Collapse all" : "Expand all";
  });
}

const tip = document.getElementById("tip");
document.addEventListener("click", event => {
  const button = event.target.closest("button.copy"), help = event.target.closest("a.help");
  if (button) copy(button);
  if (!help || !tip.showPopover) return;
  event.preventDefault();
  tip.textContent = document.getElementById(help.hash.slice(1)).textContent;
  tip.showPopover();
  const at = help.getBoundingClientRect();
  tip.style.left = `${Math.max(8, Math.min(at.left, innerWidth - tip.offsetWidth - 8))}px`;
  tip.style.top = `${at.bottom + tip.offsetHeight + 12 < innerHeight ? at.bottom + 6 : Math.max(8, at.top - tip.offsetHeight - 6)}px`;
});
for (const button of all("button.copy")) button.hidden = false;
document.addEventListener("keydown", event => {
  if (event.key !== "/" || event.target.matches("input, select, textarea")) return;
  event.preventDefault();
  document.querySelector(".tools:not([hidden]) .search")?.focus();
});
