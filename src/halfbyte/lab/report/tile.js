// One output tile: bytes and operations of each step, for the sizes chosen.
{
  const T = DATA.tile;
  const inputs = Object.fromEntries(["M", "N", "K"].map((name) => [name, byId(`tile-${name}`)]));
  const steps = [...byId("tile-steps").children];
  let current = 0;

  const unit = (number, [name, ...larger]) => number < 1e3 || !larger.length ? [number, name] : unit(number / 1e3, larger);
  function bytes(number) {
    const [value, name] = unit(number, ["B", "kB", "MB", "GB", "TB"]);
    return name === "B" ? `${grouped(number)} B` : `${grouped(number)} B (${value.toPrecision(3)} ${name})`;
  }
  function duration(seconds) {
    const [value, name] = unit(seconds * 1e9, ["ns", "µs", "ms", "s"]);
    return `${value.toPrecision(3)} ${name}`;
  }

  const partBytes = (part, n, k) => part.fixed + part.bytes * Math.ceil((n * k) / part.weights);
  const packedBytes = (format, n, k) => format.parts.reduce((sum, part) => sum + partBytes(part, n, k), 0);

  // A row's weights lie in this many blocks; blocks that ignore rows may begin and end inside one.
  function runs(format, rows, k) {
    let sum = 0;
    for (let row = 0; row < rows; row++) {
      sum += Math.floor((row * k + k - 1) / format.blocksize) - Math.floor((row * k) / format.blocksize) + 1;
    }
    return sum;
  }

  function count(format, tileRows, m, n, k) {
    const rows = Math.min(tileRows, n);
    const weights = rows * k;
    const packed = packedBytes(format, rows, k);
    const code_bytes = Math.ceil(weights / 2);
    const mma = Math.ceil(rows / T.mma.m) * Math.ceil(m / T.mma.n) * Math.ceil(k / T.mma.k);
    return {
      rows, weights, code_bytes, packed_bytes: packed, scale_bytes: packed - code_bytes,
      dense_bytes: weights * T.activation_bytes, x_bytes: m * k * T.activation_bytes,
      out_bytes: m * rows * T.activation_bytes, sum_bytes: m * rows * T.sum_bytes,
      tiles: Math.ceil(n / tileRows), mma, multiply_adds: weights * m,
      fill: m / (Math.ceil(m / T.mma.n) * T.mma.n), scale_steps: runs(format, rows, k) * m,
    };
  }

  const format = () => T.families[byId("tile-family").value].formats[byId("tile-blocksize").value];

  // The sizes, or null with the reason on the page.
  function sizes() {
    const chosen = format();
    const found = {};
    const wrong = [];
    for (const [name, input] of Object.entries(inputs)) {
      const multiple = { M: 1, N: chosen.n_multiple, K: chosen.k_multiple }[name];
      const value = Number(input.value);
      const whole = Number.isInteger(value) && value >= 1 && value <= Number(input.max);
      const fits = whole && value % multiple === 0;
      input.setAttribute("aria-invalid", !fits);
      if (!whole) wrong.push(`${name} must be a whole number from 1 to ${grouped(Number(input.max))}.`);
      else if (!fits) wrong.push(`${chosen.key}: ${name} must be a multiple of ${multiple}.`);
      found[name] = value;
    }
    byId("tile-error").textContent = wrong.join(" ");
    byId("tile-body").hidden = wrong.length > 0;
    return wrong.length ? null : found;
  }

  function render() {
    const size = sizes();
    if (!size) return;
    const chosen = format();
    const { M, N, K } = size;
    const tile = count(chosen, Number(byId("tile-rows").value), M, N, K);
    const shown = {
      ...Object.fromEntries(Object.entries(tile).map(([name, value]) => [name, name.endsWith("_bytes") ? bytes(value) : grouped(value)])),
      M: grouped(M), K: grouped(K), other_tiles: grouped(tile.tiles - 1), blocksize: grouped(chosen.blocksize),
      bits: String(Number(((8 * tile.packed_bytes) / tile.weights).toPrecision(5))), fill: `${(100 * tile.fill).toFixed(0)} %`,
      mma_shape: `mma.m${T.mma.m}n${T.mma.n}k${T.mma.k}`,
    };
    for (const slot of byId("tile-steps").querySelectorAll("[data-n]")) slot.textContent = shown[slot.dataset.n];
    const most = Math.max(tile.packed_bytes, tile.dense_bytes, tile.x_bytes, tile.out_bytes);
    for (const bar of byId("tile-steps").querySelectorAll("[data-bar]")) bar.style.setProperty("--share", tile[bar.dataset.bar] / most);
    byId("tile-offset").hidden = !chosen.offset;
    byId("tile-steps").dataset.counted = JSON.stringify(tile);
    const part = (each) => [each.name, grouped(each.fixed || each.bytes), each.fixed ? "the matrix" : `${grouped(each.weights)} weights`, bytes(partBytes(each, tile.rows, K))];
    fillTable(byId("tile-parts"), ["part", "bytes", "for each begun", "this tile"], chosen.parts.map(part));
    example();
    layer(chosen, M, N, K);
  }

  // Some weights of the explorer's example in this family's default format.
  function example() {
    const shown = DATA.explorer[byId("tile-family").value];
    const from = telling(shown);
    const first = shown.positions.slice(from, from + 2);
    const codes = first.flatMap((each) => each.nibbles.map((nibble) => ({
      each, nibble, code: parseInt(shown.codes[nibble.half][each.byte], 16) })));
    byId("tile-bytes").textContent = shown.positions.slice(from, from + 8).map((each) => hex(each.byte)).join(" ");
    byId("tile-codes").textContent = codes.map(({ each, nibble, code }) =>
      `${nibble.expression.replace("byte", `0x${hex(each.byte)}`)} = ${code}`).join(", ");
    byId("tile-entries").textContent = codes.map(({ code }) => `${code} → ${signed(shown.codebook[code])}`).join(", ");
  }

  function layer(chosen, M, N, K) {
    const memory = T.memories[byId("tile-memory").value];
    const moved = M * K * T.activation_bytes + M * N * T.activation_bytes;
    const kinds = [[chosen.key, packedBytes(chosen, N, K)], ["16 bits", N * K * T.activation_bytes]];
    const seconds = kinds.map(([, weights]) => (weights + moved) / (memory.tb_per_s * 1e12));
    const rows = kinds.map(([name, weights], i) => [name, bytes(weights), bytes(moved), duration(seconds[i]),
      ((2 * M * N * K) / (weights + moved)).toPrecision(3)]);
    fillTable(byId("tile-layer"), ["weights in", "bytes of weights", "x and y", "time of the bytes", "FLOP a byte"], rows);
    byId("tile-layer").dataset.counted = JSON.stringify({ packed: kinds[0][1], dense: kinds[1][1], seconds });
    const arithmetic = memory.tflops ? (2 * M * N * K) / (memory.tflops * 1e12) : 0;
    const [packed, dense] = seconds.map((each) => Math.max(each, arithmetic));
    const roofs = `${Number(memory.tb_per_s.toPrecision(4))} TB/s` + (memory.tflops ? ` and a quoted ${memory.tflops} TFLOP/s` : "");
    const bound = !memory.tflops ? "Its arithmetic is not counted here." :
      `Its arithmetic takes at least ${duration(arithmetic)}: ${arithmetic > seconds[0] ? "that is the bound, not memory." : "memory is the bound."}`;
    const words = `At ${roofs} the packed layer takes at least ${duration(packed)}, a 16-bit one ${duration(dense)}: ${(dense / packed).toPrecision(3)} times as long. ${bound}`;
    byId("tile-bound").textContent = words;
  }

  function choose(index, focus) {
    current = Math.max(0, Math.min(steps.length - 1, index));
    steps.forEach((step, i) => {
      if (i === current) step.setAttribute("aria-current", "step");
      else step.removeAttribute("aria-current");
      step.querySelector("button").setAttribute("aria-expanded", i === current);
    });
    const on = steps[current].dataset.at.split(" ");
    for (const station of byId("tile-stations").children) station.classList.toggle("on", on.includes(station.dataset.station));
    byId("tile-back").disabled = current === 0;
    byId("tile-next").disabled = current === steps.length - 1;
    byId("tile-where").textContent = `Step ${current + 1} of ${steps.length}: ${steps[current].querySelector("button").textContent}`;
    if (focus) steps[current].querySelector("button").focus();
  }

  fill(byId("tile-family"), T.families.map((family, index) => [index, family.name]));
  fill(byId("tile-rows"), T.tile_rows.map((rows) => [rows, String(rows)]));
  fill(byId("tile-memory"), T.memories.map((memory, index) => [index, `${memory.name}: ${Number(memory.tb_per_s.toPrecision(3))} TB/s`]));
  byId("tile-rows").value = 64;
  function chooseFamily() {
    fill(byId("tile-blocksize"), T.families[byId("tile-family").value].formats.map((each, index) => [index, String(each.blocksize)]));
    byId("tile-blocksize").disabled = byId("tile-blocksize").options.length === 1;
    render();
  }
  byId("tile-family").addEventListener("change", chooseFamily);
  for (const id of ["tile-blocksize", "tile-rows", "tile-memory"]) byId(id).addEventListener("change", render);
  for (const input of Object.values(inputs)) input.addEventListener("input", render);
  byId("tile-back").addEventListener("click", () => choose(current - 1));
  byId("tile-next").addEventListener("click", () => choose(current + 1));
  steps.forEach((step, index) => {
    const button = step.querySelector("button");
    button.addEventListener("click", () => choose(index));
    button.addEventListener("keydown", (event) => {
      const to = { ArrowUp: index - 1, ArrowDown: index + 1, Home: 0, End: steps.length - 1 }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      choose(to, true);
    });
  });
  chooseFamily();
  choose(0);
}
