// What both parts of the page use. The numbers are in the element #data, put there by Python; nothing is made up here.
"use strict";
const DATA = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const hex = (byte) => byte.toString(16).toUpperCase().padStart(2, "0");
const bits = (number, width) => number.toString(2).padStart(width, "0");
const grouped = (number) => number.toLocaleString("en-US");
// A minus sign as wide as a plus, so that columns of signed numbers line up.
const signed = (number) => String(number).replace("-", "−");

function element(tag, attributes, ...children) {
  const svg = ["svg", "rect", "line", "text", "path", "g"].includes(tag);
  const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

// Where a format's example begins to tell its halves apart: the first byte with two different ones.
const telling = (format) => Math.max(0, format.positions.findIndex(({ byte }) => byte >> 4 !== (byte & 15)));

function fill(select, options) {
  select.replaceChildren(...options.map(([value, label]) => element("option", { value }, label)));
}

function fillTable(table, columns, rows) {
  const head = element("thead", {}, element("tr", {}, ...columns.map((name) => element("th", { scope: "col" }, name))));
  const body = rows.map(([first, ...rest]) =>
    element("tr", {}, element("th", { scope: "row" }, first), ...rest.map((cell) => element("td", {}, cell))));
  table.replaceChildren(head, element("tbody", {}, ...body));
}
