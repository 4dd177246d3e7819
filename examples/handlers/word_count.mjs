#!/usr/bin/env node
// Counts the words of a text: a handler that fails without retry on invalid input and reports its cost.
import { createInterface } from "node:readline";

const tell = (message) => process.stdout.write(JSON.stringify(message) + "\n");

function count({ input }) {
  if (typeof input.text !== "string") {
    tell({ type: "error", error_type: "TypeError", message: "text must be a string", retryable: false });
    return;
  }
  tell({ type: "log", level: "info", message: "counting", details: { characters: input.text.length } });
  tell({ type: "progress", fraction: 0.5, message: "counting" });
  tell({ type: "cost", value: input.text.length / 1e6 });
  tell({ type: "result", output: { words: input.text.split(/\s+/).filter(Boolean).length } });
}

// The worker closes standard input when it has the result: the loop and the program end.
for await (const line of createInterface({ input: process.stdin })) {
  const message = JSON.parse(line);
  if (message.type === "task") count(message);
  if (message.type === "cancel") process.exit(0);
}
