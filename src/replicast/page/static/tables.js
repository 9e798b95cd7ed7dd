// Numbers of a table: how they are read from text, shown, and written into a safetensors file.

const FLOATS = { float64: [Infinity, 17], float32: [3.4028235677973366e38, 9], bfloat16: [3.3961775292304601e38, 4], float16: [65520, 5] };
const ARRAYS = {
  float64: ["F64", Float64Array], float32: ["F32", Float32Array], bfloat16: ["BF16", null], float16: ["F16", globalThis.Float16Array],
  int8: ["I8", Int8Array], int16: ["I16", Int16Array], int32: ["I32", Int32Array], int64: ["I64", BigInt64Array],
  uint8: ["U8", Uint8Array], uint16: ["U16", Uint16Array], uint32: ["U32", Uint32Array], uint64: ["U64", BigUint64Array], bool: ["BOOL", Uint8Array],
};

/** The rows that a text such as 3,5,10:20 names, as the command line and the server read it. */
export function rowsOf(text, size) {
  const found = [];
  for (const part of text.split(",")) {
    const match = /^\s*(\d{1,15})(?::(\d{1,15}))?\s*$/.exec(part);
    if (!match) throw new Error(`Rows are given as 3,5,10:20, where 20 is not included. Received: ${part.trim().slice(0, 80) || "nothing"}`);
    const start = Number(match[1]), stop = match[2] === undefined ? start + 1 : Number(match[2]);
    if (stop <= start) throw new Error(`A range must not be empty. Received: ${part.trim()}`);
    if (stop > size) throw new Error(`The table has the rows 0 to ${size - 1}. Received: ${part.trim()}`);
    for (let row = start; row < stop; row += 1) {
      if (found.push(row) > 10_000) throw new Error("At most 10,000 rows can be looked up at a time.");
    }
  }
  return found;
}

/** Ids as such a text; each must be a row of the table, and none may come twice. */
export function rowsText(ids, size) {
  const known = new Set(), ranges = [];
  ids.forEach((text, at) => {
    const id = Number(text);
    if (!/^\s*\d+\s*$/.test(String(text)) || id >= size) throw new Error(`Line ${at + 1}: this table has no row “${String(text).slice(0, 40)}”. Expected: 0 to ${size - 1}.`);
    if (known.has(id)) throw new Error(`Line ${at + 1}: row ${id} is there twice.`);
    known.add(id);
    if (ranges.length && ranges.at(-1)[1] === id) ranges.at(-1)[1] = id + 1;
    else ranges.push([id, id + 1]);
  });
  return ranges.map(([start, stop]) => (stop - start > 1 ? `${start}:${stop}` : String(start))).join(",");
}

/** What a spreadsheet copies, CSV, or JSON: lines of texts; where each has one more than a row has values, that is its id. */
export function pastedRows(text, width) {
  const { ids, lines } = block(text);
  if (ids || !lines.every((line) => line.length === width + 1)) return { ids, lines };
  return { ids: lines.map((line) => line[0]), lines: lines.map((line) => line.slice(1)) };
}

function block(text) {
  const whole = text.trim();
  if (!whole) throw new Error("There is nothing in it.");
  if (/^[[{]/.test(whole)) return jsonBlock(whole);
  const separator = whole.includes("\t") ? "\t" : whole.includes(";") ? ";" : whole.includes(",") ? "," : /\s+/;
  const lines = whole.split(/\r?\n/).filter((line) => line.trim()).map((line) => line.replace(/\r$/, "").split(separator).map((one) => one.trim().replace(/^"(.*)"$/, "$1")));
  if (lines.length > 1 && lines[0].every((one) => one && Number.isNaN(Number(one)) && !/\d/.test(one[0]))) lines.shift(); // Headings.
  return { ids: null, lines };
}

function jsonBlock(text) {
  let value;
  try {
    value = JSON.parse(text);
  } catch (error) {
    throw new Error(`This is not JSON: ${error.message}`);
  }
  const row = (one) => [one].flat(Infinity).map((number) => (typeof number === "number" ? String(number) : JSON.stringify(number)));
  if (!Array.isArray(value)) return { ids: Object.keys(value), lines: Object.values(value).map(row) };
  if (!value.length) throw new Error("There is nothing in it.");
  return { ids: null, lines: Array.isArray(value[0]) ? value.map(row) : [row(value)] };
}

/** The number that a text says, as the table can have it; or what is wrong with it. */
export function parsed(text, dtype) {
  const given = String(text).trim();
  const value = Number(given);
  const no = (problem) => ({ value: NaN, problem });
  if (!given) return no("It is empty");
  if (/^[-+]?(nan|inf|infinity)$/i.test(given)) return no(`“${given}” is not finite`);
  if (/^[-+]?\d+,\d+$/.test(given)) return no(`“${given}” is not a number: write ${given.replace(",", ".")}`);
  if (!/^[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?$/i.test(given)) return no(`“${given.slice(0, 40)}” is not a number`);
  if (FLOATS[dtype]) return Math.abs(value) < FLOATS[dtype][0] ? { value: dtype === "float32" ? Math.fround(value) : value, problem: "" } : no(`${given} is too large for ${dtype}`);
  if (!Number.isInteger(value)) return no(`${given} is not an integer, as ${dtype} needs`);
  const bits = Number(/\d+$/.exec(dtype)?.[0] ?? 1), signed = dtype.startsWith("int");
  const [low, high] = signed ? [-(2 ** (bits - 1)), 2 ** (bits - 1) - 1] : [0, 2 ** bits - 1];
  if (value < low || value > high || !Number.isSafeInteger(value)) return no(`${given} is outside of ${dtype}${bits === 64 ? ", or too large for this page" : ""}`);
  return { value, problem: "" };
}

/** A value with the digits that tell it from its neighbours. */
export function shown(value, dtype) {
  if (!Number.isFinite(value) || !FLOATS[dtype]) return String(value);
  for (let digits = 1; digits <= FLOATS[dtype][1]; digits += 1) {
    const text = String(Number(value.toPrecision(digits)));
    if (dtype === "float32" ? Math.fround(Number(text)) === value : Number(text) === value) return text;
  }
  return String(Number(value.toPrecision(FLOATS[dtype][1])));
}

/** A value for a narrow cell. */
export function brief(value) {
  if (!Number.isFinite(value) || Number.isInteger(value)) return String(value);
  if (Math.abs(value) >= 1000 && Math.abs(value) < 1e7) return String(Number(value.toFixed(1)));
  return Math.abs(value) >= 1e-4 && Math.abs(value) < 1e7 ? String(Number(value.toPrecision(4))) : value.toExponential(2);
}

/** Rows as `push --assign-rows` reads them. */
export function fileOf(table, ids, rows) {
  const values = rows.flat();
  const [name, Kind] = ARRAYS[table.dtype];
  if (Kind === undefined) throw new Error(`This browser has no ${table.dtype}: use replicast push --assign-rows.`);
  const bad = values.findIndex((value) => !Number.isFinite(value) || (!FLOATS[table.dtype] && !Number.isSafeInteger(value)));
  if (bad >= 0) throw new Error(`Row ${ids[Math.floor(bad / rows[0].length)]}, column ${bad % rows[0].length}: ${values[bad]} cannot be written. Change it too.`);
  const integers = Kind === BigInt64Array || Kind === BigUint64Array;
  const data = Kind === null ? bfloat16(values) : new Kind(integers ? values.map(BigInt) : values);
  const indices = new BigInt64Array(ids.map(BigInt));
  return safetensors([`${table.name}.indices`, "I64", [ids.length], indices], [table.name, name, [ids.length, ...table.shape.slice(1)], data]);
}

/** One number, as `push --set` assigns it. */
export const numberFile = (name, value) => safetensors([name, "F32", [], new Float32Array([value])]);

/** @param entries of each tensor the name, the type, the shape and the values */
function safetensors(...entries) {
  const tensors = {};
  let end = 0;
  for (const [name, dtype, shape, data] of entries) tensors[name] = { dtype, shape, data_offsets: [end, end += data.byteLength] };
  const text = new TextEncoder().encode(JSON.stringify(tensors));
  const header = new Uint8Array(8 + Math.ceil(text.length / 8) * 8).fill(32);
  new DataView(header.buffer).setBigUint64(0, BigInt(header.length - 8), true);
  header.set(text, 8);
  return new Blob([header, ...entries.map((one) => one[3])]);
}

/** The upper half of each float32, rounded to the nearest, ties to even. */
function bfloat16(values) {
  const bits = new Uint32Array(new Float32Array(values).buffer);
  return new Uint16Array(bits.map((one) => (one + 0x7fff + ((one >>> 16) & 1)) >>> 16));
}
