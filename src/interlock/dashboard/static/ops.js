// The script of the pages of operations: a list is fetched again when its version changes, and after an act; times are
// entered in the viewer's zone.
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

  // The address has times in UTC, and the fields have those of the viewer's zone.
  const clock = (moment) => moment.toISOString().slice(0, 16), shift = (moment) => moment.getTimezoneOffset() * 60000;
  const form = document.querySelector("form[data-local-times]");
  for (const field of form?.querySelectorAll("[type=datetime-local]") ?? []) {
    const moment = new Date(`${field.value}Z`);
    if (field.value) field.value = clock(new Date(moment - shift(moment)));
    form.addEventListener("formdata", ({ formData }) => {
      if (field.value) formData.set(field.name, clock(new Date(field.value)));
    });
  }
  for (const name of document.querySelectorAll("[data-zone]")) name.textContent = "your time";
})();
