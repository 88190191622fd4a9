"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const at = (id) => document.getElementById(id);
const PAGE = 200;  // rows of the table at once: 11 000 classes would take a second

function classTable({ head, rows }) {
  const table = at("class-table"), filter = at("filter"), more = at("more");
  if (!table || !head.length) return;
  let by = head.length - 2, up = true, shown = PAGE;
  const header = table.createTHead().insertRow(), body = table.createTBody();
  const isNumber = (column) => column > 0 && column < head.length - 1;
  head.forEach((name, column) => {
    const cell = document.createElement("th"), button = document.createElement("button");
    cell.scope = "col";
    cell.className = isNumber(column) ? "number" : "";
    button.type = "button";
    button.textContent = name;
    button.addEventListener("click", () => { up = by === column ? !up : true; by = column; draw(); });
    cell.append(button);
    header.append(cell);
  });
  function compare(one, other) {
    return isNumber(by) ? one[by] - other[by] : String(one[by]).localeCompare(String(other[by]));
  }
  function draw() {
    const wanted = filter.value.toLowerCase();
    const kept = rows.filter((row) => !wanted || row[0].toLowerCase().includes(wanted));
    kept.sort((one, other) => (up ? 1 : -1) * compare(one, other));
    [...header.cells].forEach((cell, column) => {
      if (column === by) cell.setAttribute("aria-sort", up ? "ascending" : "descending");
      else cell.removeAttribute("aria-sort");
      cell.firstChild.textContent = head[column] + (column === by ? (up ? " ▲" : " ▼") : "");
    });
    body.replaceChildren(...kept.slice(0, shown).map((row) => {
      const line = document.createElement("tr");
      row.forEach((value, column) => {
        const cell = line.insertCell();
        cell.textContent = isNumber(column) && column > 1 ? value.toFixed(4) : value;
        if (isNumber(column)) cell.className = "number";
      });
      return line;
    }));
    more.hidden = kept.length <= shown;
    at("shown").textContent = `${Math.min(shown, kept.length)} of ${kept.length} classes shown`;
  }
  filter.addEventListener("input", () => { shown = PAGE; draw(); });
  more.addEventListener("click", () => { shown += PAGE; draw(); });
  draw();
}

function embeddingMap({ planes, labels, names, paths, pictures }) {
  const canvas = at("embedding-map"), brush = canvas.getContext("2d"), plane = at("plane"), highlight = at("highlight");
  const dark = matchMedia("(prefers-color-scheme: dark)");
  let view = { x: 2047, y: 2047, zoom: 1 }, picked = -1, drag = null;
  const color = (label) => {
    const hue = label < 0 ? 0 : (label * 137.508) % 360, light = dark.matches ? 65 : 42;  // the golden angle
    return `hsl(${hue} ${label < 0 ? 0 : 70}% ${light}%)`;
  };
  const points = () => planes[plane.value];
  const scale = () => view.zoom * Math.min(canvas.clientWidth, canvas.clientHeight) / 4400;
  const place = (row) => {
    const [x, y] = points(), factor = scale();
    return [(x[row] - view.x) * factor + canvas.clientWidth / 2, (y[row] - view.y) * factor + canvas.clientHeight / 2];
  };
  const chosen = () => {
    const wanted = highlight.value.toLowerCase();
    return wanted ? new Set(names.flatMap((name, code) => name.toLowerCase().includes(wanted) ? [code] : [])) : null;
  };
  function draw() {
    const ratio = devicePixelRatio || 1, wide = canvas.clientWidth, high = canvas.clientHeight;
    canvas.width = wide * ratio;
    canvas.height = high * ratio;
    brush.setTransform(ratio, 0, 0, ratio, 0, 0);
    const only = chosen(), radius = Math.min(6, (labels.length > 5000 ? 1.5 : 3) * Math.sqrt(Math.max(1, view.zoom)));
    if (plane.value === "disk") {  // its boundary, infinitely far away
      const factor = scale(), center = [view.x, view.y].map((from) => (2047.5 - from) * factor);
      brush.strokeStyle = getComputedStyle(canvas).color;
      brush.beginPath();
      brush.arc(center[0] + wide / 2, center[1] + high / 2, 2047.5 * factor, 0, 2 * Math.PI);
      brush.stroke();
    }
    for (const front of only ? [false, true] : [true]) {
      for (let row = 0; row < labels.length; row++) {
        if (only && only.has(labels[row]) !== front) continue;
        const [x, y] = place(row);
        if (x < -9 || y < -9 || x > wide + 9 || y > high + 9) continue;
        brush.globalAlpha = front ? 0.8 : 0.12;
        brush.fillStyle = color(labels[row]);
        brush.fillRect(x - radius, y - radius, 2 * radius, 2 * radius);
      }
    }
    brush.globalAlpha = 1;
    if (picked >= 0) {
      const [x, y] = place(picked);
      brush.strokeStyle = getComputedStyle(canvas).color;
      brush.lineWidth = 2;
      brush.strokeRect(x - radius - 3, y - radius - 3, 2 * radius + 6, 2 * radius + 6);
    }
  }
  function pick(x, y, reach) {
    let best = reach * reach, found = -1;
    for (let row = 0; row < labels.length; row++) {
      const [left, top] = place(row), squared = (left - x) ** 2 + (top - y) ** 2;
      if (squared < best) { best = squared; found = row; }
    }
    if (found === picked) return;
    picked = found;
    tell();
    draw();
  }
  function tell() {
    const under = at("under");
    under.replaceChildren();
    if (picked < 0) return;
    const text = document.createElement("div");
    if (pictures[picked]) {
      const image = new Image();
      image.alt = "";
      image.src = `data:image/jpeg;base64,${pictures[picked]}`;
      under.append(image);
    }
    for (const line of [labels[picked] < 0 ? "no label" : names[labels[picked]], paths[picked]]) {
      const part = document.createElement("div");
      part.textContent = line;
      text.append(part);
    }
    under.append(text);
  }
  function zoom(factor, x = canvas.clientWidth / 2, y = canvas.clientHeight / 2) {
    const before = scale();
    view.zoom = Math.min(200, Math.max(0.5, view.zoom * factor));
    const moved = 1 / before - 1 / scale();
    view.x += (x - canvas.clientWidth / 2) * moved;
    view.y += (y - canvas.clientHeight / 2) * moved;
    draw();
  }
  const reset = () => { view = { x: 2047, y: 2047, zoom: 1 }; draw(); };
  const middle = () => pick(canvas.clientWidth / 2, canvas.clientHeight / 2, Infinity);
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    zoom(Math.exp(-event.deltaY / 300), event.offsetX, event.offsetY);
  }, { passive: false });
  canvas.addEventListener("pointerdown", (event) => {
    drag = [event.clientX, event.clientY];
    canvas.setPointerCapture(event.pointerId);
  });
  for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, () => { drag = null; });
  canvas.addEventListener("pointermove", (event) => {
    if (!drag) return pick(event.offsetX, event.offsetY, 20);
    view.x -= (event.clientX - drag[0]) / scale();
    view.y -= (event.clientY - drag[1]) / scale();
    drag = [event.clientX, event.clientY];
    return draw();
  });
  canvas.addEventListener("click", (event) => pick(event.offsetX, event.offsetY, 20));
  canvas.addEventListener("keydown", (event) => {
    const step = 40 / scale();
    const moves = { ArrowLeft: [-step, 0], ArrowRight: [step, 0], ArrowUp: [0, -step], ArrowDown: [0, step] };
    if (event.key in moves) {
      view.x += moves[event.key][0];
      view.y += moves[event.key][1];
      draw();
    } else if (event.key === "+" || event.key === "=") zoom(1.4);
    else if (event.key === "-") zoom(1 / 1.4);
    else if (event.key === "0") reset();
    else return;
    event.preventDefault();
    middle();
  });
  at("closer").addEventListener("click", () => zoom(1.4));
  at("farther").addEventListener("click", () => zoom(1 / 1.4));
  at("whole").addEventListener("click", reset);
  plane.addEventListener("change", reset);
  highlight.addEventListener("input", draw);
  dark.addEventListener("change", draw);
  new ResizeObserver(draw).observe(canvas);
  draw();
}

classTable(data.classes);
embeddingMap(data);
