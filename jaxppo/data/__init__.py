"""Prompts: read once, rendered once, drawn in an order that a seed and a position determine."""
