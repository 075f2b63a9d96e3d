"use strict";
const rows = [...document.querySelectorAll("#filtered tbody tr")];
const name = document.getElementById("name"), only = document.getElementById("only");
const choices = [...document.querySelectorAll(".choice")];
function show() {
  const wanted = new Set(choices.filter(c => c.checked).map(c => c.value));
  const text = name.value.trim().toLowerCase();
  let n = 0;
  for (const row of rows) {
    const tags = row.dataset.tags.split(" ");
    const yes = tags.some(tag => wanted.has(tag)) && row.dataset.name.includes(text)
      && !(only && only.checked && !tags.includes(only.value));
    row.hidden = !yes;
    n += yes;
  }
  document.getElementById("shown").textContent = `${n} of ${rows.length}`;
}
document.getElementById("filter").hidden = false;
document.getElementById("filter").addEventListener("input", show);
show();
