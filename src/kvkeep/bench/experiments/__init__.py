"""Experiments on the demo's models: each starts servers, measures them and judges the figures."""
