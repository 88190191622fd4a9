// Review: one question at a time, by mouse or keys; each answer is kept before the next question is shown.

import { $, attempt, get, node, percent, picture, plural, post, say, state } from "./core.js";
import { explain, whyButton } from "./why.js";

const review = { question: null, before: [], labels: [], busy: false };
const share = (value) => `${(100 * value).toFixed(1)} %`;

function reviewer() {
  return $("#reviewer").value.trim() || "me";
}

async function showStatus() {
  const now = await get("/v1/review");
  const labels = now.labels.toLocaleString("en").replaceAll(",", " ");
  const more = now.most_wrong <= now.wrong * now.labels ? "" :
    `; about ${plural(now.more_draws, "more answer", "more answers")} would make it ${share(now.wrong)}`;
  $("#bound").textContent = `Of ${labels} automatic labels at most ${share(now.most_wrong / now.labels)} ` +
    `(${now.most_wrong}) are wrong (${Math.round(100 * (1 - now.error))} % confidence, valid at any time you stop)${more}.`;
  const parts = [`${now.checked} checked`, `${now.corrected} of them wrong`];
  if (now.spread) parts.push(`${plural(now.spread, "label comes", "labels come")} from answers on near-duplicates`);
  if (now.unknown) parts.push(plural(now.unknown, "image is unknown", "images are unknown"));
  const added = Object.keys(now.new_labels);
  if (added.length) parts.push(`${plural(added.length, "new label", "new labels")}: ${added.join(", ")}`);
  $("#progress").textContent = `${parts.join(", ")}.`;
  const disagree = $("#disagree");
  disagree.hidden = !now.disagreements;
  $("summary", disagree).textContent = `Reviewers disagree on ${plural(now.disagreements, "image", "images")}`;
  $("ul", disagree).replaceChildren(...now.disagree.map(({ row, answers }) => {
    const said = Object.entries(answers).map(([name, label]) => `${name}: ${label ?? "cannot tell"}`).join("; ");
    const button = node("button", { textContent: "Look again", ariaLabel: `Look again: ${said}` });
    button.onclick = () => attempt("Loading ...", () => showQuestion(row));
    return node("li", {}, `${said} `, button);
  }));
}

const inbox = (row, side) => `/v1/review/images/${row}?side=${side}`;

function actions(question) {
  const wrong = node("form", { className: "row" }, node("label", {}, "Label ", node("input", {
    id: "other", required: true, autocomplete: "off",
  })), node("datalist", { id: "names" }, ...review.labels.map((value) => node("option", { value }))),
  node("button", { textContent: "Save" }));
  $("input", wrong).setAttribute("list", "names");
  wrong.onsubmit = (event) => { event.preventDefault(); answer($("#other").value.trim()); };
  const button = (key, name, work) => {
    const made = node("button", { type: "button" }, name, " ", node("kbd", { textContent: key }));
    made.onclick = work;
    made.dataset.key = key;
    return made;
  };
  const others = [...new Set(question.nearest.map(({ label }) => label))]
    .filter((label) => label !== null && label !== question.label);
  return [node("div", { className: "row answers" },
    question.label === null ? null : button("y", "Same", () => answer(question.label)),
    button("o", question.label === null ? "Known or new" : "Other or new", () => $("#other").focus()),
    ...others.map((label, place) => button(`${place + 1}`, label, () => answer(label))),
    button("u", "Cannot tell", () => answer(null)),
    review.before.length ? button("b", "Back", back) : null), wrong];
}

async function showQuestion(row = null) {
  const body = { reviewer: reviewer(), about: $("#about").value, row };
  const { question } = await post("/v1/review/question", body);
  review.question = question;
  const place = $("#question");
  if (question === null) {
    const what = $("#about").value === "labels" ? "label" : "unknown image";
    place.replaceChildren(node("p", { className: "verdict", textContent: `No ${what} is left to ask about.` }));
    return;
  }
  const name = question.path.split("/").pop();
  const title = question.label === null ? "What is it?" : `Is it ${question.label}?`;
  const said = Object.entries(question.answers).map(([who, label]) => `${who} said ${label ?? "cannot tell"}`).join("; ");
  const alike = question.count > 1 ? `The answer also holds for ${plural(question.count - 1, "image", "images")} that ` +
    `${question.count === 2 ? "looks" : "look"} alike. ` : "";
  const chance = question.label === null || !question.probability ? "" : `Probability ${percent(question.probability)}. `;
  const figure = (from, alt, id) => node("figure", {}, picture(id, alt, from));
  place.replaceChildren(
    node("h3", { id: "asked", tabIndex: -1, textContent: title }),
    node("div", { className: "answer" },
      picture(null, `image to label: ${name}`, inbox(question.row, 480)),
      node("div", {}, ...actions(question),
        node("p", { className: "detail", textContent: `${chance}${alike}${said}` }),
        question.alike.length ? node("div", { className: "shelf" },
          ...question.alike.map((one) => figure(inbox(one, 160), "near-duplicate"))) : null,
        node("p", { className: "detail", textContent: "The most similar images of the gallery:" }),
        node("div", { className: "shelf" }, ...question.nearest.map(({ id, label }) => {
          const shown = figure(undefined, label ?? "no label", id), words = label ?? "no label";
          shown.append(node("figcaption", { textContent: words }), whyButton(words,
            () => explain(`/v1/why?row=${question.row}&id=${encodeURIComponent(id)}`, null)));
          return shown;
        })))));
  $("#asked").focus({ preventScroll: true });
}

async function answer(label) {
  const { question } = review;
  if (question === null || review.busy || label === "") return;
  review.busy = true;  // a key that is held down answers once
  await attempt("Saving ...", async () => {
    await post("/v1/review/answer", { reviewer: reviewer(), row: question.row, id: question.id, label });
    review.before.push(question.row);
    if (label !== null && !review.labels.includes(label)) review.labels.push(label);
    await showQuestion();
    await showStatus();
    say(`Saved: ${label ?? "cannot tell"}.`);
  });
  review.busy = false;
}

function back() {
  const row = review.before.pop();
  if (row !== undefined) attempt("Loading ...", () => showQuestion(row));
}

export async function showReview() {
  $("#reviewer").value ||= localStorage.getItem("dmlkit-reviewer") || "me";
  review.labels = Object.keys((await get("/v1/gallery/labels")).labels).filter(Boolean);
  await showStatus();
  if (!state.info.writes) {
    $("#question").replaceChildren(node("p", { textContent: "To answer, start the server with --allow-writes." }));
    return;
  }
  await showQuestion();
}

$("#reviewer").onchange = () => {
  localStorage.setItem("dmlkit-reviewer", reviewer());
  attempt("Loading ...", () => showQuestion());
};
$("#about").onchange = () => attempt("Loading ...", () => showQuestion());
$("#add-reviewed").onclick = () => attempt("Adding; this takes a while ...", async () => {
  const { added, messages } = await post("/v1/review/add", {});
  const also = messages.length ? ` ${plural(messages.length, "image was", "images were")} left out: ${messages[0]}` : "";
  say(`Added ${plural(added, "image", "images")}. History in Gallery can undo it.${also}`);
});

addEventListener("keydown", (event) => {
  if ($("section[data-view=review]").hidden || $("#why").open || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Escape" && event.target.id === "other") return $("#asked").focus();
  if (event.target.matches("input, select, textarea")) return;
  const aliases = { n: "o", "?": "u", Backspace: "b" };
  const key = aliases[event.key] || event.key, button = $(`#question button[data-key="${CSS.escape(key)}"]`);
  if (!button || event.repeat) return;
  event.preventDefault();
  button.click();
});
