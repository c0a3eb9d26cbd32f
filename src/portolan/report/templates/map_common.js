"use strict";
const data = JSON.parse(document.getElementById("page-data").textContent);
const byId = (id) => document.getElementById(id);

/** An element with attributes and children; strings only ever become text. */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "onclick") element.addEventListener("click", value);
    else if (name === "style") element.style.cssText = value;
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child != null));
  return element;
}

/** Three digits and a unit: 16.4 M. */
function compact(value) {
  for (const [unit, size] of [["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e3]]) {
    if (value >= 0.9995 * size) return `${(value / size).toPrecision(3)}\u202f${unit}`;
  }
  return String(value);
}

const count = (value) => String(value).replace(/\B(?=(\d{3})+$)/g, "\u202f");
const percent = (share, digits = 1) => `${(100 * share).toFixed(digits)} %`;
const signed = (value) => (value < 0 ? "\u2212" : "+") + Math.abs(value).toFixed(2);

/** Offer a file that the page itself has made. */
function save(name, type, text) {
  const url = URL.createObjectURL(new Blob([text], {type}));
  make("a", {href: url, download: name}).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}
