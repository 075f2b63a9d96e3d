// Texts with less contrast to what is behind them than WCAG's 4.5 to 1, and their ratio.
const parse = text => { const [r, g, b, a = 1] = text.match(/[\d.]+/g).map(Number); return [r, g, b, a]; };
const luminance = ([r, g, b]) => [r, g, b].map(v => v / 255)
  .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4).reduce((s, v, i) => s + v * [0.2126, 0.7152, 0.0722][i], 0);
const behind = node => { for (; node; node = node.parentElement) {
  const colour = parse(getComputedStyle(node).backgroundColor); if (colour[3] > 0) return colour; } return [255, 255, 255]; };
const found = {};
for (const node of document.querySelectorAll("body *")) {
  if (!node.checkVisibility() || ![...node.childNodes].some(n => n.nodeType === 3 && n.data.trim())) continue;
  const style = getComputedStyle(node), svg = node instanceof SVGElement;
  const card = svg && node.closest("svg").querySelector("rect");
  const [a, b] = [luminance(parse(svg ? style.fill : style.color)), luminance(card ? parse(getComputedStyle(card).fill) : behind(node))];
  const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  if (ratio < 4.5) found[`${node.tagName}.${node.getAttribute("class")}: ${node.textContent.slice(0, 30)}`] = ratio.toFixed(2);
}
return found;
