// The page of dmlkit serve. Nothing outside this server is requested.

import { $, attempt, form, get, node, number, own, percent, picture, plural, post, say, state } from "./core.js";
import { explain, whyButton } from "./why.js";
import { showReview } from "./review.js";

const PAGE = 60;  // images of a label shown at once
const LABELS = 500, VERSIONS = 50;  // listed at most

function neighborFigure(neighbor, file) {
  const label = neighbor.label === null ? "no label" : neighbor.label;
  return node("figure", {}, picture(neighbor.id, label),
    node("figcaption", {}, node("strong", { textContent: label }), ` ${number(neighbor.similarity)}`),
    whyButton(label, () => explain(`/v1/why?id=${encodeURIComponent(neighbor.id)}`, form([file]))));
}

function shelf(neighbors, file) {
  return node("div", { className: "shelf" }, ...neighbors.map((neighbor) => neighborFigure(neighbor, file)));
}

function adding(file, label) {
  if (!state.info.writes || state.info.kind !== "gallery") return null;
  const input = node("input", { value: label, required: true });
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
        shelf(answer.nearest, files[row]), adding(files[row], isUnknown ? "" : answer.label)));
    }));
    return `${plural(answers.length, "photo", "photos")} identified.`;
  },
  async search(files, results) {
    const count = $("#neighbors");
    if (!count.validity.valid) throw new Error(`Neighbors per photo: expected a whole number from ${count.min} to ${count.max}.`);
    const { queries } = await post(`/v1/search?k=${count.valueAsNumber}`, form(files));
    results.replaceChildren(...queries.map((query, row) =>
      node("article", { className: "answer" }, own(files[row]), shelf(query.nearest, files[row]))));
    return `${plural(queries.length, "photo", "photos")} searched.`;
  },
  async compare(files, results) {
    if (files.length !== 2) {
      results.replaceChildren();
      throw new Error(`Choose two photos to compare; got ${files.length}.`);
    }
    const found = await post("/v1/verify", form(files));
    const similarity = `Similarity ${number(found.similarity)}`;
    const words = found.same === null ? similarity : found.same ? "The same" : "Not the same";
    const detail = found.same === null ?
      `To learn which similarity means the same, run: dmlkit calibrate ${state.info.run ?? "RUN"}` :
      `${similarity}, threshold ${number(found.threshold)}`;
    results.replaceChildren(
      node("p", { className: found.same ? "verdict same" : "verdict", textContent: words }),
      node("p", { className: "detail", textContent: detail }),
      node("div", { className: "pair" }, own(files[0]), own(files[1])),
      whyButton("these photos", () => explain("/v1/why", form(files))));
    return `${words}.`;
  },
};

function take(section, files) {
  const images = [...files].filter((file) => file.type.startsWith("image/"));
  if (!images.length) return say("That is not an image.", true);
  const use = section.dataset.view, others = files.length - images.length;
  const leftOut = others ? ` ${plural(others, "file that is no image was", "files that are no images were")} left out.` : "";
  attempt(`${plural(images.length, "photo", "photos")} sent ...`, async () => {
    const done = `${await uses[use](images, $(".results", section))}${leftOut}`;
    if (!section.hidden) say(done);  // in another view it would seem to be about that one
  });
}

for (const input of document.querySelectorAll("input[type=file]")) {
  const section = input.closest("section"), zone = input.closest(".drop");
  input.onclick = () => { input.value = ""; };  // so that the same photo can be chosen again
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
  $("nav a[href='#review']").hidden = !state.info.review;
  $("#source").textContent = `${kind} ${source}: ${plural(images, "image", "images")}, ${plural(labels, "label", "labels")}`;
}

let counts = {};
function showLabels() {
  const wanted = $("#filter").value.toLowerCase();
  const names = Object.keys(counts).filter((name) => name.toLowerCase().includes(wanted));
  const unlisted = Math.max(0, names.length - LABELS);
  $("#unlisted").hidden = !unlisted;
  $("#unlisted").textContent = `${plural(unlisted, "more label", "more labels")}; type a part of a name to list fewer.`;
  $("#labels").replaceChildren(...names.slice(0, LABELS).map((name) => {
    const button = node("button", { textContent: `${name || "without a label"} (${counts[name]})` });
    button.onclick = () => attempt("Loading ...", () => showLabel(name));
    return node("li", {}, button);
  }));
}

function showCount() {
  const name = state.label;
  $("#shown-label").textContent = `${name || "without a label"}, ${plural(counts[name] || 0, "image", "images")}`;
}

async function showLabel(name) {
  state.label = name;
  showCount();
  $("#shown-label").hidden = false;
  $("#images").replaceChildren();
  await showMore();
  $("#shown-label").focus();
}

async function showMore() {
  const figures = $("#images");
  const query = new URLSearchParams({ label: state.label, offset: figures.children.length, count: PAGE });
  const { images } = await get(`/v1/gallery/images?${query}`);
  figures.append(...images.map(({ id, path }) => {
    const name = path.split("/").pop();
    const figure = node("figure", {}, picture(id, name), node("figcaption", { textContent: name }));
    if (state.info.writes && state.info.kind === "gallery") {
      const button = node("button", { textContent: "Remove", ariaLabel: `Remove ${name}` });
      button.onclick = () => attempt("Removing ...", async () => {
        await post("/v1/gallery/remove", { ids: [id] });
        figure.remove();
        await showGallery();
        showCount();
        say(`Removed ${name}. History below can undo it.`);
      });
      figure.append(button);
    }
    return figure;
  }));
  $("#more").hidden = figures.children.length >= (counts[state.label] || 0);
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
  const unlisted = versions.length - VERSIONS;
  $("#versions").replaceChildren(...versions.reverse().slice(0, VERSIONS).map(({ version, time, images }) => {
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
  if (unlisted > 0) {
    const older = plural(unlisted, "older version", "older versions");
    $("#versions").append(node("li", {}, `${older}: dmlkit gallery history lists all.`));
  }
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
  else if (view === "review") attempt("Loading ...", showReview);
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
