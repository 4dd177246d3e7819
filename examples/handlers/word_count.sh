#!/bin/sh
# Counts the words of a text: a handler in plain shell. It reads one line of JSON and writes lines of JSON.
# (sed extracts the text, to need no other program; with jq it is `jq -r .input.text`.)
set -eu

IFS= read -r task
text=$(printf '%s' "$task" | sed -nE 's/.*"input":\{"text":"(([^"\\]|\\.)*)"\}.*/\1/p' | sed -E 's/\\[nrt]/ /g')

echo "counting" >&2 # standard error goes to the worker's log
printf '{"type":"progress","fraction":0.5,"message":"counting"}\n'
words=$(printf '%s' "$text" | wc -w)
printf '{"type":"result","output":{"words":%d}}\n' "$words"
