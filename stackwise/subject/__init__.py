"""Specs of models and training loops, and how to infer them."""
