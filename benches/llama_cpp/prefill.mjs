// Times llama.cpp on one GGUF file: prefill, a short batch over a kept context, decode.
//
//   node prefill.mjs MODEL.gguf [--threads 2] [--runs 5] [--lengths 512,2048] [--batch 36] [--decode 32] [--json]
//
// Every prefill starts from an emptied sequence. Times are milliseconds around one call into llama.cpp: of the wall clock,
// and of CPU time summed over the threads. On a busy machine llama.cpp's threads wait for each other at barriers, so that
// wall times there mean little; the CPU time of one thread (--threads 1) still does. The load average is printed.
import {readFileSync} from "node:fs";
import {basename} from "node:path";
import {loadavg} from "node:os";
import {parseArgs} from "node:util";
import {getLlama, LlamaLogLevel} from "node-llama-cpp";

const {values: flags, positionals} = parseArgs({
    allowPositionals: true,
    options: {
        threads: {type: "string", default: "2"},
        runs: {type: "string", default: "5"},
        lengths: {type: "string", default: "512,2048"},
        batch: {type: "string", default: "36"},
        decode: {type: "string", default: "32"},
        json: {type: "boolean", default: false}
    }
});
if (positionals.length !== 1) {
    console.error("usage: node prefill.mjs MODEL.gguf [--threads N] [--runs N] [--lengths A,B] [--batch N] [--decode N] [--json]");
    process.exit(2);
}
const [modelPath] = positionals;
const threads = count("threads"), runs = count("runs"), batch = count("batch"), decode = count("decode");
const lengths = flags.lengths.split(",").map(Number);
const kept = lengths[0];

const llama = await getLlama({gpu: false, build: "never", logLevel: LlamaLogLevel.error, maxThreads: threads});
const model = await llama.loadModel({modelPath});
const context = await model.createContext({
    contextSize: Math.max(...lengths) + batch + decode + 16,
    sequences: 1,
    threads: {ideal: threads, min: threads}
});
const sequence = context.getSequence();
const loadBefore = loadavg()[0];

const rows = [];
for (const length of lengths) {
    const prompt = tokens(length);
    await fresh(() => sequence.evaluateWithoutGeneratingNewTokens(prompt)); // faults the weights in
    const prefill = [], firstToken = [];
    for (let run = 0; run < runs; run++) {
        prefill.push(await fresh(() => sequence.evaluateWithoutGeneratingNewTokens(prompt)));
        firstToken.push(await fresh(() => sequence.evaluate(prompt, {temperature: 0}).next()));
    }
    rows.push(row(`prefill ${length}`, length, prefill), row(`first token ${length}`, length, firstToken));
}

await fresh(() => sequence.evaluateWithoutGeneratingNewTokens(tokens(kept)));
const short = [];
for (let run = 0; run <= runs; run++) {
    const time = await timed(() => sequence.evaluateWithoutGeneratingNewTokens(tokens(batch, run + 1)));
    await sequence.eraseContextTokenRanges([{start: kept, end: sequence.nextTokenIndex}]);
    if (run > 0)
        short.push(time);
}
rows.push(row(`batch ${batch} over ${kept}`, batch, short));

const steps = [];
await fresh(async () => {
    const generated = sequence.evaluate(tokens(kept), {temperature: 0, yieldEogToken: true});
    await generated.next();
    for (let step = 0; step < decode; step++)
        steps.push(await timed(() => generated.next()));
});
rows.push(row(`decode over ${kept}`, 1, steps));

const report = {
    model: basename(modelPath),
    package: `node-llama-cpp ${version("node-llama-cpp")}, llama.cpp ${llama.llamaCppRelease.release}`,
    backend: cpuLibrary(),
    system: llama.systemInfo.trim(),
    threads: context.currentThreads || threads,
    batchSize: context.batchSize,
    flashAttention: context.flashAttention,
    load: {before: loadBefore, after: loadavg()[0]},
    rows
};
if (flags.json)
    console.log(JSON.stringify(report, null, 1));
else
    print(report);
await llama.dispose();

/** A positive whole number from the command line. */
function count(name) {
    const n = Number(flags[name]);
    if (!Number.isInteger(n) || n < 1) {
        console.error(`--${name}: found "${flags[name]}", expected a whole number from 1 on`);
        process.exit(2);
    }
    return n;
}

/** Pseudo-random ids of ordinary tokens: the time of a dense model does not depend on which they are. */
function tokens(n, seed = 1) {
    const ids = [];
    for (let state = seed; ids.length < n;) {
        state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
        ids.push(256 + (state >>> 8) % 20000);
    }
    return ids;
}

async function timed(call) {
    const start = performance.now(), spent = process.cpuUsage();
    await call();
    const wall = performance.now() - start, {user, system} = process.cpuUsage(spent);
    return {wall, cpu: (user + system) / 1000};
}

async function fresh(call) {
    await sequence.clearHistory();
    return timed(call);
}

function row(name, n, times) {
    const of = (which) => {
        const sorted = times.map((time) => time[which]).sort((a, b) => a - b);
        const median = (sorted[(sorted.length - 1) >> 1] + sorted[sorted.length >> 1]) / 2;
        return {median, min: sorted[0], max: sorted.at(-1)};
    };
    const ms = of("wall"), cpuMs = of("cpu");
    return {name, tokens: n, runs: times.length, ms, cpuMs, tokensPerSecond: {median: 1000 * n / ms.median, best: 1000 * n / ms.min}};
}

/** The one CPU library that ggml chose to load, e.g. `libggml-cpu-zen4.so`. */
function cpuLibrary() {
    const loaded = readFileSync("/proc/self/maps", "utf8").match(/libggml-cpu-[\w-]+\.so/g) ?? [];
    return [...new Set(loaded)].join(", ") || "unknown";
}

function version(name) {
    const manifest = new URL("../package.json", import.meta.resolve(name));
    return JSON.parse(readFileSync(manifest, "utf8")).version;
}

function print({model, package: from, backend, system, threads, batchSize, flashAttention, load, rows}) {
    console.log(`${model}  ${from}  ${backend}  threads ${threads}  batch ${batchSize}  flash attention ${flashAttention}`);
    console.log(system);
    console.log(`load average ${load.before.toFixed(2)} before, ${load.after.toFixed(2)} after`);
    for (const {name, runs, ms, cpuMs, tokensPerSecond} of rows)
        console.log(
            `${name.padEnd(20)} n=${String(runs).padEnd(3)} median ${ms.median.toFixed(1).padStart(9)} ms ` +
            `(${ms.min.toFixed(1)} … ${ms.max.toFixed(1)}), CPU ${cpuMs.median.toFixed(1)} ms (${cpuMs.min.toFixed(1)} …), ` +
            `${tokensPerSecond.median.toFixed(1)} tokens/s, best ${tokensPerSecond.best.toFixed(1)}`
        );
}
