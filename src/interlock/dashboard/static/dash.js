// The script of the dashboard: live updates, theme, keyboard, copying, acts. Pages can be read without it.
"use strict";
(() => {
  const { body } = document, root = document.documentElement;
  const $ = (selector, within = document) => within.querySelector(selector);
  const $$ = (selector, within = document) => [...within.querySelectorAll(selector)];
  const on = (type, selector, handler) => document.addEventListener(type, (event) => {
    const found = event.target.closest?.(selector);
    if (found) handler(found, event);
  });

  // --- times, in the viewer's zone
  const units = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];
  function ago(seconds) {
    const size = Math.abs(seconds);
    if (size < 1) return "now";
    const at = units.findIndex(([, length]) => size >= length);
    const [unit, length] = units[at], next = units[at + 1];
    let text = `${Math.floor(size / length)} ${unit}`;
    const rest = next && at < 2 ? Math.floor((size % length) / next[1]) : 0;
    if (rest) text += ` ${rest} ${next[0]}`;
    return seconds > 0 ? `${text} ago` : `in ${text}`;
  }
  const hm = { hour: "2-digit", minute: "2-digit", hour12: false };
  const forms = {
    clock: (moment) => moment.toLocaleTimeString([], hm),
    minute: (moment) => moment.toLocaleString([], { dateStyle: "medium", timeStyle: "short" }),
    second: (moment) => moment.toLocaleString([], { dateStyle: "medium", timeStyle: "medium" }),
    day: (moment) => moment.toLocaleDateString([], { day: "numeric", month: "short" }),
  };
  function showTimes(within = document) {
    for (const time of $$("time[datetime]", within)) {
      const moment = new Date(time.dateTime), form = forms[time.dataset.as];
      if (form) { time.textContent = form(moment); continue; }
      time.title = moment.toLocaleString([], { dateStyle: "medium", timeStyle: "long" });
      time.textContent = ago((Date.now() - moment) / 1000);
    }
  }
  showTimes();
  setInterval(showTimes, 10000);

  // --- live updates
  const label = $("#live"), lamp = $("[data-pause]");
  let source = null, last = "", paused = false, held = new Map(), freedUntil = 0; // after an act
  function say(text, off) {
    if (!label || label.textContent === text) return;
    lamp.classList.toggle("off", off);
    label.textContent = text;
  }
  function visibleRows() {
    const ids = $$("[id^='row-']").slice(0, 50).map((row) => row.id.slice(4).replaceAll("-", ""));
    const bytes = ids.filter((id) => /^[0-9a-f]{32}$/.test(id)).map((id) => id.match(/../g).map((pair) => parseInt(pair, 16))).flat();
    return bytes.length ? btoa(String.fromCharCode(...bytes)).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "") : "";
  }
  function put(id, html) {
    const old = document.getElementById(id);
    if (!old || old.outerHTML === html) return;
    const at = $$("a,button", old).indexOf(document.activeElement);
    if ((old.contains(document.activeElement) && Date.now() > freedUntil) || old.matches(":has([open])")) { held.set(id, html); return; }
    held.delete(id);
    const template = document.createElement("template");
    template.innerHTML = html;
    const fresh = template.content.firstElementChild;
    if (!fresh) return;
    const scrolled = $$(".scroll", old).map((part) => part.scrollLeft);
    const chosen = old.querySelector("input[type=checkbox]:checked");
    showTimes(template.content);
    old.replaceWith(fresh);
    if (at >= 0) $$("a,button", fresh)[at]?.focus();
    $$(".scroll", fresh).forEach((part, at) => { part.scrollLeft = scrolled[at] || 0; });
    if (chosen) { const box = fresh.querySelector("input[type=checkbox]"); if (box) box.checked = true; fresh.classList.add("on"); }
  }
  const patch = (event) => {
    last = event.lastEventId || last;
    for (const [id, html] of JSON.parse(event.data)) put(id, html);
    say("Live", false);
    document.dispatchEvent(new Event("patched"));
  };
  document.addEventListener("focusout", () => setTimeout(() => { for (const [id, html] of [...held]) put(id, html); }));
  function open() {
    if (source || paused || document.hidden || !body.dataset.stream) return;
    const ids = visibleRows();
    source = new EventSource(`${body.dataset.stream}${ids && `&ids=${ids}`}${last && `&last=${last}`}`);
    source.addEventListener("hello", (event) => {
      if (JSON.parse(event.data).build !== body.dataset.build && !$("#sheet form")) location.reload();
      say("Live", false);
    });
    source.addEventListener("patch", patch);
    source.addEventListener("row", patch);
    source.addEventListener("session", () => { close(); location.reload(); });
    source.addEventListener("stale", ({ data }) => say(data === "true" ? "No database" : "Live", data === "true"));
    source.addEventListener("bye", () => say("Reconnecting", true));
    source.onerror = () => { say("Reconnecting", true); if (source?.readyState === 2) { close(); setTimeout(open, 5000); } };
  }
  function close() { source?.close(); source = null; }
  function pause(now) {
    paused = now;
    lamp.setAttribute("aria-pressed", String(now));
    lamp.title = now ? "Resume updates" : "Pause updates";
    if (now) { close(); say("Paused", true); } else { say("Connecting", true); open(); }
  }
  on("click", "[data-pause]", () => pause(!paused));
  // A hidden tab holds no connection: browsers allow six per origin.
  document.addEventListener("visibilitychange", () => (document.hidden ? close() : open()));
  addEventListener("pagehide", close);
  addEventListener("pageshow", open);
  open();

  // --- kept in cookies: read only, and the theme (auto, light, dark)
  const keep = (name, value) => { document.cookie = `interlock_${name}=${value};path=/;max-age=31536000;samesite=lax`; };
  on("click", "[data-read-only]", (button) => { keep("read_only", button.dataset.readOnly); location.reload(); });
  on("click", "[data-theme-switch]", (button) => {
    const next = { "": "light", light: "dark", dark: "" }[root.dataset.theme ?? ""];
    if (next) root.dataset.theme = next; else delete root.dataset.theme;
    keep("theme", next);
    button.setAttribute("aria-label", `Theme: ${next || "auto"}`);
    const use = $("use", button), [file] = use.getAttribute("href").split("#");
    use.setAttribute("href", `${file}#${{ "": "auto", light: "sun", dark: "moon" }[next]}`);
  });

  // --- menu on phones, forms that submit themselves, copying
  on("click", "[data-menu]", (button) => {
    const shown = $("#side").classList.toggle("open");
    button.setAttribute("aria-expanded", String(shown));
    if (shown) $("#side a").focus();
  });
  on("click", "main", () => $("#side")?.classList.remove("open"));
  on("change", "form[data-auto]", (form) => {
    const fields = new URLSearchParams([...new FormData(form)].filter(([, value]) => value));
    location.search = fields;
  });
  on("click", "[data-copy]", async (button) => {
    try { await navigator.clipboard.writeText(button.dataset.copy); toast("Copied"); }
    catch { toast(button.dataset.copy); }
  });

  // --- acts: confirm sheets and requests with CSRF token and idempotency key
  function toast(text, tone = "", undo = null) {
    const note = document.createElement("div");
    note.className = `toast ${tone && `t-${tone}`}`;
    note.textContent = text;
    if (undo) {
      const button = document.createElement("button");
      button.className = "btn ghost";
      button.textContent = "Undo";
      button.onclick = () => { note.remove(); undo(); };
      note.append(" ", button);
    }
    $("#toasts").append(note);
    setTimeout(() => note.remove(), undo ? 10000 : tone === "red" ? 9000 : 3500);
    return note;
  }
  async function send(url, content, key, method = "POST") {
    const response = await fetch(url, {
      method,
      headers: { "Content-Type": "application/json", "X-CSRF-Token": body.dataset.csrf, "Idempotency-Key": key },
      body: JSON.stringify(content ?? {}),
    });
    const answer = await response.json().catch(() => ({}));
    if (response.status === 401) location.reload();
    if (!response.ok) throw new Error(answer.detail || answer.title || `${response.status}`);
    return answer;
  }
  async function act(element, url, content, key) {
    if (element.dataset.busy) return;
    element.dataset.busy = "1";
    try {
      const answer = await send(url, content, key, element.dataset.method);
      const { done, then } = element.dataset;
      closeSheet();
      freedUntil = Date.now() + 5000;
      toast(done || "Done");
      document.dispatchEvent(new CustomEvent("acted", { detail: answer }));
      if (then) location.assign(then);
    } catch (error) { toast(error.message, "red"); }
    finally { delete element.dataset.busy; }
  }
  const newKey = () => `ui-${crypto.randomUUID?.() ?? [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16)).join("")}`;
  let opener = null;
  async function openSheet(url, from) {
    const response = await fetch(url, { headers: { "X-CSRF-Token": body.dataset.csrf } });
    if (!response.ok) { toast(`That cannot be shown now (${response.status})`, "red"); return; }
    const html = await response.text();
    opener = from;
    $("#sheet").innerHTML = html;
    const form = $("#sheet form");
    form.dataset.key = newKey();
    ($("input:not([type=hidden]),textarea,select", form) ?? $("button:not([data-close])", form)).focus();
  }
  function closeSheet() {
    if (!$("#sheet").firstChild) return;
    $("#sheet").replaceChildren();
    // it may be replaced
    (opener.isConnected ? opener : $(`[data-sheet="${CSS.escape(opener.dataset.sheet)}"]`) ?? $("#main")).focus();
  }
  on("click", "[data-sheet]", (button) => openSheet(button.dataset.sheet, button));
  on("click", "[data-close]", closeSheet);
  on("click", "[data-act]", (button) => act(button, button.dataset.act, JSON.parse(button.dataset.body || "{}"), newKey()));
  function content(form) {
    const found = form.dataset.body ? JSON.parse(form.dataset.body) : {};
    for (const field of form.elements) {
      if (!field.name || field.disabled || (field.type === "checkbox" && !field.checked) || field.value === "") continue;
      const as = field.dataset.json;
      try { found[field.name] = as === "number" ? Number(field.value) : as === "list" ? field.value.split(/[,\s]+/).filter(Boolean) : as ? JSON.parse(field.value) : field.type === "checkbox" ? true : field.value; }
      catch { field.focus(); throw new Error(`${field.name} is not valid JSON`); }
    }
    return found;
  }
  on("submit", "form[data-confirm]", (form, event) => {
    event.preventDefault();
    try { act(form, form.dataset.confirm, content(form), (form.dataset.key ??= newKey())); }
    catch (error) { toast(error.message, "red"); }
  });
  on("submit", "form[data-signout]", async (form, event) => {
    event.preventDefault();
    await send(form.getAttribute("action"), {}, newKey(), form.dataset.method).catch(() => {});
    location.assign("/ui/enter");
  });

  // --- keyboard
  let prefix = 0;
  const rows = () => $$("main tr[id^='row-']");
  function step(by) {
    const all = rows(), at = all.indexOf(document.activeElement.closest?.("tr"));
    const next = all[Math.min(Math.max(at + by, 0), all.length - 1)];
    $("a", next ?? document)?.focus();
  }
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") { closeSheet(); $("#side")?.classList.remove("open"); return; }
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input,select,textarea,[contenteditable]")) return;
    const key = event.key;
    if (prefix && Date.now() - prefix < 1500) {
      prefix = 0;
      const link = $(`[data-key="${CSS.escape(key)}"]`);
      if (link) { event.preventDefault(); link.click(); }
      return;
    }
    const keys = {
      "/": () => $("#find")?.focus(),
      g: () => { prefix = Date.now(); },
      j: () => step(1),
      k: () => step(-1),
      x: () => document.activeElement.closest?.("tr")?.querySelector("input[type=checkbox]")?.click(),
      p: () => pause(!paused),
      "?": () => $("#keys")?.showModal(),
    };
    if (keys[key]) { event.preventDefault(); keys[key](); }
  });
  window.interlock = { toast, send, put, newKey, openSheet, closeSheet }; // for the scripts of single pages
})();
