// Asks the daemon for /status.json and draws it. Whatever came from a client is set as text, never as markup.
const EVERY_MS = 2000;
const SVG = "http://www.w3.org/2000/svg";
const COLOURS = ["ca", "cb", "cc", "cd", "ce"];
const SPANS_MINUTES = [2, 4, 8, 12, 20, 40, 60];

let shown = null;
let answeredAt = 0;
const opened = new Set();

// Words

const count = (value) => Math.round(value).toLocaleString("en-US");
const share = (value) => (value === null || value === undefined ? "–" : `${(100 * value).toFixed(value < 0.9995 ? 1 : 0)} %`);

function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let at = 0;
  while (value >= 1023.5 && at < units.length - 1) {
    value /= 1024;
    at += 1;
  }
  return `${at && value < 99.95 ? value.toFixed(1).replace(/\.0$/, "") : Math.round(value)} ${units[at]}`;
}

const speed = (value) => `${bytes(value)}/s`;
const perSecond = (value) => `${value >= 100 ? count(value) : Number(value.toPrecision(2))}/s`;

function time(seconds) {
  if (seconds < 0.9995) return `${Number((1000 * seconds).toPrecision(2))} ms`;
  if (seconds < 99.5) return `${seconds < 9.95 ? Number(seconds.toFixed(1)) : Math.round(seconds)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86400)} days`;
}

// Elements

function element(name, className, ...inside) {
  const made = document.createElement(name);
  if (className) made.className = className;
  made.append(...inside.map((one) => (one instanceof Node ? one : document.createTextNode(String(one)))));
  return made;
}

function drawn(name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, String(value));
  if (text !== undefined) made.textContent = text;
  return made;
}

const byId = (id) => document.getElementById(id);

function meter(...parts) {
  const made = element("div", "meter");
  for (const [className, from, to] of parts) {
    const part = element("i", className);
    part.style.left = `${100 * Math.min(1, Math.max(0, from))}%`;
    part.style.width = `${100 * Math.min(1, Math.max(0, to - from))}%`;
    made.append(part);
  }
  return made;
}

// On a narrow screen each cell of a table that folds stands on a line of its own, with its column's name.
function rows(id, filled, columns) {
  const body = byId(id).tBodies[0];
  const names = [...byId(id).tHead.rows[0].cells].map((cell) => cell.textContent);
  for (const row of filled) [...row.cells].forEach((cell, at) => { cell.dataset.name = names[at]; });
  if (!filled.length) {
    const cell = element("td", "empty", "none");
    cell.colSpan = columns;
    filled = [element("tr", "", cell)];
  }
  body.replaceChildren(...filled);
}

// Charts

function scaleTop(values, base) {
  const most = Math.max(0, ...values.filter((value) => value !== null));
  if (!most) return base === 1024 ? 1024 : 1;
  const unit = base ** Math.floor(Math.log(most) / Math.log(base) + 1e-9);
  const steps = base === 1024 ? [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024] :
    [1, 1.6, 2, 3, 4, 5, 6, 8, 10];
  return unit * (steps.find((step) => step * unit >= most * 0.999) || base);
}

function path(points) {
  let text = "";
  let pen = false;
  for (const point of points) {
    text += point === null ? "" : `${pen ? "L" : "M"}${point[0].toFixed(1)} ${point[1].toFixed(1)}`;
    pen = point !== null;
  }
  return text;
}

function areas(points, floor) {
  let text = "";
  let run = [];
  for (const point of [...points, null]) {
    if (point !== null) {
      run.push(point);
    } else if (run.length) {
      text += `${path(run)}L${run[run.length - 1][0].toFixed(1)} ${floor}L${run[0][0].toFixed(1)} ${floor}Z`;
      run = [];
    }
  }
  return text;
}

// `lines` are {name, values, colour, area, dashed}, one value for each of `ages` (seconds, the oldest first).
function chart(id, ages, stepSeconds, lines, format, options = {}) {
  const figure = byId(id);
  const width = figure.clientWidth;
  const height = figure.clientHeight - parseFloat(getComputedStyle(figure).getPropertyValue("--legend"));
  if (width < 80 || height < 40) return;
  const left = 58, right = 6, above = 10, below = 20;
  const oldest = ages.length ? ages[0] + stepSeconds : 60;
  const minutes = SPANS_MINUTES.find((one) => one * 60 >= oldest - stepSeconds) || 60;
  const all = minutes * 60;
  const most = options.most || scaleTop(lines.flatMap((line) => line.values), options.base || 10);
  const x = (age) => left + (width - left - right) * (1 - age / all);
  const y = (value) => above + (height - above - below) * (1 - Math.min(value, most) / most);

  const svg = drawn("svg", { viewBox: `0 0 ${width} ${height}`, role: "img" });
  for (const part of [0, 0.5, 1]) {
    svg.append(drawn("line", { class: "grid", x1: left, x2: width - right, y1: y(part * most), y2: y(part * most) }));
    svg.append(drawn("text", { x: left - 8, y: y(part * most) + 4, "text-anchor": "end" }, (options.tick || format)(part * most)));
  }
  for (const part of [0, 0.25, 0.5, 0.75, 1]) {
    const label = part ? `−${time(part * all)}` : "now";
    const anchor = part === 0 ? "end" : part === 1 ? "start" : "middle";
    svg.append(drawn("text", { x: x(part * all), y: height - 5, "text-anchor": anchor }, label));
  }
  const placed = lines.map((line) =>
    line.values.map((value, at) => (value === null || ages[at] > all ? null : [x(ages[at]), y(value)])),
  );
  const floor = y(0).toFixed(1);
  lines.forEach((line, at) => {
    if (line.area) svg.append(drawn("path", { class: `area ${line.colour}`, d: areas(placed[at], floor) }));
  });
  lines.forEach((line, at) => {
    svg.append(drawn("path", { class: `${line.colour}${line.dashed ? " dashed" : ""}`, d: path(placed[at]) }));
    const alone = placed[at].filter((point, i) => point && !placed[at][i - 1] && !placed[at][i + 1]);
    for (const point of alone) svg.append(drawn("circle", { class: line.colour, cx: point[0], cy: point[1], r: 2 }));
  });
  if (!placed.flat().some((point) => point !== null)) {
    svg.append(drawn("text", { class: "none", x: (left + width) / 2, y: height / 2 }, options.none || "nothing yet"));
  }
  const cursor = drawn("line", { class: "cursor", y1: above, y2: height - below, visibility: "hidden" });
  svg.append(cursor);

  const legend = element("div", "legend");
  const said = lines.map((line) => {
    const value = element("b", "");
    legend.append(element("span", "", element("i", line.colour), `${line.name} `, value));
    return value;
  });
  const when = element("span", "when");
  legend.append(when);
  const tell = (at) => {
    lines.forEach((line, i) => {
      const value = at < 0 ? undefined : line.values[at];
      said[i].textContent = value === null || value === undefined ? "–" : format(value);
    });
  };
  tell(ages.length - 1);
  svg.addEventListener("pointermove", (event) => {
    if (!ages.length) return;
    const age = all * (1 - (event.offsetX - left) / (width - left - right));
    let at = 0;
    ages.forEach((one, i) => { if (Math.abs(one - age) < Math.abs(ages[at] - age)) at = i; });
    cursor.setAttribute("x1", x(ages[at]));
    cursor.setAttribute("x2", x(ages[at]));
    cursor.setAttribute("visibility", "visible");
    when.textContent = `${time(ages[at])} ago`;
    tell(at);
  });
  svg.addEventListener("pointerleave", () => {
    cursor.setAttribute("visibility", "hidden");
    when.textContent = "";
    tell(ages.length - 1);
  });
  svg.setAttribute("aria-label", lines.map((line, i) => `${line.name} ${said[i].textContent}`).join(", "));
  if (figure.matches(":hover") && figure.firstChild) return;
  figure.replaceChildren(legend, svg);
}

function charts(status) {
  const past = status.hour;
  const { ages, step_seconds: step } = past;
  chart("chart-hit", ages, step, [
    { name: "hit", values: past.hit, colour: "ca", area: true },
    { name: "ceiling: a cache of unlimited size", values: past.ceiling, colour: "cb", dashed: true },
  ], share, { most: 1, tick: (value) => `${Math.round(100 * value)} %`, none: "nothing was looked up" });
  chart("chart-engines", ages, step, [
    { name: "loaded", values: past.loaded, colour: "ca", area: true },
    { name: "stored", values: past.stored, colour: "cb" },
  ], speed, { base: 1024 });
  chart("chart-lookups", ages, step, [{ name: "lookups", values: past.lookups, colour: "ca", area: true }], perSecond);
  const tiers = Object.keys(past.bytes);
  chart("chart-bytes", ages, step,
    tiers.map((name, i) => ({ name, values: past.bytes[name], colour: COLOURS[i % 5], area: i === 0 })), bytes, { base: 1024 });
  const below = Object.keys(past.read);
  byId("card-tiers").hidden = byId("card-waits").hidden = !below.length;
  chart("chart-tiers", ages, step, below.flatMap((name, i) => [
    { name: `${name} read`, values: past.read[name], colour: COLOURS[(i + 1) % 5] },
    { name: `${name} written`, values: past.written[name], colour: COLOURS[(i + 1) % 5], dashed: true },
  ]), speed, { base: 1024 });
  chart("chart-evicted", ages, step, [{ name: "objects", values: past.evicted, colour: "cb", area: true }], perSecond);
  chart("chart-waits", ages, step, [{ name: "mean wait", values: past.wait_seconds, colour: "cd" }], time,
    { none: "no lookup waited" });
}

// Numbers

function tile(label, value, note, bar) {
  return element("div", "tile", element("div", "label", label), element("div", "value", value),
    ...(bar ? [bar] : []), element("div", "note", note));
}

function tiles(status) {
  const { values, minute, recent } = status;
  const used = values.bytes_committed + values.bytes_writing;
  const hit = recent.hit;
  const engines = status.sessions.filter((session) => session.is_connected).length;
  const waiting = values.lookups_waiting || 0;
  const missing = hit === null ? "nothing was looked up" :
    recent.ceiling - hit < 0.0005 ? "as much as there was to hit" : `of ${share(recent.ceiling)} possible`;
  byId("tiles").replaceChildren(
    tile("Loaded, last hour", recent.asked_tokens ? share(recent.loaded_tokens / recent.asked_tokens) : "–",
      recent.saved_seconds === null ? `${count(recent.loaded_tokens)} tokens` :
        `${count(recent.loaded_tokens)} tokens, ${recent.saved_seconds < 0 ? "lost" : "saved"} ${time(Math.abs(recent.saved_seconds))}`),
    tile("Hit rate, last hour", share(hit), missing,
      meter(["", 0, hit || 0], ["beyond", hit || 0, recent.ceiling || 0])),
    tile("RAM", bytes(values.bytes_committed),
      `of ${bytes(values.bytes_arena)}, ${count(values.objects)} objects; ${bytes(values.bytes_writing)} reserved`,
      meter(["", 0, used / values.bytes_arena])),
    tile("Loaded, last minute", speed(minute.per_second.bytes_loaded), `stored ${speed(minute.per_second.bytes_stored)}`),
    tile("Lookups, last minute", perSecond(minute.per_second.lookups),
      waiting ? `${count(waiting)} wait for tiers` : minute.wait_seconds ? `mean wait for tiers ${time(minute.wait_seconds)}` : "none waits"),
    tile("Engines", count(engines), `${count(values.leases)} loads in flight`),
  );
}

function problems(status) {
  const worst = status.health.length ? status.health[0].level : "good";
  const bad = status.health.filter((one) => one.level !== "note").length;
  byId("state").className = `pill ${bad ? worst : "good"}`;
  byId("state").textContent = bad ? `${bad} ${bad === 1 ? "problem" : "problems"}` : "all is well";
  byId("problems").replaceChildren(...status.health.map((one) => element("li", `problem ${one.level}`, one.text)));
  byId("about").textContent = `${status.setup.host} · up ${time(status.uptime_seconds)} · version ${status.version}`;
  document.title = `${bad ? `(${bad}) ` : ""}hybridkv on ${status.setup.host}`;
}

function tiers(status) {
  const { values } = status;
  const ram = element("tr", "", element("td", "", "ram"), element("td", "", element("span", "pill good", "well")),
    element("td", "number", bytes(values.bytes_committed), element("small", "", `of ${bytes(values.bytes_arena)}`)),
    element("td", "number", "–"), element("td", "number", "–"));
  rows("tiers", [ram, ...status.tiers.map((tier) => {
    const [level, state] = !tier.is_open ? ["bad", "not open"] : tier.is_hung ? ["bad", "hangs"] :
      tier.refusals.length ? ["bad", "refuses"] : tier.is_shut ? ["bad", "breaker open"] : ["good", "well"];
    const known = (value) => (value ? speed(value) : "–");
    const held = element("td", "number", tier.values.bytes === undefined ? "–" : bytes(tier.values.bytes));
    if (tier.values.bytes_max) held.append(element("small", "", `of ${bytes(tier.values.bytes_max)}`));
    return element("tr", "", element("td", "", tier.name, element("small", "", tier.location)),
      element("td", "", element("span", `pill ${level}`, state)), held,
      element("td", "number", known(tier.values.bytes_per_second)),
      element("td", "number", tier.write === "off" ? "off" : known(tier.values.written_bytes_per_second)));
  })], 5);
}

function groups(status) {
  const most = Math.max(1, ...status.groups.map((group) => group.held_bytes));
  rows("groups", status.groups.filter((group) => group.objects).map((group) => {
    const name = !group.identity ? "all others" : group.model || `identity ${group.identity}`;
    const kind = group.identity ? `group ${group.gid} ${group.kind.replace("_", " ")}` : "";
    return element("tr", "", element("td", "", name, element("small", "", kind)),
      element("td", "", meter(["", 0, group.held_bytes / most])),
      element("td", "number", bytes(group.held_bytes)), element("td", "number", count(group.objects)));
  }), 4);
}

function sessions(status) {
  rows("sessions", status.sessions.map((session) => {
    const engine = element("td", "", session.engine_id);
    if (!session.is_connected) engine.append(element("small", "", "gone; its workers may still copy"));
    return element("tr", "", engine, element("td", "", session.model || "–", element("small", "", session.identity)),
      element("td", "", session.groups), element("td", "number", `${count(session.chunk_tokens)} tokens`),
      element("td", "number", count(session.leases)), element("td", "number", bytes(session.writing_bytes)),
      element("td", "number", time(session.since)));
  }), 7);
}

function decisions(status) {
  const list = byId("decisions");
  if (!status.decisions.length) {
    list.replaceChildren(element("p", "empty", "No request has ended yet."));
    return;
  }
  list.replaceChildren(...status.decisions.map((decision) => {
    const { facts, outcome, limit } = decision;
    const summary = outcome === "loaded" ?
      element("span", "computed", element("span", "loaded", `loaded: ${decision.text}`), limit && ` · not more because ${limit}`) :
      element("span", "computed", `${outcome}: ${decision.text}`);
    const line = element("summary", "", element("span", "age", decision.age < 1 ? "just now" : `${time(decision.age)} ago`),
      element("span", "id", decision.request_id), element("span", "", decision.prompt), summary);
    const more = element("dl", "");
    for (const [name, fact] of Object.entries(facts)) more.append(element("dt", "", name), element("dd", "", fact));
    more.append(element("dt", "", "identity"), element("dd", "", decision.identity));
    const made = element("details", "", line, more);
    made.open = opened.has(decision.request_id);
    made.addEventListener("toggle", () => {
      if (made.open) opened.add(decision.request_id);
      else opened.delete(decision.request_id);
    });
    return made;
  }));
}

function setup(status) {
  const { host, socket_path: socket, settings } = status.setup;
  const all = Object.entries({ host, socket, ...settings });
  byId("setup").replaceChildren(...all.flatMap(([name, value]) => [element("dt", "", name), element("dd", "", value)]));
}

// The loop

function show(status) {
  shown = status;
  problems(status);
  tiles(status);
  byId("help").textContent = status.help;
  byId("verdict").textContent = status.verdict.text;
  tiers(status);
  groups(status);
  sessions(status);
  setup(status);
  if (!byId("decisions").matches(":hover")) decisions(status);
  charts(status);
}

async function ask() {
  try {
    const answer = await fetch("status.json", { cache: "no-store", signal: AbortSignal.timeout(8000) });
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    const status = await answer.json();
    answeredAt = Date.now();
    document.body.classList.remove("stale");
    show(status);
  } catch (error) {
    document.body.classList.add("stale");
    byId("state").className = "pill bad";
    byId("state").textContent = answeredAt ?
      `no answer for ${time((Date.now() - answeredAt) / 1000)}; shown is the last one` : "the daemon does not answer";
  }
  window.setTimeout(next, EVERY_MS);
}

function next() {
  if (document.hidden) document.addEventListener("visibilitychange", ask, { once: true });
  else ask();
}

window.addEventListener("resize", () => { if (shown) charts(shown); });
ask();
