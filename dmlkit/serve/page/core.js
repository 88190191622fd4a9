// What the views share: requests with the token, messages, pictures. Texts are set as text, never as markup.

export const state = { token: sessionStorage.getItem("dmlkit-token") || "", info: null, label: null };

export const $ = (selector, within = document) => within.querySelector(selector);

export function node(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children.filter((child) => child !== null));
  return made;
}

export function say(text, isError = false) {
  const line = $("#message");
  line.textContent = text;
  line.classList.toggle("error", isError);
}

export async function ask(path, options = {}) {
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

export const get = async (path) => (await ask(path)).json();
export const post = async (path, body) => (await ask(path, {
  method: "POST",
  body: body === null || body instanceof FormData ? body : JSON.stringify(body),
  headers: body === null || body instanceof FormData ? {} : { "Content-Type": "application/json" },
})).json();

export function form(files) {
  const data = new FormData();
  for (const file of files) data.append("images", file, file.name || "pasted.png");
  return data;
}

// Do something and show what goes wrong.
export async function attempt(busy, work) {
  say(busy);
  try {
    await work();
    if ($("#message").textContent === busy) say("");
  } catch (error) {
    say(error.message, true);
  }
}

export const percent = (share) => (share === null ? "" : `${Math.round(100 * share)} %`);
export const number = (value) => (value === null ? "none" : Number(value).toPrecision(4));
export const plural = (count, one, many) => `${count} ${count === 1 ? one : many}`;

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
    const blob = await (await ask(image.dataset.from)).blob();
    image.src = URL.createObjectURL(blob);
    image.onload = () => URL.revokeObjectURL(image.src);
  } catch {
    image.alt += " (no picture)";
  }
}

export function picture(id, alt, from = `/v1/images/${encodeURIComponent(id)}`) {
  const image = node("img", { alt });
  image.dataset.from = from;
  watcher.observe(image);
  return image;
}

export const own = (file) => {
  const image = node("img", { alt: file.name || "pasted photo", src: URL.createObjectURL(file) });
  image.onload = () => URL.revokeObjectURL(image.src);
  return image;
};
