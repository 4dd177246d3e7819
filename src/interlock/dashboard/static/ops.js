// The script of the pages of operations: a list is fetched again when its version changes, and after an act.
"use strict";
(() => {
  const marks = () => [...document.querySelectorAll("[data-reload]")];
  const versions = () => marks().map((mark) => mark.textContent).join();
  let known = versions(), fetching = false;
  async function reload() {
    if (fetching) return;
    fetching = true;
    try {
      const answer = await fetch(location);
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      for (const selector of new Set(marks().map((mark) => mark.dataset.reload))) {
        const fresh = page.querySelector(selector);
        if (fresh) window.interlock.put(fresh.id, fresh.outerHTML);
      }
      known = versions();
    } finally { fetching = false; }
  }
  document.addEventListener("patched", () => { if (versions() !== known) reload(); });
  document.addEventListener("acted", reload);
})();
