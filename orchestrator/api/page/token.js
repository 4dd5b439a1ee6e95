// Asks for the bearer token. It is kept for this tab alone, and never stands in an address.

import { h } from "./dom.js";
import { hint } from "./hints.js";

/** `complaint`: why it is asked for again; may be empty. */
export function showTokenForm(main, complaint, take) {
  const input = h("input", {
    id: "token",
    type: "password",
    autocomplete: "off",
    spellcheck: "false",
    required: "",
    "aria-describedby": "where complaint",
  });
  const said = h("p", { id: "complaint", class: "complaint", role: "alert" });
  const complain = (text) => {
    said.textContent = text;
    input.setAttribute("aria-invalid", String(text !== ""));
    input.focus();
  };
  const where = hint("A viewer's will do. ", ["headrace serve"], " says where the admin's is. Only this tab keeps it.");
  where.id = "where";
  const form = h(
    "form",
    { class: "token" },
    h("h1", { tabindex: "-1" }, "Look at your jobs"),
    h("label", { for: "token" }, "API token"),
    h("div", { class: "entry" }, input, h("button", { type: "submit" }, "Show them")),
    said,
    where,
  );
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const token = input.value.trim();
    if (/^[\x21-\x7e]+$/.test(token)) take(token);
    else complain("A token has neither spaces nor letters beyond ASCII.");
  });
  main.replaceChildren(form);
  complain(complaint);
}
