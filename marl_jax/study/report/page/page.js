"use strict";
// The moving parts of a page: curves, tables that can be saved, and what the roles said. All text from a model or a
// folder goes through textContent; nothing is parsed as markup, and nothing is fetched.
(() => {
const data = JSON.parse(document.getElementById("data").textContent);
const el = (tag, attributes = {}, ...children) => {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== false && value !== undefined) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter(child => child !== null && child !== undefined && child !== ""));
  return node;
};
const colour = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const paint = place => place === null ? "var(--ink)" : place < data.colours ? `var(--c${place})` : `hsl(${(place * 137.5) % 360} 60% var(--tone-light))`;
const probe = el("span", {hidden: true});
document.body.append(probe);
const painted = (place, share = 1) => {  // as a colour that a canvas takes
  probe.style.color = paint(place);
  const rgb = getComputedStyle(probe).color;
  return share === 1 ? rgb : rgb.replace(/^rgb\((.*)\)$/, `rgba($1, ${share})`);
};
const percent = value => value === null ? "–" : `${(100 * value).toFixed(1)}%`;
const number = value => value === null ? "–" : Math.abs(value) >= 999.5 ? Math.round(value).toLocaleString("en") : String(+value.toPrecision(3));
const save = (name, blob) => {
  const link = el("a", {download: name, href: URL.createObjectURL(blob)});
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
};
const saveCsv = (name, rows) => {
  const cell = text => /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  // A cell that a spreadsheet would take for a formula is made a text; numbers stay numbers.
  const inert = text => /^[=+\-@\t\r]/.test(text) && isNaN(text) ? `'${text}` : text;
  save(`${name}.csv`, new Blob([rows.map(row => row.map(x => cell(inert(String(x ?? "")))).join(",") + "\n").join("")],
    {type: "text/csv"}));
};
const button = (text, onclick, more = {}) => el("button", {type: "button", onclick, ...more}, text);

// ------------------------------------------------------------------ tables

const csvOf = (table, name) => {
  const whole = cell => {  // names are wrapped at their signs, and are one text
    const copy = cell.cloneNode(true);
    copy.querySelectorAll("wbr").forEach(sign => sign.remove());
    copy.normalize();
    return copy;
  };
  const said = cell => [...whole(cell).childNodes].filter(node => !node.matches?.(".links")).map(node => node.textContent.trim()).filter(Boolean).join(" ").replaceAll("\n", " ");
  const rows = () => [...table.rows].map(row => [...row.cells].flatMap(cell => Array(cell.colSpan).fill(said(cell))));
  return button("CSV", () => saveCsv(name, rows()), {class: "save", "aria-label": `CSV of ${name}`});
};
for (const table of document.querySelectorAll("table:not(.facts)"))
  (table.closest("details") ?? table.parentElement).before(csvOf(table, table.dataset.name || "table"));

// On a phone what is long begins folded.
if (matchMedia("(max-width: 40rem)").matches) for (const fold of document.querySelectorAll("details.fold")) fold.open = false;

// ------------------------------------------------------------------ curves

const plots = [];
const sync = window.uPlot && uPlot.sync("steps");

// Each is summed anew: what a large value rounds away would be missing behind it, too.
const mean = (values, window) => values.map((_, end) => {
  let sum = 0, known = 0;
  for (let at = Math.max(0, end + 1 - window); at <= end; at++) if (values[at] !== null) { sum += values[at]; known += 1; }
  return known ? sum / known : null;
});

function columns(panel) {
  const steps = [...new Set(panel.lines.flatMap(line => line.steps))].sort((a, b) => a - b);
  const place = new Map(steps.map((step, index) => [step, index]));
  const spread = (line, values) => {
    const column = Array(steps.length);  // a step of other lines is no gap, a null is one
    line.steps.forEach((step, index) => { column[place.get(step)] = values[index]; });
    return column;
  };
  const among = line => {  // the places of values that no line reaches
    const alone = index => [-1, 0, 1].every(by => ((line.values[index + by] ?? null) !== null) === (by === 0));
    return line.steps.flatMap((step, index) => alone(index) ? [place.get(step)] : []);
  };
  return {steps, spread, among};
}

function curve(figure, panel) {
  const {steps, spread, among} = columns(panel);
  const show = panel.percent ? percent : value => number(value) + (value !== null && panel.unit ? ` ${panel.unit}` : "");
  const series = [{label: "step"}], values = [steps], bands = [];
  const owners = [null];  // the line of each series: names may be those of other series
  for (const line of panel.lines) {
    const add = (options, column) => { series.push({show: line.on, ...options}); values.push(column); owners.push(line); };
    const stroke = () => painted(line.colour), raw = spread(line, line.values);
    if (line.low) {
      const faint = {stroke: "transparent", points: {show: false}, band: true, spanGaps: true};
      add({...faint, label: `${line.name} low`}, spread(line, line.low));
      add({...faint, label: `${line.name} high`}, spread(line, line.high));
      bands.push({series: [series.length - 1, series.length - 2], fill: () => painted(line.colour, 0.16)});
    }
    const smooth = line.window > 1;
    if (smooth) add({label: `${line.name} (single steps)`, stroke: () => painted(line.colour, 0.28), width: 1,
                     points: {show: false}}, raw);
    const lonely = line.window > 1 ? [] : among(line);
    add({label: line.name, stroke, width: 2, spanGaps: panel.points,
         points: {show: panel.points || lonely.length > 0, size: 5, ...(panel.points ? {} : {filter: () => lonely})},
         value: (_, value) => show(value)}, smooth ? spread(line, mean(line.values, line.window)) : raw);
  }
  const axis = {stroke: () => colour("--muted"), grid: {stroke: () => colour("--grid"), width: 1}, ticks: {show: false},
                font: "12px system-ui", labelFont: "12px system-ui", labelSize: 18, labelGap: 0};
  const draw = plot => {
    const context = plot.ctx, box = plot.bbox;
    context.save();
    context.setLineDash([5, 4]);
    context.lineWidth = devicePixelRatio;
    context.textAlign = "left";
    context.font = `${11 * devicePixelRatio}px system-ui`;
    const stroke = (variable, from, to) => {
      context.strokeStyle = context.fillStyle = colour(variable);
      context.beginPath(); context.moveTo(...from); context.lineTo(...to); context.stroke();
    };
    if (panel.level) {
      const y = plot.valToPos(panel.level[0], "y", true);
      if (y >= box.top && y <= box.top + box.height) {
        stroke("--muted", [box.left, y], [box.left + box.width, y]);
        context.fillText(panel.level[1], box.left + 4, y - 4);
      }
    }
    // Numbers that would overprint each other stand together behind the first of their lines.
    let label = null;
    const write = () => label && context.fillText(label.text, label.x, box.top + 10 * devicePixelRatio);
    data.breaks.map(broken => ({x: plot.valToPos(broken.step, "x", true), text: `${broken.number}`}))
      .filter(({x}) => x >= box.left && x <= box.left + box.width).sort((a, b) => a.x - b.x).forEach(({x, text}) => {
        stroke("--bad", [x, box.top], [x, box.top + box.height]);
        if (label && x < label.x + context.measureText(`${label.text} `).width) label.text += ` ${text}`;
        else { write(); label = {x: x + 3, text}; }
      });
    write();
    context.restore();
  };
  let plot = null;
  const legend = el("p", {class: "values small"});
  const isShown = line => plot?.series[owners.lastIndexOf(line)].show ?? true;
  const toggle = (line, on) => {  // without a line: all
    owners.forEach((owner, index) => { if (owner && (owner === line || !line)) plot.setSeries(index, {show: on}); });
    said(plot.cursor.idx ?? null);
  };
  let pointed = null;
  const said = index => {
    pointed = steps[index] ?? pointed;
    const held = [...legend.children].indexOf(document.activeElement);
    legend.replaceChildren(el("span", {}, index === null ? "last" : `step ${steps[index]}`));
    panel.lines.forEach(line => {
      const at = index === null ? line.values.length - 1 : line.steps.indexOf(steps[index]);
      const value = at < 0 ? null : line.values[at], count = line.n?.[at];
      const more = line.low && at >= 0 && line.low[at] !== null ? ` (${show(line.low[at])} – ${show(line.high[at])})` : "";
      const on = isShown(line);
      legend.append(button("", () => toggle(line, !on), {"aria-pressed": String(on)}));
      legend.lastChild.append(el("i", {style: `background: ${paint(line.colour)}`}), `${line.name} ${show(value)}${more}`,
        count ? el("span", {class: "muted"}, `, n = ${count.toLocaleString("en")} ${line.of}`) : "");
    });
    data.breaks.forEach(broken => {
      if (index !== null && broken.step === steps[index])
        legend.append(el("span", {class: "bad"}, `${broken.number}: ${broken.title}`));
    });
    if (held >= 0) legend.children[held].focus();  // the button that was pressed is another now
  };
  const holder = el("div", {class: "plot", tabindex: "0", role: "img",
    "aria-label": `${panel.title}: ${panel.lines.map(line => `${line.name} from ${show(line.values[0])} to ${show(line.values.at(-1))}`).join("; ")}. Arrow keys move along the steps.`});
  figure.append(holder, legend);
  // All curves show the step that is pointed at; the one with the keyboard's focus reads its numbers out.
  for (const [event, live] of [["focus", "polite"], ["blur", "off"]]) holder.addEventListener(event, () => legend.setAttribute("aria-live", live));
  const range = (_, low, high) => {
    const [bottom, top] = panel.bounds, pad = (high - low || Math.abs(high) || 1) * 0.06;
    return [bottom ?? low - pad, top ?? high + pad];
  };
  const size = () => ({width: Math.max(holder.clientWidth, 200), height: figure.classList.contains("wide") ? 300 : 210});
  plot = new uPlot({
    ...size(), series, bands, legend: {show: false}, hooks: {draw: [draw], setCursor: [plot => said(plot.cursor.idx ?? null)]},
    cursor: {sync: {key: sync.key, setSeries: false}, points: {size: 7}, drag: {x: true, y: false}},
    scales: {x: {time: false}, y: panel.logarithmic ? {distr: 3} : {range}},
    axes: [{...axis, label: "step", size: 24},
      {...axis, label: panel.unit || null, size: 56, values: (_, ticks) => ticks.map(tick => tick === null ? "" : panel.percent ? percent(tick) : (+tick.toPrecision(10)).toLocaleString("en", {maximumSignificantDigits: 10}))}],
  }, values, holder);
  said(null);
  // With all scales as at first, also where there is one step; of all curves, as a zoom is.
  const whole = () => plots.forEach(({plot}) => plot.setData(plot.data));
  const zoom = () => {  // to half of the steps, about the one that was pointed at last
    const {min, max} = plot.scales.x, at = Math.min(Math.max(pointed ?? (min + max) / 2, min), max);
    plots.forEach(({plot}) => plot.setScale("x", {min: (min + at) / 2, max: (max + at) / 2}));
  };
  holder.addEventListener("keydown", event => {
    const move = {ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity}[event.key];
    if (event.key === "Escape") whole();
    if (move === undefined) return;
    event.preventDefault();
    const {min, max} = plot.scales.x;
    const first = Math.max(0, steps.findIndex(step => step >= min)), last = steps.findLastIndex(step => step <= max);
    const now = plot.cursor.idx ?? (move < 0 ? last + 1 : first - 1);
    const next = Math.min(Math.max(now + move, first), Math.max(first, last));
    plot.setCursor({left: plot.valToPos(steps[next], "x"), top: 10}, true, true);
  });
  const drawn = () => panel.lines.filter(isShown);
  const picture = () => {  // on paper, under its title and the names of its lines
    const from = plot.ctx.canvas, unit = 16 * devicePixelRatio;
    const canvas = el("canvas", {width: from.width, height: from.height + unit * (2 + drawn().length)}), on = canvas.getContext("2d");
    on.fillStyle = colour("--paper");
    on.fillRect(0, 0, canvas.width, canvas.height);
    on.drawImage(from, 0, canvas.height - from.height);
    [[panel.title, null], ...drawn().map(line => [line.name, line.colour])].forEach(([text, place], row) => {
      on.font = `${row ? "" : "bold "}${0.75 * unit}px sans-serif`;
      on.fillStyle = painted(place);
      on.fillText(text, unit / 2, unit * (row + 1.2));
    });
    return canvas;
  };
  const rows = () => {
    const named = drawn().flatMap(line => [["", line.values], [" low", line.low], [" high", line.high]].filter(([, column]) => column)
      .map(([end, column]) => [`${line.name}${end}`, spread(line, column)]));
    return [["step", ...named.map(([name]) => name)], ...steps.map((step, index) => [step, ...named.map(([, column]) => column[index])])];
  };
  figure.append(el("div", {class: "saves"},
    button("PNG", () => picture().toBlob(blob => save(`${panel.title}.png`, blob)), {class: "save", "aria-label": `PNG of ${panel.title}`}),
    button("CSV", () => saveCsv(panel.title, rows()), {class: "save", "aria-label": `CSV of ${panel.title}`}),
    button("zoom in", zoom, {class: "save", "aria-label": `zoom in on ${panel.title}`}),
    button("see all", whole, {class: "save", "aria-label": `see all of ${panel.title}`}),
    ...(panel.lines.length > 4 ? [[false, "no lines"], [true, "all lines"]] : []).map(([on, text]) =>
      button(text, () => toggle(null, on), {class: "save", "aria-label": `show ${text} of ${panel.title}`})),
    el("span", {class: "muted small drag"}, "drag to zoom, double click to see all")));
  plots.push({plot, size});
}

for (const figure of document.querySelectorAll("figure[data-panel]")) curve(figure, data.panels[figure.dataset.panel]);
const resized = () => plots.forEach(({plot, size}) => plot.setSize(size()));
addEventListener("resize", resized);
// On paper, curves have the colours of paper, too: a canvas is drawn before the styles of print hold.
const dark = [...document.styleSheets].filter(sheet => !sheet.href).flatMap(sheet => [...sheet.cssRules]).find(rule => rule.media?.mediaText.includes("dark"));
const onScreen = dark?.media.mediaText;
for (const [event, media] of [["beforeprint", "not all"], ["afterprint", onScreen]])
  addEventListener(event, () => { if (dark) dark.media.mediaText = media; resized(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => plots.forEach(({plot}) => plot.redraw(false)));

// ------------------------------------------------------------------ what the roles said

const place = document.getElementById("said");
if (!place || !data.said.episodes.length) return;
const {files, tasks, episodes} = data.said;
for (const one of episodes) for (const call of one.calls) call.x ??= "";  // what is empty is left out of the data
const roles = [...new Set(episodes.flatMap(one => one.calls.map(call => call.r)))];
const hue = role => `--tone: ${paint(Math.max(0, data.roles.indexOf(role)))}`;
const where = one => files[one.f];
const isRight = one => one.o === undefined ? null : one.o >= data.right;
const verdict = one => ({true: ["right", "good"], false: ["wrong", "bad"], null: ["not graded", "muted"]})[isRight(one)];
const named = file => file.kind === "training" ? `step ${file.step}` : `step ${file.step}, ${file.kind}`;
const short = (text, most = 24) => text === undefined ? "–" : text.length > most ? text.slice(0, most - 1) + "…" : text;
const signed = value => value === undefined ? "" : (value < 0 ? "−" : "+") + Math.abs(value).toFixed(2);
const taught = calls => calls.some(call => call.v);

const FEW = 8;  // transcripts at a time
let shading = "none";
function words(call) {
  const column = {"log-prob": call.l, gap: call.m}[shading];
  if (!column || !call.n) return [call.x];
  // Faint at probability 1, full at e^-4; gaps against the 0.01 that bfloat16 brings.
  const strength = value => Math.min(Math.abs(value) / (shading === "gap" ? 0.01 : 4), 1);
  const characters = [...call.x];  // ends count code points, not halves of them
  let start = 0;
  return call.n.map((end, index) => {
    const piece = el("span", {title: `${shading} ${column[index]}`,
      style: `background: color-mix(in srgb, var(--bad) calc(var(--fullest) * ${strength(column[index] ?? 0).toFixed(2)}), transparent)`},
      characters.slice(start, end).join(""));
    start = end;
    return piece;
  });
}

function callBlock(call, index) {
  const facts = [`slot ${call.i ?? 0}`, `turn ${call.j ?? 0}`, `policy ${call.y}`, `${call.z} tokens`, call.p && `path ${call.p}`,
    call.c && "cut off", call.u && "unreadable", call.d && `reads ${call.d.join(", ")}`,
    call.w !== undefined && `reward ${signed(call.w)}`, call.v !== undefined && `advantage ${signed(call.v)}`].filter(Boolean);
  return el("div", {class: "call", style: hue(call.r)},
    el("header", {}, el("b", {}, `[${index}] ${call.r}`), ` ${facts.join(" · ")}`),
    call.q && el("details", {}, el("summary", {}, "prompt"), el("pre", {}, call.q)),
    el("pre", {}, ...words(call)));
}

function transcript(one) {
  const [ending, kind] = verdict(one), task = tasks[one.t];
  const tools = at => (one.tools ?? []).filter(tool => at(tool.at ?? 0)).map(tool =>
    el("div", {class: "call"}, el("header", {}, el("b", {}, `[tool] ${tool.r}`)), el("pre", {}, tool.x)));
  const apart = text => el("bdi", {}, text);  // an answer may turn round the direction of what follows it
  const body = [...tools(at => at < 0)];
  one.calls.forEach((call, index) => body.push(callBlock(call, index), ...tools(at => at === index)));
  body.push(...tools(at => at >= one.calls.length));
  return el("article", {class: "episode"},
    el("h3", {}, `${named(where(one))}, `, el("span", {class: kind}, ending), one.lost ? `, lost by ${one.lost}` : ""),
    el("p", {class: "muted small"}, "task ", apart(task.id), `, sample ${one.s ?? 0}${one.p ? `, path ${one.p}` : ""}${one.o === undefined ? "" : `, outcome ${number(one.o)}`}`),
    el("pre", {}, task.question), ...body,
    el("p", {class: "small"}, "Answer: ", apart(one.a ?? "none"), ".", ...(task.gold === null ? [] : [" Wanted: ", apart(task.gold), "."]),
      ...(one.e ? [" Ended by an error: ", apart(one.e), "."] : [])));
}

const choice = (label, options, onchange) => {
  const select = el("select", {onchange}, ...options.map(([value, text]) => el("option", {value}, text)));
  return {select, label: el("label", {}, label, select)};
};
const grid = (name, head, rows) => {
  const table = el("table", {}, el("thead", {}, el("tr", {}, ...head.map(cell => el("th", {}, cell)))), el("tbody", {}, ...rows));
  return el("div", {}, csvOf(table, name), el("div", {class: "scroll"}, table));
};
const cell = (children, attributes = {}) => el("td", attributes, ...[children].flat());
const shown = el("div", {class: "shown", tabindex: "-1"});
const open = one => { shown.replaceChildren(transcript(one)); shown.focus(); shown.scrollIntoView({block: "nearest"}); };
const look = (one, text) => button(text, () => open(one), {class: "look"});

// Every episode that fits the filters.
function transcripts(wanted = {}) {
  const refresh = () => { count = FEW; list(); };
  const every = text => [["", text]];
  const inputs = {
    file: choice("Step ", [...every("all"), ...files.map((file, index) => [index, named(file)])], refresh),
    task: choice("Problem ", [...every("all"), ...tasks.map((task, index) => [index, short(task.id, 30)])], refresh),
    role: choice("Role ", [...every("all"), ...roles.map(role => [role, role])], refresh),
    end: choice("Ending ", [...every("all"), ["right", "right"], ["wrong", "wrong"], ["lost", "a right candidate was lost"], ["error", "an error"]], refresh),
    form: choice("Form ", [...every("all"), ["c", "cut off"], ["u", "unreadable"]], refresh),
    lost: choice("Lost by ", [...every("anybody"), ...[...roles, "nobody"].map(role => [role, role])], refresh),
  };
  for (const [name, value] of Object.entries(wanted)) inputs[name].select.value = String(value);
  const text = el("input", {type: "search", oninput: refresh, placeholder: "in prompts and completions"});
  const shade = choice("Shade tokens by ", [["none", "nothing"], ["log-prob", "log-prob"], ["gap", "gap between sampler and trainer"]],
    () => { shading = shade.select.value; list(); });
  shade.select.value = shading;
  const found = el("div"), told = el("p", {class: "muted small", role: "status"});
  let count = FEW;
  const fits = one => {
    const {file, task, role, end, form, lost} = Object.fromEntries(Object.entries(inputs).map(([name, {select}]) => [name, select.value]));
    const calls = one.calls.filter(call => !role || call.r === role), sought = text.value.toLowerCase();
    return (file === "" || one.f === +file) && (task === "" || one.t === +task) && (!role || calls.length > 0) &&
      (!end || end === verdict(one)[0] || end === "lost" && one.lost || end === "error" && one.e) &&
      (!form || calls.some(call => call[form])) && (!lost || one.lost === lost) &&
      (!sought || (role ? "" : tasks[one.t].question.toLowerCase()).includes(sought) ||
        calls.some(call => `${call.q ?? ""}\n${call.x}`.toLowerCase().includes(sought)));
  };
  const list = () => {
    const some = episodes.filter(fits), shown = el("div", {class: "multiples"}, ...some.slice(0, count).map(transcript));
    told.textContent = `${some.length} of ${episodes.length} recorded episodes`;
    const more = button("", () => {
      const next = some.slice(count, count + FEW).map(transcript);
      count += FEW;
      shown.append(...next);
      next[0].tabIndex = -1;
      next[0].focus();
      name();
    });
    const name = () => {
      more.textContent = `show ${Math.min(FEW, some.length - count)} more`;
      more.hidden = some.length <= count;
    };
    name();
    found.replaceChildren(shown, more);
  };
  list();
  return [el("form", {class: "filters", onsubmit: event => event.preventDefault()}, ...Object.values(inputs).map(input => input.label),
    el("label", {}, "Text ", text), shade.label), told, found];
}

// One problem through all recorded steps: same problem, same noise; where its answer turned, and whose answer turned first.
function problem() {
  const kinds = [...new Set(files.map(file => file.kind))].sort((a, b) => (b === "val") - (a === "val"));
  const kind = choice("Recorded in ", kinds.map(name => [name, name]), () => fill());
  const task = choice("Problem ", [], () => draw());
  const sample = choice("Sample ", [], () => draw());
  const path = choice("Path ", [], () => draw());
  const table = el("div");
  const of = () => episodes.filter(one => where(one).kind === kind.select.value);
  const fill = () => {
    const there = [...new Set(of().map(one => one.t))], samples = [...new Set(of().map(one => one.s ?? 0))];
    task.select.replaceChildren(...there.map(index => el("option", {value: index}, short(tasks[index].id, 40))));
    const paths = [...new Set(of().map(one => one.p ?? ""))];
    sample.select.replaceChildren(...samples.sort((a, b) => a - b).map(index => el("option", {value: index}, index)));
    path.select.replaceChildren(...paths.sort().map(name => el("option", {value: name}, name)));
    path.label.hidden = paths.length < 2;
    draw();
  };
  const draw = () => {
    const mine = of().filter(one => one.t === +task.select.value && (one.s ?? 0) === +sample.select.value &&
      (one.p ?? "") === path.select.value);
    const label = call => `${call.r} ${call.i ?? 0}${call.j ? `, turn ${call.j}` : ""}`;
    const heads = [...new Set(mine.flatMap(one => one.calls.map(label)))];
    let before = null;
    const rows = mine.map(one => {
      const calls = Object.fromEntries(one.calls.map(call => [label(call), call]));
      const turned = before && isRight(before) !== isRight(one);
      const first = turned && one.calls.find(call => before.calls.find(old => label(old) === label(call))?.a !== call.a);
      before = one;
      return el("tr", {class: turned ? "turned" : false}, el("th", {scope: "row"}, look(one, named(where(one)))),
        ...heads.map(head => cell(calls[head] ? [short(calls[head].a), calls[head].g === undefined ? "" : calls[head].g >= data.right ? " ✓" : " ✗"] : "",
          {class: first && label(first) === head ? "first" : false})),
        cell(short(one.a)), cell(verdict(one)[0], {class: verdict(one)[1]}),
        cell(turned ? `turned ${verdict(one)[0]}${first ? `: ${first.r} changed first` : ""}` : ""));
    });
    const task_ = tasks[+task.select.value];
    table.replaceChildren(el("pre", {}, task_.question), el("p", {class: "small"}, task_.gold === null ? "" : `Wanted: ${task_.gold}.`),
      grid("One problem", ["step", ...heads, "answer", "", ""], rows));
  };
  fill();
  return [el("p", {class: "muted small"}, "The same problem at every recorded step. In evaluations the noise is the same, too, so that only the weights differ. ✓ and ✗: a role's own answer was right or wrong."),
    el("div", {class: "filters"}, kind.label, task.label, sample.label, path.label), table];
}

// The episodes of one problem in one step, side by side.
function group() {
  const file = choice("Step ", files.map((one, index) => [index, named(one)]), () => fill());
  const task = choice("Problem ", [], () => draw());
  const table = el("div");
  const fill = () => {
    const there = [...new Set(episodes.filter(one => one.f === +file.select.value).map(one => one.t))];
    task.select.replaceChildren(...there.map(index => el("option", {value: index}, short(tasks[index].id, 40))));
    draw();
  };
  const draw = () => {
    const mine = episodes.filter(one => one.f === +file.select.value && one.t === +task.select.value);
    const most = Math.max(...mine.map(one => one.calls.length)), trained = mine.some(one => one.calls.some(call => call.v !== undefined));
    const shared = (one, other, index) => one?.p !== undefined && one.s === other.s && one.calls[index] && other.calls[index] &&
      (one.calls[index].p ?? "") === (other.calls[index].p ?? "");
    const rows = Array.from({length: most}, (_, index) => el("tr", {}, ...mine.map((one, column) => {
      const call = one.calls[index];
      if (shared(mine[column - 1], one, index)) return "";  // a call before a fork is one call, over its branches
      const branches = mine.slice(column).findIndex(other => !shared(one, other, index));
      return call ? cell([el("b", {style: `${hue(call.r)}; color: var(--tone)`}, `${"↳ ".repeat(call.p ? call.p.split(".").length : 0)}${call.r} ${call.i ?? 0}`), el("br"), short(call.a ?? "unreadable"), el("br"),
        el("span", {class: call.v > 0 ? "good" : call.v < 0 ? "bad" : "muted"}, call.w === undefined ? "" : `reward ${signed(call.w)}`, call.v === undefined ? "" : `, advantage ${signed(call.v)}`)],
        {colspan: branches === 0 ? 1 : branches < 0 ? mine.length - column : branches}) : cell("");
    })));
    const idle = trained && roles.filter(role => mine.some(one => one.calls.some(call => call.r === role)) && !mine.some(one => taught(one.calls.filter(call => call.r === role))));
    table.replaceChildren(el("pre", {}, tasks[+task.select.value].question),
      idle && idle.length ? el("p", {class: "bad small"}, `Taught nothing: ${idle.join(", ")}. All rewards that are compared with each other are equal.`) : "",
      grid("A whole group", mine.map(one => look(one, `sample ${one.s ?? 0}${one.p ? `, path ${one.p}` : ""}`)),
        [...rows, el("tr", {}, ...mine.map(one => cell([short(one.a), " ", verdict(one)[0]], {class: verdict(one)[1]})))]));
  };
  fill();
  return [el("p", {class: "muted small"}, "All recorded episodes of one problem in one step. An advantage says how much better a call did than those it is compared with; ↳ marks calls after a fork."),
    el("div", {class: "filters"}, file.label, task.label), table];
}

// By step and role: wrong outcomes where a right candidate was there.
function losses() {
  const losers = [...roles, "nobody"].filter(role => episodes.some(one => one.lost === role));
  const rows = files.map((file, index) => {
    const wrong = episodes.filter(one => one.f === index && isRight(one) === false);
    return el("tr", {}, el("th", {scope: "row"}, named(file)), cell(String(wrong.length), {class: "number"}), ...losers.map(role => {
      const lost = wrong.filter(one => one.lost === role).length;
      return cell(lost ? button(`${percent(lost / wrong.length)} (${lost})`, () => show("Transcripts", {file: index, lost: role}), {class: "look"}) : "–", {class: "number"});
    }));
  });
  return [el("p", {class: "muted small"}, "The share and number of the recorded wrong outcomes in which some call had the right answer, by the role of the first call that read it; “nobody”: no later call did. Click a number for its transcripts."),
    losers.length ? grid("Who lost it", ["", "wrong", ...losers.map(role => role === "nobody" ? role : `lost by ${role}`)], rows) : el("p", {}, "No recorded episode had a right candidate and lost it.")];
}

const views = {"Transcripts": transcripts, "One problem through the steps": problem, "A whole group": group, "Who lost it": losses};
const tabs = el("div", {role: "tablist", class: "tabs"}), panel = el("div", {role: "tabpanel", id: "view", tabindex: "0"});
function show(name, wanted) {
  for (const tab of tabs.children) {
    const on = tab.textContent === name;
    tab.setAttribute("aria-selected", on);
    tab.tabIndex = on ? 0 : -1;
  }
  shown.replaceChildren();
  panel.replaceChildren(...views[name](wanted));
  panel.setAttribute("aria-label", name);
  if (wanted?.lost) panel.focus();  // the number that led here is gone
}
for (const name of Object.keys(views)) tabs.append(button(name, () => show(name), {role: "tab", "aria-controls": "view"}));
tabs.addEventListener("keydown", event => {
  const move = {ArrowLeft: -1, ArrowRight: 1}[event.key];
  if (!move) return;
  const all = [...tabs.children], next = all[(all.indexOf(document.activeElement) + move + all.length) % all.length];
  next.focus();
  next.click();
});
place.replaceChildren(tabs, panel, shown);
show("Transcripts", {});
})();
