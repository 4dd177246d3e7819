"""Executors: run a handler as a coroutine, in a thread, in a child process, or as a program of any language."""
