// Where the bars of the tree go, and which of them hold a conversation. Pure: numbers in, numbers out.

const BASE = [6, 40]; // pixels that every bar gets before its tokens count, least and most: short nodes can be seen and hit

/**
 * Places in drawing order, parents first: {node, level, start, x, width, row, end} for a node, {space, row, end} for the heading of a
 * namespace (none when there is only the default one). `end - row` is its number of rows. `mine`: ids of nodes that come first.
 */
export function layOut(nodes, mine, width) {
  const below = byParent(nodes);
  for (const siblings of below.values()) siblings.sort((a, b) => mine.has(b.id) - mine.has(a.id) || b.id - a.id);
  const widthOf = widths(nodes, width);
  const spaces = groupBy(below.get(null) ?? [], (node) => node.namespace);
  const headings = spaces.size > 1 || !spaces.has("");
  const places = [];
  let row = 0;

  const put = (node, level, start, x) => {
    const place = { node, level, start, x, width: widthOf(node), row, end: row };
    places.push(place);
    for (const child of below.get(node.id) ?? []) put(child, level + 1, start + node.tokens, x + place.width);
    if (row === place.row) row += 1;
    place.end = row;
  };

  for (const [space, tops] of spaces) {
    if (headings) places.push({ space, row, end: (row += 1) });
    for (const node of tops) put(node, 1, 0, 0);
  }
  return places;
}

/** Ids of the nodes that a conversation of these tokens lies in: the branch that agrees with most of them. */
export function pathOf(nodes, ids) {
  const below = byParent(nodes);
  const path = new Set();
  let siblings = below.get(null) ?? [];
  for (let at = 0; at < ids.length; ) {
    const next = best(siblings, ids, at);
    if (!next) break;
    path.add(next.id);
    at += next.tokens;
    siblings = below.get(next.id) ?? [];
  }
  return path;
}

function best(siblings, ids, at) {
  // Siblings differ in their first page, and of a head that goes on after the conversation the shared part counts.
  const agreeing = siblings.filter((node) => {
    const shared = Math.min(node.head?.length ?? 0, ids.length - at);
    return shared > 0 && node.head.slice(0, shared).every((id, index) => id === ids[at + index]);
  });
  return agreeing.sort((a, b) => a.age - b.age)[0];
}

function byParent(nodes) {
  return groupBy(nodes, (node) => node.parent);
}

/** A bar's width is a base and its share of the rest, such that the longest path just fits. */
function widths(nodes, width) {
  const paths = new Map(); // node id -> [nodes, tokens] down to its end
  // Parents come first.
  for (const node of nodes) {
    const [levels, tokens] = paths.get(node.parent) ?? [0, 0];
    paths.set(node.id, [levels + 1, tokens + node.tokens]);
  }
  const ends = [...paths.values()];
  const base = Math.min(BASE[1], Math.max(BASE[0], (0.4 * width) / Math.max(1, ...ends.map(([levels]) => levels))));
  const scale = Math.min(...ends.map(([levels, tokens]) => Math.max(0, width - levels * base) / tokens));
  return (node) => base + node.tokens * scale;
}

function groupBy(items, key) {
  const groups = new Map();
  for (const item of items) {
    if (!groups.has(key(item))) groups.set(key(item), []);
    groups.get(key(item)).push(item);
  }
  return groups;
}
