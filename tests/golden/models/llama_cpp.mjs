// What llama.cpp makes of one GGUF file: token ids of strings, and greedy continuations.
//
//   node llama_cpp.mjs MODEL.gguf < {"strings": [...], "prompts": [[id, …], …], "steps": 32} > {"ids": …, "greedy": …}
//
// Special tokens in the strings are recognised, none is added.
import {readFileSync} from "node:fs";
import {getLlama, LlamaLogLevel} from "node-llama-cpp";

const {strings, prompts, steps} = JSON.parse(readFileSync(0, "utf8"));
const llama = await getLlama({gpu: false, build: "never", logLevel: LlamaLogLevel.error, maxThreads: 1});
const model = await llama.loadModel({modelPath: process.argv[2]});
const ids = strings.map((text) => [...model.tokenize(text, true)]);

const context = await model.createContext({contextSize: 1024, sequences: 1, threads: {ideal: 1, min: 1}});
const sequence = context.getSequence();
const greedy = [];
for (const prompt of prompts) {
    await sequence.clearHistory();
    const continuation = [];
    for await (const token of sequence.evaluate(prompt, {temperature: 0, yieldEogToken: true})) {
        continuation.push(token);
        if (continuation.length === steps)
            break;
    }
    greedy.push(continuation);
}
console.log(JSON.stringify({release: llama.llamaCppRelease.release, ids, greedy}));
await llama.dispose();
