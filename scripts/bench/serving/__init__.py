"""The end-to-end benchmark: a model shape without weights, the real server, concurrent clients, memory from the log."""
