"use strict";
// Turns the OpenAPI document into a page on which each operation can be tried.

const made = (name, attributes = {}, ...children) => {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
};

const resolved = (api, schema) =>
  schema && schema.$ref ? schema.$ref.split("/").slice(1).reduce((at, key) => at[key], api) : schema;

const kind = (api, schema) => {
  if (!schema) return "";
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.anyOf) return schema.anyOf.map((each) => kind(api, each)).join(" or ");
  if (schema.enum) return schema.enum.join(", ");
  if (schema.type === "array") return `list of ${kind(api, schema.items)}`;
  return [schema.type, schema.format].filter(Boolean).join(", ");
};

const rows = (header, lines) =>
  made("table", {}, made("tr", {}, ...header.map((text) => made("th", {}, text))),
    ...lines.map((line) => made("tr", {}, ...line.map((text) => made("td", {}, text || "")))));

const members = (api, schema) => {
  const found = resolved(api, schema.anyOf ? schema.anyOf[0] : schema);
  const required = new Set(found.required || []);
  return rows(["member", "", ""], Object.entries(found.properties || {}).map(([name, member]) => [
    name + (required.has(name) ? " *" : ""), kind(api, member), member.description,
  ]));
};

const attempt = (path, method, operation, body) => {
  const fields = {};
  const inputs = (operation.parameters || []).map((parameter) => {
    fields[parameter.name] = { place: parameter.in, input: made("input", { placeholder: parameter.name }) };
    return made("div", {}, made("label", {}, `${parameter.name} `, fields[parameter.name].input));
  });
  const text = body ? made("textarea", {}, "{}") : null;
  const output = made("pre", { hidden: "" });
  const button = made("button", { type: "button" }, "Send");
  button.addEventListener("click", async () => {
    const headers = {};
    const query = new URLSearchParams();
    let target = path;
    for (const [name, { place, input }] of Object.entries(fields)) {
      if (place === "path") target = target.replace(`{${name}}`, encodeURIComponent(input.value));
      else if (input.value && place === "query") query.append(name, input.value);
      else if (input.value) headers[name] = input.value;
    }
    const token = document.getElementById("token").value;
    if (token) headers.Authorization = `Bearer ${token}`;
    if (text) headers["Content-Type"] = "application/json";
    const answer = await fetch(`.${target}${query.size ? `?${query}` : ""}`, {
      method: method.toUpperCase(), headers, body: text ? text.value : undefined,
    });
    const said = await answer.text();
    output.hidden = false;
    try {
      output.textContent = `${answer.status}\n${JSON.stringify(JSON.parse(said), null, 2)}`;
    } catch {
      output.textContent = `${answer.status}\n${said}`;
    }
  });
  return made("div", {}, ...inputs, text, button, output);
};

const shown = (api, path, method, operation) => {
  const content = operation.requestBody && operation.requestBody.content["application/json"];
  const answers = Object.entries(operation.responses).map(([status, response]) => {
    const [type, media] = Object.entries(response.content || {})[0] || ["", {}];
    return [status, response.description.replaceAll("`", ""), kind(api, media.schema) || type];
  });
  return made("details", {},
    made("summary", {},
      made("span", { class: `method ${method}` }, method.toUpperCase()),
      made("code", { class: "path" }, path), " ",
      made("span", { class: "said" }, operation.description || operation.summary || "")),
    (operation.parameters || []).length
      ? rows(["parameter", "", ""], operation.parameters.map((parameter) => [
        `${parameter.name} (${parameter.in})${parameter.required ? " *" : ""}`,
        kind(api, parameter.schema), parameter.description,
      ]))
      : null,
    content ? members(api, content.schema) : null,
    rows(["answer", "", ""], answers),
    attempt(path, method, operation, content));
};

const show = async () => {
  const api = await (await fetch("./openapi.json")).json();
  document.getElementById("about").textContent = api.info.description.replaceAll("`", "");
  const groups = new Map();
  for (const [path, operations] of Object.entries(api.paths)) {
    for (const [method, operation] of Object.entries(operations)) {
      const tag = (operation.tags || ["other"])[0];
      if (!groups.has(tag)) groups.set(tag, [made("h2", {}, tag)]);
      groups.get(tag).push(shown(api, path, method, operation));
    }
  }
  document.getElementById("operations").replaceChildren(...[...groups.values()].flat());
};

show();
