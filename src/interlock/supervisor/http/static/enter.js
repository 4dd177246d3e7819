"use strict";
// Signs in with the code of the address or with a pasted token, then goes to the page that was asked for.

const message = document.getElementById("message");
const form = document.getElementById("sign-in");
const field = document.getElementById("token");

const go = () => {
  let target = new URL("../", location.href);
  try {
    const wanted = new URL(new URLSearchParams(location.search).get("next") ?? "../", location.href);
    if (wanted.origin === location.origin) target = wanted;
  } catch {
    // not an address: the start page
  }
  location.replace(target.href);
};

const ask = (text) => {
  message.textContent = text;
  form.hidden = false;
  field.focus();
};

const signIn = async (proof) => {
  const answer = await fetch("session", {
    method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(proof),
  });
  if (answer.ok) go();
  else ask(`Not signed in: ${(await answer.json()).detail}`);
};

const start = async () => {
  const code = new URLSearchParams(location.hash.slice(1)).get("code");
  if (code) {
    history.replaceState(null, "", location.pathname + location.search);
    await signIn({ code });
  } else if ((await fetch("session")).ok) {
    go(); // a session exists: browsers do not send its cookie with the first click from another site
  } else {
    ask("Sign in with a token.");
  }
};

form.addEventListener("submit", (event) => {
  event.preventDefault();
  signIn({ token: field.value.trim() });
});

start().catch(() => ask("The supervisor cannot be reached."));
