"""Trains, exports and measures the demo pair: a small Llama and its EAGLE-3 draft.

Run `python -m scripts.train_demo_pair --out DIR` from the repository's root. It needs torch,
transformers, tokenizers, safetensors and numpy, one CPU core and about a quarter of an hour.
"""
