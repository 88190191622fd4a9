// The page of dmlkit serve. Texts are set as text, never as markup; nothing outside this server is requested.

const state = { token: sessionStorage.getItem("dmlkit-token") || "", info: null, label: null, shown: 0 };
const PAGE = 60;  // images of a label shown at once

const $ = (selector, within = document) => within.querySelector(selector);

function node(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children.filter((child) => child !== null));
  return made;
}

function say(text, isError = false) {
  const line = $("#message");
  line.textContent = text;
  line.classList.toggle("error", isError);
}

async function ask(path, options = {}) {
  const headers = { ...options.headers };
  if (state.token) headers.Authorization = `Bearer ${state.token}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch {
    throw new Error("The server does not answer. Is it still running?");
  }
  if (response.status === 401) {
    $("#login").hidden = false;
    $("#login input").focus();
    throw new Error("This server asks for its token.");
  }
  if (!response.ok) {
    const text = await response.text();
    let message = text;
    try { message = JSON.parse(text).error; } catch { /* not JSON */ }
    throw new Error(message || `status ${response.status}`);
  }
  return response;
}

const get = async (path) => (await ask(path)).json();
const post = async (path, body) => (await ask(path, {
  method: "POST",
  body: body instanceof FormData ? body : JSON.stringify(body),
  headers: body instanceof FormData ? {} : { "Content-Type": "application/json" },
})).json();

function form(files) {
  const data = new FormData();
  for (const file of files) data.append("images", file, file.name || "pasted.png");
  return data;
}

// Do something and show what goes wrong.
async function attempt(busy, work) {
  say(busy);
  try {
    await work();
    if ($("#message").textContent === busy) say("");
  } catch (error) {
    say(error.message, true);
  }
}

const percent = (share) => (share === null ? "" : `${Math.round(100 * share)} %`);
const number = (value) => (value === null ? "none" : Number(value).toPrecision(4));
const plural = (count, one, many) => `${count} ${count === 1 ? one : many}`;

// Pictures are requested with the token, and only when they come into view.
const watcher = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    if (!entry.isIntersecting) continue;
    watcher.unobserve(entry.target);
    load(entry.target);
  }
}, { rootMargin: "200px" });

async function load(image) {
  try {
    const blob = await (await ask(`/v1/images/${encodeURIComponent(image.dataset.id)}`)).blob();
    image.src = URL.createObjectURL(blob);
    image.onload = () => URL.revokeObjectURL(image.src);
  } catch {
    image.alt += " (no picture)";
  }
}

function picture(id, alt) {
  const image = node("img", { alt });
  image.dataset.id = id;
  watcher.observe(image);
  return image;
}

const own = (file) => {
  const image = node("img", { alt: file.name || "pasted photo", src: URL.createObjectURL(file) });
  image.onload = () => URL.revokeObjectURL(image.src);
  return image;
};

function neighborFigure(neighbor) {
  const label = neighbor.label === null ? "no label" : neighbor.label;
  return node("figure", {}, picture(neighbor.id, label),
    node("figcaption", {}, node("strong", { textContent: label }), ` ${number(neighbor.similarity)}`));
}

function shelf(neighbors) {
  return node("div", { className: "shelf" }, ...neighbors.map(neighborFigure));
}

function adding(file, label) {
  if (!state.info.writes || state.info.kind !== "gallery") return null;
  const input = node("input", { value: label, required: true, maxLength: 200 });
  const line = node("form", { className: "row" }, node("label", {}, "Label ", input),
    node("button", { textContent: "Add to the gallery" }));
  line.onsubmit = (event) => {
    event.preventDefault();
    attempt("Adding ...", async () => {
      const done = await post(`/v1/gallery/add?label=${encodeURIComponent(input.value)}`, form([file]));
      say(done.added ? `Added as ${input.value}. History in Gallery can undo it.` : done.messages.join("; "));
      if (done.added) line.remove();
      await refresh();
    });
  };
  return line;
}

const uses = {
  async identify(files, results) {
    const { answers } = await post("/v1/identify", form(files));
    results.replaceChildren(...answers.map((answer, row) => {
      const isUnknown = answer.label !== answer.guess;
      const verdict = isUnknown ? "unknown" : answer.label;
      const guess = isUnknown ? `Best guess: ${answer.guess}. ` : "";
      const detail = [
        answer.probability === null ? null : `Probability ${percent(answer.probability)}`,
        `score ${number(answer.score)}`,
        answer.margin === null ? null : `margin ${number(answer.margin)}`,
      ].filter(Boolean).join(", ");
      return node("article", { className: "answer" }, own(files[row]), node("div", {},
        node("p", { className: isUnknown ? "verdict unknown" : "verdict", textContent: verdict }),
        node("p", { className: "detail", textContent: `${guess}${detail}` }),
        shelf(answer.nearest), adding(files[row], isUnknown ? "" : answer.label)));
    }));
    say(`${plural(answers.length, "photo", "photos")} identified.`);
  },
  async search(files, results) {
    const { queries } = await post(`/v1/search?k=${Number($("#neighbors").value) || 12}`, form(files));
    results.replaceChildren(...queries.map((query, row) =>
      node("article", { className: "answer" }, own(files[row]), shelf(query.nearest))));
    say(`${plural(queries.length, "photo", "photos")} searched.`);
  },
  async compare(files, results) {
    if (files.length !== 2) {
      results.replaceChildren();
      throw new Error(`Choose two photos to compare; got ${files.length}.`);
    }
    const found = await post("/v1/verify", form(files));
    const words = found.same === null ? "No threshold: run dmlkit calibrate RUN to decide" :
      found.same ? "The same" : "Not the same";
    const against = found.threshold === null ? "" : `, threshold ${number(found.threshold)}`;
    results.replaceChildren(
      node("p", { className: found.same ? "verdict same" : "verdict", textContent: words }),
      node("p", { className: "detail", textContent: `Similarity ${number(found.similarity)}${against}` }),
      node("div", { className: "pair" }, own(files[0]), own(files[1])));
    say(words);
  },
};

function take(section, files) {
  const images = [...files].filter((file) => file.type.startsWith("image/"));
  if (!images.length) return say("That is not an image.", true);
  const use = section.dataset.view;
  attempt(`${plural(images.length, "photo", "photos")} sent ...`, () => uses[use](images, $(".results", section)));
}

for (const input of document.querySelectorAll("input[type=file]")) {
  const section = input.closest("section"), zone = input.closest(".drop");
  input.onchange = () => { if (input.files.length) take(section, input.files); };
  zone.ondragover = (event) => { event.preventDefault(); zone.classList.add("over"); };
  zone.ondragleave = () => zone.classList.remove("over");
  zone.ondrop = (event) => {
    event.preventDefault();
    zone.classList.remove("over");
    take(section, event.dataTransfer.files);
  };
}

document.addEventListener("paste", (event) => {
  const section = $("section:not([hidden])");
  if (section && uses[section.dataset.view] && event.clipboardData.files.length) take(section, event.clipboardData.files);
});

async function refresh() {
  state.info = await get("/v1/info");
  const { kind, source, images, labels } = state.info;
  $("#source").textContent = `${kind} ${source}: ${plural(images, "image", "images")}, ${plural(labels, "label", "labels")}`;
}

let counts = {};
function showLabels() {
  const wanted = $("#filter").value.toLowerCase();
  const names = Object.keys(counts).filter((name) => name.toLowerCase().includes(wanted)).slice(0, 500);
  $("#labels").replaceChildren(...names.map((name) => {
    const button = node("button", { textContent: `${name || "without a label"} (${counts[name]})` });
    button.onclick = () => attempt("Loading ...", () => showLabel(name));
    return node("li", {}, button);
  }));
}

async function showLabel(name) {
  state.label = name;
  state.shown = 0;
  $("#shown-label").textContent = `${name || "without a label"}, ${plural(counts[name], "image", "images")}`;
  $("#shown-label").hidden = false;
  $("#images").replaceChildren();
  await showMore();
  $("#shown-label").focus();
}

async function showMore() {
  const query = new URLSearchParams({ label: state.label, offset: state.shown, count: PAGE });
  const { images } = await get(`/v1/gallery/images?${query}`);
  state.shown += images.length;
  $("#images").append(...images.map(({ id, path }) => {
    const name = path.split("/").pop();
    const figure = node("figure", {}, picture(id, name), node("figcaption", { textContent: name }));
    if (state.info.writes && state.info.kind === "gallery") {
      const button = node("button", { textContent: "Remove", ariaLabel: `Remove ${name}` });
      button.onclick = () => attempt("Removing ...", async () => {
        await post("/v1/gallery/remove", { ids: [id] });
        figure.remove();
        await showGallery();
        say(`Removed ${name}. History below can undo it.`);
      });
      figure.append(button);
    }
    return figure;
  }));
  $("#more").hidden = state.shown >= (counts[state.label] || 0);
}
$("#more").onclick = () => attempt("Loading ...", showMore);
$("#filter").oninput = showLabels;

async function showGallery() {
  await refresh();
  counts = (await get("/v1/gallery/labels")).labels;
  showLabels();
  const isGallery = state.info.kind === "gallery";
  $("#history").hidden = !isGallery;
  if (!isGallery) return;
  const { versions } = await get("/v1/gallery/versions");
  const newest = versions.length ? versions[versions.length - 1].version : 0;
  $("#versions").replaceChildren(...versions.reverse().slice(0, 50).map(({ version, time, images }) => {
    const line = node("li", {}, `Version ${version}, ${new Date(time).toLocaleString()}, ${plural(images, "image", "images")}`);
    if (state.info.writes && version !== newest) {
      const button = node("button", { textContent: "Restore", ariaLabel: `Restore version ${version}` });
      button.onclick = () => attempt("Restoring ...", async () => {
        await post("/v1/gallery/restore", { version });
        $("#images").replaceChildren();
        $("#shown-label").hidden = true;
        $("#more").hidden = true;
        await showGallery();
        say(`Restored version ${version}.`);
      });
      line.append(button);
    }
    return line;
  }));
}

function route() {
  const wanted = location.hash.slice(1);
  const view = $(`section[data-view="${CSS.escape(wanted)}"]`) ? wanted : "identify";
  for (const section of document.querySelectorAll("section")) section.hidden = section.dataset.view !== view;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#${view}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (view === "gallery") attempt("Loading ...", showGallery);
  else say("");
}
addEventListener("hashchange", () => { if (location.hash !== "#main") route(); });

$("#login").onsubmit = (event) => {
  event.preventDefault();
  state.token = $("#login input").value;
  sessionStorage.setItem("dmlkit-token", state.token);
  $("#login").hidden = true;
  start();
};

function start() {
  attempt("Loading ...", async () => { await refresh(); route(); });
}
start();
