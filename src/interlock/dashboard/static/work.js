// The script of the pages of tasks and jobs: selections, acts on many tasks with an undo window, parts that are fetched again.
"use strict";
(() => {
  const { toast, send, put, newKey, openSheet, closeSheet } = window.interlock;
  const $ = (selector, within = document) => within.querySelector(selector);
  const $$ = (selector, within = document) => [...within.querySelectorAll(selector)];
  const on = (type, selector, handler) => document.addEventListener(type, (event) => {
    const found = event.target.closest?.(selector);
    if (found) handler(found, event);
  });
  const UNDO_MS = Number($("[data-undo-ms]")?.dataset.undoMs || 5000), REFRESH_MS = 2000, RUNNING_REFRESH_MS = 10000;

  // --- a selection, and acts on it or on all that match
  const list = $("[data-list]"), bar = $("[data-bulk-bar]"), picked = new Set();
  let all = false;
  function showSelection() {
    for (const box of $$("[data-pick]")) {
      box.checked = all || picked.has(box.dataset.pick);
      box.closest("tr").classList.toggle("on", box.checked);
    }
    const page = $$("[data-pick]"), every = $("[data-pick-all]");
    if (every) every.checked = all || (page.length > 0 && page.every((box) => picked.has(box.dataset.pick)));
    if (!bar) return;
    bar.hidden = !all && !picked.size;
    $("[data-selected]", bar).textContent = all ? "All that match" : `${picked.size} selected`;
    $("[data-all]", bar).setAttribute("aria-pressed", String(all));
  }
  on("change", "[data-pick]", (box) => {
    if (all) { all = false; for (const other of $$("[data-pick]")) picked.add(other.dataset.pick); }
    if (box.checked) picked.add(box.dataset.pick); else picked.delete(box.dataset.pick);
    showSelection();
  });
  on("change", "[data-pick-all]", (every) => {
    all = false;
    for (const box of $$("[data-pick]")) if (every.checked) picked.add(box.dataset.pick); else picked.delete(box.dataset.pick);
    showSelection();
  });
  on("click", "[data-all]", () => { all = !all; showSelection(); });
  on("click", "[data-bulk-act]", (button) => {
    const query = new URLSearchParams(all ? location.search : location.search.replace(/.*/, ""));
    query.delete("cursor");
    if (!all) {
      query.set("ids", [...picked].join(","));
      const ns = new URLSearchParams(location.search).get("ns");
      if (ns) query.set("ns", ns);
    }
    openSheet(`${list.dataset.list}${button.dataset.bulkAct}?${query}`, button);
  });

  // Nothing is sent before the time is over: the toast offers Undo until then.
  let waiting = 0;
  on("submit", "form[data-bulk]", (form, event) => {
    event.preventDefault();
    if (form.dataset.sent) return;
    form.dataset.sent = "1";
    const { bulk: url, verb, count } = form.dataset, key = form.dataset.key ?? newKey();
    const content = JSON.parse(form.dataset.body), reason = form.elements.reason?.value;
    if (reason) content.reason = reason;
    closeSheet();
    waiting += 1;
    let timer = 0;
    const note = toast(`${verb} ${count} ${count === "1" ? "task" : "tasks"} in ${Math.ceil(UNDO_MS / 1000)} s.`, "", () => {
      clearTimeout(timer);
      waiting -= 1;
      toast("Undone: nothing was changed");
    });
    note.dataset.undo = "";
    timer = setTimeout(async () => {
      note.remove();
      waiting -= 1;
      try { toast(await actOnAll(url, content, key, verb)); } catch (error) { toast(error.message, "red"); }
      all = false;
      picked.clear();
      showSelection();
      refresh();
    }, UNDO_MS);
  });
  async function actOnAll(url, content, key, verb) {
    let changed = 0, requested = 0, cursor = null;
    for (let batch = 0; batch === 0 || cursor; batch += 1) {
      const answer = await send(url, cursor ? { ...content, cursor } : content, `${key}-${batch}`);
      changed += answer.changed;
      requested += answer.requested ?? 0;
      cursor = answer.next;
    }
    const asked = requested ? `, ${requested} of them asked to stop` : "";
    return `${verb === "Cancel" ? "Canceled" : "Requeued"} ${changed} ${changed === 1 ? "task" : "tasks"}${asked}`;
  }
  document.addEventListener("keydown", (event) => {
    const plain = event.key === "u" && !event.ctrlKey && !event.metaKey && !event.altKey;
    if (plain && !event.target.closest("input,select,textarea")) $("[data-undo] button")?.click();
  });
  addEventListener("beforeunload", (event) => { if (waiting) event.preventDefault(); });

  // --- "n newer, show": how many tasks came into the listed states since the page was made
  const newer = $("#newer");
  const counts = () => new Map($$("[data-count][id^='count-']").map((part) => [part.id.slice(6), Number(part.dataset.count)]));
  const before = counts();
  function announce() {
    if (!newer) return;
    const states = newer.dataset.states ? newer.dataset.states.split(" ") : [...before.keys()], now = counts();
    const count = states.reduce((sum, state) => sum + (now.get(state) ?? 0) - (before.get(state) ?? 0), 0);
    newer.hidden = count <= 0;
    newer.textContent = "maybe" in newer.dataset ? "There are newer ones, show" : `${count} newer, show`;
  }

  // --- parts that the stream does not carry are fetched again when its state changes
  let version = $("[data-version]")?.dataset.version, fetched = Date.now(), timer = 0;
  async function refresh() {
    clearTimeout(timer);
    timer = 0;
    fetched = Date.now();
    if (!$("[data-refresh]") || document.hidden) return;
    const response = await fetch(location.href).catch(() => null);
    if (!response?.ok) return;
    const page = new DOMParser().parseFromString(await response.text(), "text/html");
    for (const part of $$("[data-refresh]", page)) put(part.id, part.outerHTML);
    markStep();
    showSelection();
  }
  function plan() {
    const head = $("[data-version]");
    if (!head) return;
    const changed = head.dataset.version !== version;
    version = head.dataset.version;
    const wait = changed ? Math.max(0, fetched + REFRESH_MS - Date.now()) : "open" in head.dataset ? fetched + RUNNING_REFRESH_MS - Date.now() : -1;
    if (!timer && (changed || (wait >= 0 && wait <= 1000))) timer = setTimeout(refresh, wait);
  }
  function markStep() {
    const step = $("[data-chosen]")?.dataset.chosen;
    for (const link of $$(".dag a")) link.toggleAttribute("aria-current", link.dataset.step === step);
  }
  document.addEventListener("patched", () => { announce(); plan(); markStep(); });
  document.addEventListener("acted", ({ detail }) => {
    if (detail?.retried_from) { location.assign(`/jobs/${detail.id}`); return; }
    // the parts that were acted on are replaced at once, although the focus is in them
    if (document.activeElement?.closest("[data-refresh]")) $("#main").focus({ preventScroll: true });
    clearTimeout(timer);
    timer = setTimeout(refresh, 300);
  });
  on("submit", "form[data-auto-off]", (form, event) => {
    event.preventDefault();
    const fields = new URLSearchParams([...new FormData(form)].filter(([, value]) => value));
    location.search = fields;
  });
  showSelection();
  markStep();
})();
