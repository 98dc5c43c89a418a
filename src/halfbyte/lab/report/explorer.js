// The nibble explorer: a byte, its bits, and what its halves mean in a format.
{
  const state = { format: DATA.explorer[0], position: 0, byte: 0 };
  const buttons = [...byId("explorer-bits").querySelectorAll("button")];
  const position = () => state.format.positions[state.position];

  // What a half of the byte means: codes from the format's own unpacking, values from its own dequantising.
  function meaning(nibble) {
    const block = state.format.blocks[nibble.block];
    const code = parseInt(state.format.codes[nibble.half][state.byte], 16);
    return { ...nibble, ...block, code, entry: state.format.codebook[code], value: block.values[code] };
  }

  function chooseFormat(index) {
    state.format = DATA.explorer[index];
    byId("explorer-position").max = state.format.positions.length - 1;
    choosePosition(telling(state.format));
  }

  function choosePosition(index) {
    state.position = index;
    byId("explorer-position").value = index;
    chooseByte(position().byte);
  }

  function chooseByte(byte) {
    state.byte = byte;
    render();
  }

  function render() {
    const both = position().nibbles.map(meaning);
    for (const button of buttons) {
      const bit = Number(button.dataset.bit);
      const set = (state.byte >> bit) & 1;
      button.textContent = set;
      button.setAttribute("aria-pressed", Boolean(set));
      button.setAttribute("aria-label", `bit ${bit}, ${bit > 3 ? "high" : "low"} nibble`);
    }
    const field = byId("explorer-hex");
    if (document.activeElement !== field || parseInt(field.value, 16) !== state.byte) field.value = hex(state.byte);
    field.removeAttribute("aria-invalid");
    byId("explorer-place").textContent = `${position().name}, ${state.position + 1} of ${state.format.positions.length}`;
    byId("explorer-position").setAttribute("aria-valuetext", position().name);
    const words = both.map((each) => `${place(each)} is ${signed(each.value)}`).join("; ");
    byId("explorer-said").textContent = `0x${hex(state.byte)}: ${words}`;
    byId("explorer-pair").replaceChildren(...both.map(card));
    byId("explorer-origin").textContent = state.format.example;
    drawLine(both);
    drawMap(both);
    listCodes(both);
  }

  const place = (nibble) => `W[${nibble.n}, ${nibble.k}]`;

  function card(each, index) {
    const { half, code } = each;
    const nibbles = (byte) => `${bits(byte >> 4, 4)} ${bits(byte & 15, 4)}`;
    const done = half === "high" ? ">> 4" : "& 0000 1111";
    const lines = [
      ["code", `${each.expression} = ${code}`, `${nibbles(state.byte)} ${done} = ${nibbles(code)}` +
        (each.word ? `; of the 32-bit word: ${each.word}` : "")],
      ["codebook", `codebook[${code}] = ${signed(each.entry)}`],
      ["scale", `block ${each.block}: ${signed(each.scale)}`, each.scale_from.join("; ")],
    ];
    let formula = `${signed(each.scale)} × ${signed(each.entry)}`;
    if (each.offset !== null) {
      lines.push(["offset", `block ${each.block}: ${signed(each.offset)}`, each.offset_from.join("; ")]);
      formula += ` ${each.offset < 0 ? "−" : "+"} ${Math.abs(each.offset)}`;
    }
    const list = element("dl", {}, ...lines.flatMap(([name, value, more]) => [
      element("dt", {}, name),
      element("dd", {}, value, ...(more ? [element("small", {}, more)] : [])),
    ]));
    list.append(element("dt", {}, "value"), element("dd", { class: "result" }, signed(each.value), element("small", {}, `${formula}, rounded once to fp32`)));
    const title = element("h3", {}, `${place(each)} `, element("span", { class: `${half}-text` }, `${half} nibble`));
    return element("article", {
      class: half, "data-index": index, "data-half": half, "data-n": each.n, "data-k": each.k, "data-code": code,
      "data-entry": each.entry, "data-scale": each.scale, "data-offset": each.offset ?? "", "data-value": each.value,
    }, title, list);
  }

  // The 16 entries on a line; the high nibble's mark above it, the low nibble's below.
  function drawLine(both) {
    const book = state.format.codebook;
    const [low, high] = [Math.min(...book), Math.max(...book)];
    const x = (entry) => 24 + (592 * (entry - low)) / (high - low);
    const parts = [element("line", { class: "axis", x1: 24, x2: 616, y1: 48, y2: 48 })];
    for (const entry of book) parts.push(element("line", { class: "tick", x1: x(entry), x2: x(entry), y1: 40, y2: 56 }));
    for (const each of both) {
      const at = x(each.entry);
      const up = each.half === "high";
      const path = up ? `M${at} 40l-9 -14h18z` : `M${at} 56l-9 14h18z`;
      const anchor = at < 90 ? "start" : at > 550 ? "end" : "middle";
      parts.push(element("path", { class: each.half, d: path }));
      parts.push(element("text", { x: anchor === "start" ? 2 : anchor === "end" ? 638 : at, y: up ? 20 : 90, "text-anchor": anchor }, `${each.code}: ${signed(each.entry)}`));
    }
    const line = byId("explorer-line");
    line.replaceChildren(...parts);
    line.setAttribute("aria-label", `Codebook from ${low} to ${high}. ` +
      both.map((each) => `${each.half} nibble: entry ${each.code}, ${each.entry}`).join("; "));
  }

  // The weights whose codes the bytes at hand hold, in the order of the matrix; the byte's two stand out.
  function drawMap(both) {
    const all = state.format.positions.flatMap((each) => each.nibbles);
    const rows = [...new Set(all.map((each) => each.n))].sort((a, b) => a - b);
    const columns = Math.min(32, Math.max(...all.map((each) => each.k)) + 1);
    const spot = ({ n, k }) => [k % columns, rows.length > 1 ? rows.indexOf(n) : Math.floor(k / columns)];
    const lines = Math.max(...all.map((each) => spot(each)[1])) + 1;
    const parts = [];
    for (const each of all) {
      const [x, y] = spot(each);
      const chosen = both.find((one) => one.n === each.n && one.k === each.k);
      parts.push(element("rect", { class: `cell ${chosen ? chosen.half : ""}`, x: 20 * x + 1, y: 20 * y + 1, width: 18, height: 18, rx: 3 }));
      if (chosen) parts.push(element("text", { class: "inside", x: 20 * x + 10, y: 20 * y + 14, "text-anchor": "middle" }, chosen.code));
    }
    const map = byId("explorer-map");
    map.setAttribute("viewBox", `0 0 ${20 * columns} ${20 * lines}`);
    map.setAttribute("aria-label", both.map((each) => `${each.half} nibble: row ${each.n}, k = ${each.k}`).join("; "));
    map.replaceChildren(...parts);
    const which = rows.length > 1 ? `rows 0 to ${rows.at(-1)}, k from 0` : `row 0, k from 0, ${columns} a line`;
    byId("explorer-map-title").textContent = `Which weights the byte holds: W, ${which}`;
  }

  function listCodes(both) {
    const blocks = [...new Set(both.map((each) => each.block))];
    const rows = state.format.codebook.map((entry, code) => [String(code), bits(code, 4), signed(entry),
      ...blocks.map((block) => signed(state.format.blocks[block].values[code]))]);
    const table = byId("explorer-codes");
    fillTable(table, ["code", "bits", "codebook", ...blocks.map((block) => `value in block ${block}`)], rows);
    for (const each of both) table.tBodies[0].rows[each.code].classList.add(`chosen-${each.half}`);
  }

  fill(byId("explorer-format"), DATA.explorer.map((format, index) => [index, `${format.name}, blocks of ${format.blocksize}`]));
  byId("explorer-format").addEventListener("change", (event) => chooseFormat(Number(event.target.value)));
  byId("explorer-position").addEventListener("input", (event) => choosePosition(Number(event.target.value)));
  byId("explorer-example").addEventListener("click", () => chooseByte(position().byte));

  const field = byId("explorer-hex");
  field.addEventListener("input", () => {
    const valid = /^[0-9a-fA-F]{1,2}$/.test(field.value);
    if (valid) chooseByte(parseInt(field.value, 16));
    else field.setAttribute("aria-invalid", "true");
  });
  field.addEventListener("blur", () => { field.value = hex(state.byte); field.removeAttribute("aria-invalid"); });
  field.addEventListener("keydown", (event) => {
    const step = { ArrowUp: 1, ArrowDown: 255 }[event.key];
    if (!step) return;
    event.preventDefault();
    chooseByte((state.byte + step) % 256);
  });

  // One stop for Tab, arrows within: the usual way of a toolbar.
  function focusBit(index) {
    const wanted = buttons[Math.max(0, Math.min(7, index))];
    for (const button of buttons) button.tabIndex = button === wanted ? 0 : -1;
    wanted.focus();
  }
  buttons.forEach((button, index) => {
    const mask = 1 << Number(button.dataset.bit);
    button.addEventListener("click", () => { chooseByte(state.byte ^ mask); focusBit(index); });
    button.addEventListener("keydown", (event) => {
      const to = { ArrowLeft: index - 1, ArrowRight: index + 1, Home: 0, End: 7 }[event.key];
      if (to !== undefined) focusBit(to);
      else if (event.key === "1") chooseByte(state.byte | mask);
      else if (event.key === "0") chooseByte(state.byte & ~mask);
      else return;
      event.preventDefault();
    });
  });

  chooseFormat(0);
}
