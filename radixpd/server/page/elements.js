// Making elements. Text goes in as text: nothing in this page turns data into markup.

/** An element with properties (`class` and aria-/data- attributes too) and children; a string child is text. */
export function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "class" || name.includes("-") || name === "role") made.setAttribute(name, value);
    else made[name] = value;
  }
  made.append(...children);
  return made;
}

/** The element with this id. */
export const byId = (id) => document.getElementById(id);

/** A count for people: 12,345. */
export const count = (number) => number.toLocaleString("en");

/** "1 page", "2 pages". */
export const many = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;

/** "37 %"; 0 and 100 only where that is exact. */
export function percent(part, whole) {
  if (!whole || !part) return "0 %";
  return part === whole ? "100 %" : `${Math.min(99, Math.max(1, Math.round((100 * part) / whole)))} %`;
}
