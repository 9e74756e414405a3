// Unpacks the Chromium of @sparticuz/chromium: node unpack.mjs PACKAGE TARGET
import { readFileSync, writeFileSync } from 'node:fs';
import { brotliDecompressSync } from 'node:zlib';

const [from, to] = process.argv.slice(2);
const unpacked = (name) => brotliDecompressSync(readFileSync(`${from}/bin/${name}.br`));
writeFileSync(`${to}/chromium`, unpacked('chromium'), { mode: 0o755 });
for (const name of ['al2023.tar', 'fonts.tar']) writeFileSync(`${to}/${name}`, unpacked(name));
