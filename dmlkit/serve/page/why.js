// Why two images are similar: a heat map of how much each patch is needed, and lines between the strongest pairs.

import { $, attempt, node, number, post } from "./core.js";

const SVG = "http://www.w3.org/2000/svg";
const GAP = 8;  // percent of a side, between the images

function shape(tag, attributes) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

function draw(found) {
  const [rows, columns] = found.grid, most = Math.max(...found.heat.flat().map(Math.abs)) || 1;
  const left = [0, 100 + GAP];
  const picture = shape("svg", { viewBox: `0 0 ${200 + GAP} 100`, role: "img", "aria-label": "heat maps of both images" });
  found.images.forEach((image, side) => {
    const box = { x: left[side], y: 0, width: 100, height: 100, preserveAspectRatio: "none" };
    picture.append(shape("image", { ...box, href: `data:image/jpeg;base64,${image}` }));
    found.heat[side].forEach((value, patch) => picture.append(shape("rect", {
      x: left[side] + (patch % columns) * 100 / columns, y: Math.floor(patch / columns) * 100 / rows,
      width: 100 / columns, height: 100 / rows,
      fill: value > 0 ? "#d7301f" : "#2166ac", "fill-opacity": 0.5 * Math.abs(value) / most,
    })));
  });
  const center = (patch, side) => [left[side] + (patch % columns + .5) * 100 / columns,
    (Math.floor(patch / columns) + .5) * 100 / rows];
  for (const { a, b } of found.pairs) {
    const [[x1, y1], [x2, y2]] = [center(a, 0), center(b, 1)];
    for (const [stroke, width] of [["#000", 1.4], ["#fff", .6]]) {
      picture.append(shape("line", { x1, y1, x2, y2, stroke, "stroke-width": width, "stroke-linecap": "round" }));
    }
  }
  return picture;
}

export async function explain(path, body) {
  const found = await post(path, body);
  const place = (patch) => `row ${Math.floor(patch / found.grid[1]) + 1}, column ${patch % found.grid[1] + 1}`;
  $("#why-pair").replaceChildren(draw(found));
  $("#why-title").textContent = `${found.similarity.replaceAll("_", " ")} ${number(found.score)}`;
  $("#why-list").replaceChildren(...found.pairs.map(({ a, b, contribution }) => node("li", {
    textContent: `${contribution.toPrecision(2)}: ${place(a)} of the first, ${place(b)} of the second`,
  })));
  $("#why").showModal();
  $("#why-title").focus();
}

export function whyButton(name, work) {
  const button = node("button", { type: "button", textContent: "Why?", ariaLabel: `Why is it similar to ${name}?` });
  button.onclick = () => attempt("Comparing patches ...", work);
  return button;
}
