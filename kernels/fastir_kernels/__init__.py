"""Fused, exact reinforcement-learning loss kernels for language models."""
