"""Experiments: one question per module."""
