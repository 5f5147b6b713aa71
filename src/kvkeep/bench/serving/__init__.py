"""Benchmarks of servers with OpenAI's API: serving, multi-turn, GSM8K, and reports of runs."""
